"""What attention keeps of earlier positions between the forward passes of generation.

Grouped queries keep keys and values, latent attention its latents with their rotated key, an indexer its keys, gated
DeltaNet its state and the inputs of its convolution, compressed attention its inputs. Every layer stores its tensors
under its number.

The first pass reads prompts [B, S], padded on the right. Every other pass reads one token of each sequence, laid out as
one sequence of T = B tokens [1, T], so that layers shard tokens as in training; each has its position.

Shapes: B sequences (T tokens of a later pass), S positions of the first pass, K positions of the cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Tensors of the attention layers of one chunk, for one batch of sequences.

    Args:
        lengths: tokens of the prompts, at least one each.
        max_length: positions to hold, the padding of the first pass included.
        device: of the tensors.

    Attributes:
        is_prefill: the next pass is the first.
        lengths_B: tokens of every sequence, those of the next pass included.
    """

    def __init__(self, lengths: Sequence[int], max_length: int, device: torch.device):
        self.is_prefill, self.max_length = True, max_length
        self.lengths_B = torch.tensor(lengths, device=device)
        self._longest = max(lengths)
        self._tensors: dict[tuple[int, str], Tensor] = {}

    @property
    def last_positions(self) -> Tensor:
        """Positions of every sequence's last token."""
        return self.lengths_B - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def advance(self) -> None:
        """Begin the pass of one more token of every sequence."""
        self.is_prefill, self._longest, self.lengths_B = False, self._longest + 1, self.lengths_B + 1

    def append(self, layer_number: int, name: str, x: Tensor) -> Tensor:
        """Store this pass's x, [S, B, ...] or [T, 1, ...]; return all positions up to the longest text [B, K, ...]."""
        key = layer_number, name
        if self.is_prefill:
            self._tensors[key] = x.new_zeros(x.shape[1], self.max_length, *x.shape[2:])
            self._tensors[key][:, : x.shape[0]] = x.transpose(0, 1)
        else:
            numbers_B = torch.arange(x.shape[0], device=x.device)
            self._tensors[key][numbers_B, self.last_positions] = x.squeeze(1)
        return self._tensors[key][:, : self._longest]

    def visible_positions(self, window: int | None = None, chunk: int | None = None) -> Tensor:
        """Return which positions the last token sees: True = visible.

        Args:
            window: number of positions before it; None for all.
            chunk: size of the chunks, of which it sees its own; None for all positions.
        """
        positions_K = torch.arange(self._longest, device=self.lengths_B.device)
        visible_BK = positions_K < self.lengths_B.unsqueeze(1)
        if window is not None and window >= 0:
            visible_BK &= positions_K >= self.last_positions.unsqueeze(1) - window
        if chunk is not None:
            visible_BK &= positions_K // chunk == self.last_positions.unsqueeze(1) // chunk
        return visible_BK

    def convolution_inputs(self, layer_number: int, x_SBC: Tensor, halo: int) -> Tensor:
        """Return inputs of a causal convolution with the `halo` positions before them, [halo + S, B, C].

        Zeros precede a prompt. A later token is [1, B, C]. Every sequence's last inputs are stored for the next pass.
        """
        earlier = x_SBC.new_zeros(halo, *x_SBC.shape[1:]) if self.is_prefill else self.get(layer_number, "inputs")
        inputs_SBC = torch.cat([earlier, x_SBC])
        ends_B = self.lengths_B if self.is_prefill else torch.ones_like(self.lengths_B)
        last = ends_B + torch.arange(halo, device=ends_B.device).unsqueeze(1)
        self.put(layer_number, "inputs", inputs_SBC[last, torch.arange(len(ends_B), device=ends_B.device)])
        return inputs_SBC

    def put(self, layer_number: int, name: str, state: Tensor) -> None:
        """Replace a state that does not grow."""
        self._tensors[layer_number, name] = state

    def get(self, layer_number: int, name: str) -> Tensor:
        """Return what `put` stored."""
        return self._tensors[layer_number, name]
