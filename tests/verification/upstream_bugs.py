"""Silent bugs that users of other programs reported in 2026, planted in this program.

Every bug is a change at run time, made before the ranks and the one process are forked, so both run the broken code,
as they would if the mistake were in a release. docs/bugs_found.md shows what the proof then prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from moe_trainer.layers import sparse_attention, vocab
from moe_trainer.model import mtp
from moe_trainer.moe import balancing, router
from moe_trainer.optim import finalize, flat_shard, fsdp_shard
from moe_trainer.parallel.params import get_param_info, is_unique_replica
from moe_trainer.training import setup
from moe_trainer.verification.shrink import ParityCase, shrink

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class UpstreamBug:
    """A reported bug.

    Attributes:
        name: on the page.
        report: owner/repository#number.
        flags: of the command line that shows it, after PROVE.
        plant: breaks this program in the same way.
        noticed: a quantity that the proof must name.
        in_megatron_core: whether its model of one process can be run here.
    """

    name: str
    report: str
    flags: str
    plant: Callable[[Patch], None]
    noticed: str
    in_megatron_core: bool = False

    def case(self) -> ParityCase:
        """Return the small command line that the proof makes of it first."""
        words = f"{self.flags} --world-size 2 --mock-data".split()
        preset = [] if "--preset" in words else ["--preset", "mixtral_tiny"]
        return shrink([*preset, *words], ranks=2).cases[0]


def _wrap(patch: Patch, owner: object, name: str, wrapper: Callable) -> None:
    """Replace a function by `wrapper(function, *args, **options)`."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: wrapper(real, *args, **options))


def _scale_balancing(patch: Patch, factor: Callable[[dict], float]) -> None:
    """Multiply the gradient of a router's losses per token by a number that depends on the options of balancing_losses."""

    def scaled(real, logits_TE, settings, **options):
        losses = real(logits_TE, settings, **options)
        return replace(losses, grad_TE=losses.grad_TE * (factor(options) if settings.per_token_loss else 1.0))

    _wrap(patch, router, "balancing_losses", scaled)


def divide_prediction_by_context_ranks(patch: Patch) -> None:
    def forward(real, self, x, states, labels, mask, loss, grad_scale, packed=None):
        return real(self, x, states, labels, mask, loss, grad_scale / self.sequence.cp.size, packed)

    _wrap(patch, mtp.MTPLosses, "forward", forward)


def scale_balancing_by_local_tokens(patch: Patch) -> None:
    _scale_balancing(patch, lambda options: 1 / options["ps"].tp_cp.size)


def divide_balancing_by_sequences(patch: Patch) -> None:
    _scale_balancing(patch, lambda options: 1 / options["num_sequences"])


def divide_by_microbatches(patch: Patch) -> None:
    """Counts of packs of all sizes are divided by their number, and scaled as if all had the size of the last one."""

    def weights(real, *args):
        sums_E, steps = args[4]
        before = sums_E.sum()
        result = real(*args)
        now = sums_E.sum()
        return result * (now / (now - before) / steps)

    _wrap(patch, balancing, "_loss_weights", weights)


def count_experts_of_first_tensor_rank(patch: Patch) -> None:
    _count(patch, lambda info: info.kind == "expert")


def count_sinks_of_first_tensor_rank(patch: Patch) -> None:
    _count(patch, lambda info: info.names[0].endswith("softmax_offset"))


def _count(patch: Patch, is_forgotten: Callable) -> None:
    """Count parameters in the gradient norm on tensor rank 0 only."""
    patch.setattr(
        flat_shard,
        "is_unique_replica",
        lambda info, ps: is_unique_replica(info, ps) and not (is_forgotten(info) and ps.tp.rank),
    )


def skip_head_norm(patch: Patch) -> None:
    """Leave out the sum of a norm's partial gradients, as if only sequence parallelism made them partial."""

    def sum_over(real, grads, group, selects):
        real(grads, group, lambda info: selects(info) and "out_norm" not in info.names[0])

    _wrap(patch, finalize, "_sum_over", sum_over)


def divide_indexer_by_context_ranks(patch: Patch) -> None:
    def attach(real, self, y, loss, grads, index, grad_scale, sequence, *rest):
        return real(self, y, loss, grads, index, grad_scale / sequence.cp.size, sequence, *rest)

    _wrap(patch, sparse_attention.SparseAttention, "_attach", attach)


def divide_prediction_by_local_tokens(patch: Patch) -> None:
    def init(real, self, args, ps):
        real(self, args, ps)
        self.is_global = False

    _wrap(patch, mtp.MTPLosses, "__init__", init)


def add_gathered_logits(patch: Patch) -> None:
    """Every tensor rank has the logits of the full vocabulary, and takes them for its shard."""

    def loss_of_columns(real, logits, rows, mine, group, kernels):
        loss_T, share_T = real(logits, rows, mine, group, kernels)
        return loss_T + math.log(group.size), share_T / group.size

    _wrap(patch, vocab, "_loss_of_columns", loss_of_columns)


