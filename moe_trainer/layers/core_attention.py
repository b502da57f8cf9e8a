"""The parameter-free heart of attention: scores, mask, softmax, values."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.attention import SDPBackend

from arguments.layer_pattern import left_window, uses_chunks
from arguments.mechanisms.attention_backend_kinds.declaration import AttentionBackendCapability
from arguments.mechanisms.attention_backends import FLASH, FUSED, LOCAL_UNFUSED, UNFUSED, get_attention_backend
from arguments.model import ModelArgs
from moe_trainer.errors import UserError
from moe_trainer.layers.init import hidden_std, make_parameter
from moe_trainer.layers.kv_cache import KVCache
from moe_trainer.layers.ring_attention import ring_attention
from moe_trainer.memory.cuda_graph import CudaGraphs
from moe_trainer.ops import varlen_attention
from moe_trainer.ops.attention import attention, chunk_mask, should_pad_values, sliding_window_mask
from moe_trainer.ops.block_attention import BlockMask, Documents
from moe_trainer.ops.flash_attention import CUDA_WIDTH
from moe_trainer.ops.packed_sequences import Packed, PackedOnDevice
from moe_trainer.ops.transfer import to_device
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import Group

BACKENDS = MappingProxyType(
    {
        FLASH.key: SDPBackend.FLASH_ATTENTION,
        FUSED.key: SDPBackend.CUDNN_ATTENTION,
        UNFUSED.key: SDPBackend.MATH,
        LOCAL_UNFUSED.key: SDPBackend.MATH,
    }
)
"""Torch's kernel by the key of the declaration; none where torch chooses."""


def backend_problem(model: ModelArgs, params_dtype: str, cuda: bool) -> str | None:
    """Return why the local layers cannot use the kernel of --attention-backend; None if they may, or it is auto.

    Windows, dropout and what cuDNN supports are left to torch, which checks them when it computes.
    """
    backend = get_attention_backend(model)
    if backend.key not in BACKENDS:
        return None
    if not cuda:
        return "the kernels run on CUDA devices, and this rank computes on a CPU"
    if params_dtype == "fp32" and (problem := backend.reason(AttentionBackendCapability.FP32)):
        return problem
    width = model.qk_head_dim + model.qk_pos_emb_head_dim if model.multi_latent_attention else model.kv_channels
    if backend is FLASH and width > CUDA_WIDTH:
        return f"its kernel takes heads of up to {CUDA_WIDTH} channels, and these have {width}"
    return None


@dataclass(frozen=True)
class PackedBorders:
    """Where packed sequences begin and end.

    Args:
        documents: the sequences as documents.
        cu_seqlens: cumulative lengths with padding, int32 where attention computes.
    """

    packed: Packed
    documents: Documents
    cu_seqlens: Tensor

    def of_chunks(self, size: int, device: torch.device) -> Tensor:
        """Return the cumulative lengths of the sequences cut into chunks, int32, the same for all layers."""
        derived = self.documents.derived
        if -size not in derived:  # groups have positive sizes
            lengths = self.packed.padded_lengths
            cut = [min(size, each - first) for each in lengths for first in range(0, each, size)]
            derived[-size] = to_device(torch.tensor([0, *itertools.accumulate(cut)], dtype=torch.int32), device)
        return derived[-size]


