"""Compare a model of this program with Megatron-Core's, module by module, from the same weights and tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arguments import Arguments
from moe_trainer.checkpoint.rank_memory import global_name
from moe_trainer.moe.balancing import LOSS_NAMES
from moe_trainer.verification.megatron_core.model import (
    build_megatron_model,
    copy_weights,
    megatron_core_version,
    on_cpu,
    take,
    take_logged_losses,
)

TOLERANCE = 1e-5
"""Largest difference that counts as equal, relative to the largest value of the tensor: rounding of fp32."""

_COMPARED = re.compile(r"\.(self_attention|router|mlp)$")
_TITLES = MappingProxyType({"self_attention": "attention", "router": "router probabilities", "mlp": "MLP"})


class ComparedRow(NamedTuple):
    """One line of the comparison.

    Attributes:
        what: what is compared.
        ours: value, or number of values.
        theirs: the same of Megatron-Core.
        difference: the largest, relative to the largest value of its tensor.
        where: its tensor.
    """

    what: str
    ours: str
    theirs: str
    difference: float
    where: str = ""


@dataclass(frozen=True)
class MegatronComparison:
    """Result of a comparison."""

    version: str
    parameters: int
    tokens: int
    rows: tuple[ComparedRow, ...]

    @property
    def largest(self) -> ComparedRow:
        """The row with the largest difference; NaN is the largest of all."""
        return max(self.rows, key=lambda row: _with_nan_last(row.difference))

    @property
    def is_equal(self) -> bool:
        """Whether every difference is within TOLERANCE."""
        return self.largest.difference <= TOLERANCE


def compare(
    args: Arguments, network: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], vocab_size: int, seed: int
) -> MegatronComparison:
    """Run both models forward and backward on the same random tokens.

    Args:
        args: flags, for one process and in fp32, without dropout.
        network: this program's model, on the CPU, in training mode.
        loss_of: runs it: tokens and labels, int64 [B, S], to the loss of every token, fp32 [B, S].
        vocab_size: rows of the embedding, with padding.
        seed: of the tokens.

    Raises:
        UserError: if there is no Megatron-Core.
        ValueError: if Megatron-Core's model has other parameters, or leaves open what it computes.
    """
    version = megatron_core_version()
    if args.moe.moe_expert_capacity_factor is not None and args.moe.moe_token_drop_policy == "position":
        raise ValueError(
            "--moe-token-drop-policy position: Megatron-Core drops what torch.topk leaves out among equal values, "
            "which is not defined; compare with probs"
        )
    sequences, length = args.training.micro_batch_size, args.data.seq_length
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(vocab_size, (sequences, length + 1), generator=generator)
    tokens_BS, labels_BS = ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()
    take_logged_losses()  # of earlier models
    with on_cpu():
        megatron = build_megatron_model(args, vocab_size)
        copy_weights(network, megatron)
        with _outputs(network) as ours:
            our_loss_BS = loss_of(tokens_BS, labels_BS)
        our_loss_BS.mean().backward()
        with _outputs(megatron) as theirs:
            positions_BS = torch.arange(length).expand(sequences, length)
            mask_SS = torch.ones(length, length).triu(1).bool()[None, None]
            loss_mask_BS = torch.ones(sequences, length)
            their_loss_BS = megatron(tokens_BS, positions_BS, mask_SS, labels=labels_BS, loss_mask=loss_mask_BS)
        their_loss_BS.mean().backward()
        rows = [_numbers("lm loss", our_loss_BS.mean(), their_loss_BS.mean())]
        rows.append(_largest("loss of a token", [("", our_loss_BS, their_loss_BS)]))
        logged, megatron_logged = _logged_losses(network), take_logged_losses()
        rows += [_numbers(name, value, megatron_logged[name]) for name, value in logged.items()]
    rows += _module_rows(ours, theirs)
    rows.append(_gradient_row(network, megatron))
    parameters = sum(each.numel() for each in network.parameters())
    return MegatronComparison(version, parameters, tokens_BS.numel(), tuple(rows))


@contextmanager
def _outputs(network: nn.Module) -> Iterator[dict[str, Any]]:
    """Collect the outputs of attention, routers and MLPs by name while the context is open."""
    found: dict[str, Any] = {}
    with ExitStack() as hooks:
        for name, module in network.named_modules():
            if _COMPARED.search(name):
                name = global_name(name, 0, 0)

                def keep(_module: nn.Module, _inputs: Any, output: Any, name: str = name) -> None:
                    found[name] = output

                hooks.callback(module.register_forward_hook(keep).remove)
        yield found


def _logged_losses(network: nn.Module) -> dict[str, Tensor]:
    """Return balancing losses and that of multi-token prediction, without those that are zero."""
    sums = [module.get_buffer("loss_sums") for module in network.modules() if hasattr(module, "loss_sums")]
    totals = torch.stack(sums).double().sum(0) if sums else torch.zeros(len(LOSS_NAMES))
    losses = {name: total for name, total in zip(LOSS_NAMES, totals) if total}
    mtp_losses = getattr(network, "mtp_losses", None)
    if mtp_losses is not None:
        losses["mtp loss"] = (mtp_losses.losses[0] / mtp_losses.losses[1]).sum()
    return losses


def _module_rows(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[ComparedRow]:
    """Compare outputs by kind of module, and the experts that were chosen."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"modules of one model only: {', '.join(sorted(ours.keys() ^ theirs.keys()))}")
    for kind, title in _TITLES.items():
        names = [name for name in ours if name.endswith(f".{kind}")]
        experts = [name for name in names if f"{name}.router" in ours]
        for of, part in ((title, [each for each in names if each not in experts]), ("MoE layer", experts)):
            if part:
                yield _largest(of, [(name, _first(ours[name]), _first(theirs[name])) for name in part])
    routers = [name for name in ours if name.endswith(".router")]
    chosen = sum(int(ours[name][1].sum()) for name in routers)
    same = sum(int((ours[name][1] & theirs[name][1]).sum()) for name in routers)
    other = sum(int((ours[name][1] ^ theirs[name][1]).sum()) for name in routers)
    if routers:
        yield ComparedRow("experts of a token", f"{chosen:,} choices", f"{same:,} of them", float(other))