def double_unsharded_sums(patch: Patch) -> None:
    """The sum of a parameter that one rank holds is added to itself after every microbatch but the last."""

    def end_microbatch(real, self):
        real(self)
        for slot in self.slots:
            if self.is_last or self.group_sizes[get_param_info(slot.param).kind] > 1:
                continue
            fsdp_shard.shard_at(self._sums.get(slot.param, slot.param.grad), slot.start).mul_(2)

    def init(real, self, params, ps, **options):
        real(self, params, ps, **options)
        self.group_sizes, self.is_last = {"dense": ps.dp_cp.size, "expert": ps.edp.size}, False

    def finish(real, self):
        self.is_last = True
        real(self)
        self.is_last = False

    _wrap(patch, fsdp_shard.FsdpGrads, "__init__", init)
    _wrap(patch, fsdp_shard.FsdpGrads, "_end_microbatch", end_microbatch)
    _wrap(patch, fsdp_shard.FsdpGrads, "finish", finish)


def reduce_experts_over_data_ranks(patch: Patch) -> None:
    """Experts are replicated over the ranks of edp, and reduced over those of dense parameters."""
    _wrap(
        patch,
        setup,
        "plan_layouts",
        lambda real, params, ps, *rest, **options: real(
            params, replace(ps, edp=ps.dp_cp, edp_inner=ps.dp_cp_inner, edp_outer=ps.dp_cp_outer), *rest, **options
        ),
    )


TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PER_TOKEN = "--calculate-per-token-loss"
SEQ_AUX = "--moe-router-load-balancing-type seq_aux_loss"
ROUTER = "gradient (step 1) of decoder.layers.1.mlp.router.weight"
EXPERT = "gradient (step 1) of decoder.layers.1.mlp.experts.local_experts.7.linear_fc2.weight"
MEGATRON = "NVIDIA/Megatron-LM"

BUGS = (
    UpstreamBug(
        "logits of the full vocabulary",
        f"{MEGATRON}#7452",
        TENSOR,
        add_gathered_logits,
        "lm loss (step 1)",
        in_megatron_core=True,
    ),
    UpstreamBug(
        "per-token multi-token prediction",
        f"{MEGATRON}#7452",
        f"--micro-batch-size 2 --mtp-num-layers 1 --mtp-loss-per-token {PER_TOKEN} {SEQ_AUX}",
        divide_prediction_by_local_tokens,
        "gradient (step 1) of mtp.layers.0.final_layernorm.weight",
    ),
    UpstreamBug(
        "attention sinks in the norm",
        f"{MEGATRON}#7452",
        f"{TENSOR} --softmax-type learnable",
        count_sinks_of_first_tensor_rank,
        "gradient norm (step 1)",
        in_megatron_core=True,
    ),
    UpstreamBug(
        "head norm of gated DeltaNet",
        f"{MEGATRON}#7452",
        "--preset qwen3_next_tiny --tensor-model-parallel-size 2",
        skip_head_norm,
        "gradient (step 1) of decoder.layers.0.self_attention.out_norm.weight",
    ),
    UpstreamBug(
        "experts in the norm",
        f"{MEGATRON}#5916",
        f"{TENSOR} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        count_experts_of_first_tensor_rank,
        "gradient norm (step 1)",
        in_megatron_core=True,
    ),
    UpstreamBug(
        "experts without tensor parallelism",
        f"{MEGATRON}#5916",
        f"{TENSOR} --expert-tensor-parallel-size 1",
        reduce_experts_over_data_ranks,
        EXPERT,
        in_megatron_core=True,
    ),
    UpstreamBug(
        "multi-token prediction under context parallelism",
        f"{MEGATRON}#3959",
        "--context-parallel-size 2 --mtp-num-layers 1",
        divide_prediction_by_context_ranks,
        "gradient (step 1) of mtp.layers.0.final_layernorm.weight",
    ),
    UpstreamBug(
        "per-token auxiliary loss",
        f"{MEGATRON}#5047",
        f"{TENSOR} {PER_TOKEN} --moe-z-loss-coeff 1e-3",
        scale_balancing_by_local_tokens,
        ROUTER,
        in_megatron_core=True,
    ),
    UpstreamBug(
        "sequence loss and micro-batch size",
        f"{MEGATRON}#5798",
        f"--micro-batch-size 2 {PER_TOKEN} {SEQ_AUX}",
        divide_balancing_by_sequences,
        ROUTER,
        in_megatron_core=True,
    ),
    UpstreamBug(
        "global loss of packs",
        f"{MEGATRON}#7213",
        "--expert-model-parallel-size 2 --use-varlen-dataset --moe-router-load-balancing-type global_aux_loss",
        divide_by_microbatches,
        ROUTER,
    ),
    UpstreamBug(
        "indexer loss under context parallelism",
        f"{MEGATRON}#3674",
        "--preset deepseek_v3_2_tiny --context-parallel-size 2 --cp-comm-type allgather",
        divide_indexer_by_context_ranks,
        "gradient (step 1) of mtp.layers.0.mtp_model_layer.self_attention.core_attention.indexer.linear_wk.weight",
    ),
    UpstreamBug(
        "sharded gradients of one rank",
        f"{MEGATRON}#6660",
        "--expert-model-parallel-size 2 --use-megatron-fsdp --use-distributed-optimizer "
        "--data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor",
        double_unsharded_sums,
        EXPERT,
        in_megatron_core=True,
    ),
)
"""Each is on the page."""