@dataclass(frozen=True)
class AttentionMask:
    """What a query may attend to, in addition to the causal rule and the layer's window.

    Args:
        mask: bool [B or 1, 1, S, S], True = visible; replaces the causal rule.
        documents: of the full sequence; a query sees its own document only, without an [S, S] mask.
        borders: of packed sequences, which are documents then.
        cache: of earlier positions, in generation; every other field is None then.
    """

    mask: Tensor | None = None
    documents: Documents | None = None
    borders: PackedBorders | None = None
    cache: KVCache | None = None

    @property
    def packed(self) -> Packed | None:
        """The lengths of packed sequences."""
        return None if self.borders is None else self.borders.packed

    @staticmethod
    def of(
        attention_mask: Tensor | None,
        document_ids_BS: Tensor | None,
        device: torch.device = torch.device("cpu"),
        packed: Packed | None = None,
    ) -> "AttentionMask | None":
        """Build the mask of a batch; None if only the causal rule applies.

        Args:
            attention_mask: True = hidden (Megatron's convention).
            document_ids_BS: of every position of the full sequence; see Documents.of.
            device: where attention computes.
            packed: lengths of packed sequences, instead of document ids.

        Raises:
            ValueError: if both are given, or ids decrease.
        """
        if packed is not None:
            documents = Documents.of(packed.ids(), device, packed.padded_lengths)
            cu_seqlens = to_device(torch.as_tensor(packed.cu_seqlens_padded, dtype=torch.int32), device)
            return AttentionMask(documents=documents, borders=PackedBorders(packed, documents, cu_seqlens))
        if attention_mask is not None and document_ids_BS is not None:
            raise ValueError("give an attention mask or document ids, not both")
        if document_ids_BS is not None:
            return AttentionMask(documents=Documents.of(document_ids_BS, device))
        return None if attention_mask is None else AttentionMask(mask=~attention_mask)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of packed sequences, () for one sequence."""
        return () if self.packed is None else self.packed.padded_lengths

    @property
    def cp_size(self) -> int | None:
        """Number of ranks that share the sequences; None for that of all microbatches."""
        return None if self.packed is None else self.packed.cp_size

    def static_copy(self, graphs: CudaGraphs) -> "AttentionMask":
        """Return the mask with what changes from batch to batch in the static inputs that captured parts read."""
        if self.documents is None or not self.documents.is_static:
            return self
        documents, borders = Documents.of(graphs.hold(self.documents.ids_BS)), self.borders
        if borders is not None:
            packed, cu_seqlens = borders.packed, borders.cu_seqlens
            if isinstance(packed, PackedOnDevice):
                cu_seqlens = graphs.hold(packed.cu_seqlens_padded)
                packed = replace(packed, lengths=graphs.hold(packed.lengths), cu_seqlens_padded=cu_seqlens)
            borders = PackedBorders(packed, documents, cu_seqlens)
        return AttentionMask(documents=documents, borders=borders)


def make_attention_sinks(model: ModelArgs, name: str, tp: Group) -> Parameter | None:
    """Return the learned sinks (--softmax-type learnable) of the local query heads, [N / tp]; None without."""
    if model.softmax_type != "learnable":
        return None
    return make_parameter(
        (model.num_attention_heads // tp.size,),
        ParamInfo(
            (f"{name}.core_attention.softmax_offset",),
            sharded_dim=0,
            shard_rank=tp.rank,
            shard_count=tp.size,
            init="normal",
            init_std=hidden_std(model),
        ),
    )


@contextlib.contextmanager
def _without_traceback(backend: SDPBackend | None, q_SBND: Tensor) -> Iterator[None]:
    """Turn torch's error for a kernel that cannot run into one of the user."""
    try:
        yield
    except RuntimeError as error:
        if backend is None or "No available kernel" not in str(error):
            raise
        raise UserError(
            f"torch's {backend.name.lower()} kernel cannot compute queries of shape "
            f"{' x '.join(map(str, q_SBND.shape))} in {str(q_SBND.dtype)[6:]} here: use --attention-backend auto"
        ) from error