def _gradient_row(network: nn.Module, megatron: nn.Module) -> ComparedRow:
    gradients = {name: each.grad for name, each in network.named_parameters() if each.grad is not None}
    pairs = []
    for name, each in megatron.named_parameters():
        mine = take(gradients, name)
        if (mine is None) != (each.grad is None):
            raise ValueError(f"one model only has a gradient of {name}")
        if mine is not None and each.grad is not None:
            pairs.append((name, mine, each.grad))
    return _largest("gradients", pairs)


def _with_nan_last(difference: float) -> tuple[bool, float]:
    return math.isnan(difference), difference


def _first(output: Any) -> Tensor:
    """Return a module's output without the bias or the routing map that Megatron-Core's modules return with it."""
    return output[0] if isinstance(output, tuple) else output


def _numbers(what: str, ours: Tensor, theirs: Tensor) -> ComparedRow:
    mine, other = float(ours), float(theirs)
    return ComparedRow(what, f"{mine:.7f}", f"{other:.7f}", abs(mine - other) / max(abs(other), 1e-30))


def _largest(what: str, tensors: list[tuple[str, Tensor, Tensor]]) -> ComparedRow:
    """Return the row of the tensor that differs most; tensors are (name, ours, Megatron-Core's)."""
    found = []
    for name, ours, theirs in tensors:
        scale = theirs.detach().abs().max().clamp_min(1e-30)
        found.append((float((ours.detach() - theirs.detach()).abs().max() / scale), name))
    difference, where = max(found, key=lambda each: _with_nan_last(each[0]))
    count = f"{sum(each.numel() for _, each, _ in tensors):,} values"
    return ComparedRow(what, count, count, difference, where)