class CoreAttention(nn.Module):
    """Causal attention of one layer over the full sequence.

    Supports a sliding window or chunks, an explicit mask or packed documents, and dropout. With sinks (--softmax-type)
    every head has an extra key whose value is zero. The softmax is always fp32, so --attention-softmax-in-fp32 and
    --apply-query-key-layer-scaling (which guards fp16 scores against overflow) have no effect.
    """

    def __init__(
        self,
        model: ModelArgs,
        layer_number: int,
        *,
        head_dim: int,
        scale: float | None = None,
        backend: SDPBackend | None = None,
    ):
        """Create the attention of a layer.

        Args:
            head_dim: width of a key.
            scale: of the scores; None for 1/sqrt(head_dim).
            backend: torch's kernel; None for torch's choice. Attention in blocks (context parallelism, packed
                documents, sinks) is by flash kernels, with SDPBackend.MATH by plain matmuls.
        """
        super().__init__()
        self.backend = backend
        self.has_sinks, self.one_more = model.softmax_type != "vanilla", model.softmax_type == "off-by-one"
        self.scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        self.dropout_p = model.attention_dropout
        self.should_save_inputs = False  # instead of what is made of them: where inputs are not saved
        self.value_width: int | None = None  # of values that may come padded; see should_pad_values
        self.window = left_window(model, layer_number)
        self.chunk = model.attention_chunk_size if uses_chunks(model, layer_number) else None
        self._local_group = Group.single("one rank")

    def forward(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGE: Tensor,
        visible: AttentionMask | None = None,
        sink_N: Tensor | None = None,
    ) -> Tensor:
        """Return [S, B, N * E].

        Args:
            visible: None for the causal rule only.
            sink_N: learned sinks.

        Raises:
            ValueError: for sinks with an explicit mask.
            UserError: if the kernel of --attention-backend cannot compute this.
        """
        if self._goes_by_blocks(visible):
            borders = None if visible is None else visible.borders
            if borders is not None and self._can_attend_by_sequence(q_SBND, v_SBGE):
                return self._attend_by_sequence(borders, q_SBND, k_SBGD, v_SBGE)
            block_mask = self.block_mask(visible, q_SBND.device)
            return ring_attention(
                q_SBND, k_SBGD, v_SBGE, self.scale, block_mask, self._local_group, self.sinks(q_SBND, sink_N)
            )
        mask = None if visible is None else visible.mask
        if self.chunk is not None and q_SBND.shape[0] > self.chunk:
            if mask is None:
                return self._attend_to_chunks(self.chunk, q_SBND, k_SBGD, v_SBGE)
            mask = mask & chunk_mask(q_SBND.shape[0], self.chunk, q_SBND.device)
        return self._attend(q_SBND, k_SBGD, v_SBGE, mask)

    def _attend_to_chunks(self, size: int, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> Tensor:
        """Attend in chunks as if they were sequences of a batch; the last one may be shorter."""
        whole = q_SBND.shape[0] // size * size
        first = [x[:whole].unflatten(0, (-1, size)).transpose(0, 1).flatten(1, 2) for x in (q_SBND, k_SBGD, v_SBGE)]
        out_SBH = self._attend(*first).unflatten(1, (-1, q_SBND.shape[1])).transpose(0, 1).flatten(0, 1)
        if whole == q_SBND.shape[0]:
            return out_SBH
        return torch.cat([out_SBH, self._attend(q_SBND[whole:], k_SBGD[whole:], v_SBGE[whole:])])

    def _attend(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend by torch's kernels, or by matmuls."""
        dropout_p = self.dropout_p if self.training else 0.0
        if self.window is not None and self._window_cuts(q_SBND.shape[0]):
            by_flash = self.backend in (None, SDPBackend.FLASH_ATTENTION)
            if mask is None and by_flash and self._varlen_supports(q_SBND, v_SBGE):
                return self._attend_in_window(self.window, q_SBND, k_SBGD, v_SBGE)
            window = sliding_window_mask(q_SBND.shape[0], self.window, q_SBND.device)
            mask = window if mask is None else mask & window
        with _without_traceback(self.backend, q_SBND):
            return attention(
                q_SBND,
                k_SBGD,
                v_SBGE,
                self.scale,
                mask,
                dropout_p,
                self.should_save_inputs,
                self.value_width,
                self.backend,
            )

    def _attend_in_window(self, window: int, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> Tensor:
        """Attend to the last keys of every sequence by the kernels for packed sequences, without an [S, S] mask."""
        seq_len, batch = q_SBND.shape[:2]
        q_TND, k_TGD, v_TGE = (x.transpose(0, 1).flatten(0, 1) for x in (q_SBND, k_SBGD, v_SBGE))
        out_TNE = varlen_attention.varlen_attention(
            q_TND,
            k_TGD,
            v_TGE,
            torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device=q_SBND.device),
            seq_len,
            self.scale,
            window,
        )
        out_BSNE = out_TNE[..., : self.value_width].unflatten(0, (batch, seq_len))
        return out_BSNE.transpose(0, 1).flatten(2).contiguous()

    def sinks(self, q_SBND: Tensor, learned_N: Tensor | None) -> Tensor | None:
        """Return the score of every head's extra key, fp32 or wider; zero for --softmax-type off-by-one."""
        wide = torch.promote_types(q_SBND.dtype, torch.float32)
        if self.one_more:
            return torch.zeros(q_SBND.shape[2], dtype=wide, device=q_SBND.device)
        return None if learned_N is None else learned_N.to(wide)

    def decode_options(
        self, q_SBND: Tensor, cache: KVCache, learned_N: Tensor | None
    ) -> tuple[float, Tensor, Tensor | None]:
        """Return what attention to a cache depends on besides its tensors: scale, visible positions, sinks."""
        return self.scale, cache.visible_positions(self.window, self.chunk), self.sinks(q_SBND, learned_N)

    def _goes_by_blocks(self, visible: AttentionMask | None) -> bool:
        if self.has_sinks and visible is not None and visible.mask is not None:
            raise ValueError(
                "attention sinks (--softmax-type) are not built for explicit attention masks; give document ids"
            )
        return self.has_sinks or (visible is not None and visible.documents is not None)

    def _can_attend_by_sequence(self, q_SBND: Tensor, v_SBGE: Tensor) -> bool:
        """Return whether kernels for packed sequences support this attention."""
        by_kernel = self.backend != SDPBackend.MATH and not self.has_sinks
        return by_kernel and self._varlen_supports(q_SBND, v_SBGE)

    def _varlen_supports(self, q_SBND: Tensor, v_SBGE: Tensor) -> bool:
        has_dropout = self.training and self.dropout_p > 0.0
        return not has_dropout and varlen_attention.can_run(q_SBND[:, 0], v_SBGE[:, 0])

    def _attend_by_sequence(self, borders: PackedBorders, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor) -> Tensor:
        cu_seqlens, longest = borders.cu_seqlens, borders.packed.max_seqlen
        if self.chunk is not None and self.chunk < longest:
            cu_seqlens, longest = borders.of_chunks(self.chunk, q_SBND.device), self.chunk
        out_SNE = varlen_attention.varlen_attention(
            q_SBND[:, 0],
            k_SBGD[:, 0],
            v_SBGE[:, 0],
            cu_seqlens,
            longest,
            self.scale,
            -1 if self.window is None else self.window,
        )
        return out_SNE.flatten(1).unsqueeze(1)

    def should_pad_values(self, length: int, visible: AttentionMask | None, device: torch.device) -> bool:
        """Return whether values will be padded to the width of keys, so that they may be passed padded."""
        if self._goes_by_blocks(visible):
            return False
        masked = visible is not None or self._window_cuts(length)
        length = length if masked or self.chunk is None else min(length, self.chunk)
        return should_pad_values(length, masked, self.dropout_p if self.training else 0.0, device)

    def _window_cuts(self, length: int) -> bool:
        return self.window is not None and 0 <= self.window < length

    def block_mask(self, visible: AttentionMask | None, device: torch.device) -> BlockMask:
        """Return the mask of blockwise attention. Dropout draws a seed from the device's global generator."""
        dropout_p = self.dropout_p if self.training else 0.0
        return BlockMask(
            left=-1 if self.window is None else self.window,
            chunk=self.chunk or 0,
            documents=None if visible is None else visible.documents,
            dropout_p=dropout_p,
            seed=int(torch.randint(1 << 62, (), device=device)) if dropout_p > 0.0 else 0,
            fused=self.backend != SDPBackend.MATH,
        )
