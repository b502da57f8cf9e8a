"""The parity check passes for the program as it is, and detects planted mistakes that are common in parallel trainers.

Each mistake is planted before the ranks are forked, and acts only if a group has several ranks, so the references are
those of processes that were forked before, and computed once.
"""

import pytest
import torch

from moe_trainer.moe import balancing, layer, router
from moe_trainer.optim import finalize, grad_buffer
from moe_trainer.parallel import sequence
from moe_trainer.parallel.params import get_param_info
from moe_trainer.verification import parity
from moe_trainer.verification.comparison import ComparisonRow
from moe_trainer.verification.parity import (
    ParityResult,
    check_parity,
    find_stable_reference,
    train_case,
    train_reference,
)
from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import ParityCase, as_is

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --normalization RMSNorm --swiglu --disable-bias-linear "
    "--position-embedding-type rope --init-method-std 0.2 --num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --adam-eps 1e-5 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 0 --train-iters 3 --mock-data --tokenizer-type NullTokenizer --vocab-size 120 --make-vocab-size-divisible-by 16 "
    "--transformer-impl local"
).split()
TP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP = ["--pipeline-model-parallel-size", "2"]
CP = ["--context-parallel-size", "2"]
EP = ["--expert-model-parallel-size", "2"]
CAPACITY = ["--moe-expert-capacity-factor", "0.7"]
MTP = ["--mtp-num-layers", "1"]
FINE = "--G-I 4 --G-O 2 --R-I 1 --R-O 1 --moe-router-score-function softmax --moe-router-load-balancing-type seq_aux_loss".split()
DELTA = (
    "--norm-epsilon 1e-2 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 8"
).split()
SPARSE = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 1"
).split()
PACKED = (
    "--use-varlen-dataset --global-batch-size 8 --max-seqlen-per-dp-cp-rank 32 --pad-packed-seq-alignment 8 "
    "--thd-max-packed-sequences 4"
).split()
DYNAMIC = "--use-varlen-dataset --dynamic-context-parallel --calculate-per-token-loss --global-batch-size 8 --max-seqlen-per-dp-cp-rank 8".split()
NO_BIAS = "--moe-router-enable-expert-bias=false"
GLOBAL = ["--moe-router-load-balancing-type", "global_aux_loss"]
PER_TOKEN = ["--calculate-per-token-loss", "--moe-router-load-balancing-type", "seq_aux_loss"]  # other microbatches


run_references, PERTURBATIONS = parity._run_references, parity.PERTURBATIONS


class CleanPool(RankPool):
    """Processes that no planted mistake reaches, and the references that they have computed."""

    def __init__(self, size: int):
        super().__init__(size)
        self.references = {}
        self.run(max, 1)  # fork them now

    def run(self, work, world_size, *args):
        return super().run(with_steps, world_size, parity.STEPS, work, *args)

    def run_each(self, work, arguments):
        return super().run_each(with_steps, [(parity.STEPS, work, *args) for args in arguments])

    def run_references(self, _, *args):
        """Take the place of parity._run_references."""
        key = (parity.STEPS, *args)
        if key not in self.references:
            self.references[key] = run_references(self, *args)
        return self.references[key]


def with_steps(rank, n, steps, work, *args):
    parity.STEPS = steps
    return work(rank, n, *args)


@pytest.fixture(scope="module", autouse=True)
def clean_pool():
    """Share references, with one perturbation each, which is also the one that confirms a difference."""
    with pytest.MonkeyPatch.context() as patch, CleanPool(3) as pool:
        patch.setattr(parity, "PERTURBATIONS", PERTURBATIONS[:1])
        patch.setattr(parity, "EXTRA_PERTURBATIONS", PERTURBATIONS[:1])
        patch.setattr(parity, "_run_references", pool.run_references)
        yield pool


def make_case(*flags: str, ranks: int = 2) -> ParityCase:
    """Two microbatches for each data rank, unless the flags say otherwise."""
    one_data_rank = ranks == 2 and any(name in flags for name in (TP[0], PP[0], CP[0]))
    return as_is([*MODEL, *(["--global-batch-size", "2"] if one_data_rank else []), *flags], ranks)


def run_parity(*flags: str, ranks: int = 2, steps: int = 2, shared: bool = True) -> ParityResult:
    """Check a case on new ranks. shared: with the references of the clean processes."""
    with pytest.MonkeyPatch.context() as patch, RankPool(max(ranks, 2)) as pool:
        patch.setattr(parity, "STEPS", steps)
        if not shared:
            patch.setattr(parity, "_run_references", run_references)
        return check_parity(pool, make_case(*flags, ranks=ranks))


def assert_equal(pool: RankPool, case: ParityCase) -> None:
    result = check_parity(pool, case)
    differences = map(str, result.differences[:4])
    assert result.is_equal, (str(case.mapping), " ".join(case.argv), result.failure[-2000:], *differences)
    assert "gradients within" in result.agreement


def test_mappings_equal_one_process(clean_pool, monkeypatch):
    """Two steps of every kind of mapping; one of what they leave alike, with its gradients, update and validation."""
    latent = ["--moe-latent-size", "6"]
    for flags in ([*TP, *latent], PP, [*CP, *MTP, *CAPACITY], [*EP, *GLOBAL, *latent]):
        assert_equal(clean_pool, make_case(*flags))
    cases = [[*TP, *CAPACITY], [*latent, *TP[:2]], [*PER_TOKEN, *EP], [*PER_TOKEN, *CP, "--micro-batch-size", "2"]]
    cases += [
        [*PACKED, *TP, *CAPACITY],
        [*PACKED, *CP, *MTP, "--sequence-packing-scheduler", "cost_balanced"],
        [*PACKED, *CP, *MTP, "--mtp-loss-per-token", "--calculate-per-token-loss"],
        [*PACKED, *EP, *GLOBAL],
        [*PACKED, *EP, *GLOBAL, "--calculate-per-token-loss"],
        [*PACKED, *EP, *CAPACITY, "--moe-token-drop-policy", "position"],
        [*PACKED, *EP, *CAPACITY, "--moe-pad-expert-input-to-capacity", "--pad-packed-seq-alignment", "max"],
        [*PACKED, *PP, "--thd-tail-padding-policy", "extend_last"],
    ]
    cases += [[NO_BIAS, *FINE, *flags] for flags in (TP, EP)]
    exchanged = [*CP, "--cp-comm-type", "a2a", "--reset-attention-mask"]
    cases += [[*DELTA, *flags] for flags in (TP, PP, CP, TP[:2], exchanged)]
    gathered = [*CP, "--cp-comm-type", "allgather"]
    # chunks without a parameter that learns
    frozen = [*PP, "--pipeline-model-parallel-layout", "E|t|t|L", "--dsa-indexer-warmup"]
    cases += [[*SPARSE, *flags] for flags in ([*TP, "--dsa-indexer-use-sparse-loss"], gathered, frozen)]
    monkeypatch.setattr(parity, "STEPS", 1)
    for flags in cases:
        assert_equal(clean_pool, make_case(*flags))


def test_groups_of_several_sizes_equal_one_process(clean_pool, monkeypatch):
    """A microbatch has as many packs as groups, and each has its own number of context ranks."""
    monkeypatch.setattr(parity, "STEPS", 1)
    every_rank = ["--min-dynamic-context-parallel-size", "2"]
    for flags in (GLOBAL, [*GLOBAL, *every_rank], [*CP, *MTP], [*CAPACITY, *MTP], [*GLOBAL, *CP]):
        assert_equal(clean_pool, make_case(*DYNAMIC, *flags))


def test_reference_follows_the_definition_of_the_global_loss(clean_pool):
    """Counts of two data ranks and their running mean give other gradients than those of one data rank."""
    outcomes = [
        clean_pool.run(train_reference, 1, as_is([*MODEL, *GLOBAL, *more], 2), 0, 0.0, 0)[0] for more in (EP, PP)
    ]
    many = clean_pool.run(train_case, 2, as_is([*MODEL, *GLOBAL, *EP], 2), 0)
    two, one = (outcome.grads["decoder.layers.0.mlp.router.weight"] for outcome in outcomes)
    assert (two - one).norm() > 1e-3 * one.norm(), "the definition depends on the number of data ranks"
    found = [losses["global_load_balancing_loss"] for losses in many.losses]
    assert found == pytest.approx([losses["global_load_balancing_loss"] for losses in outcomes[0].losses], rel=2e-6)


def test_packed_sequences_sharded_as_one_are_found(monkeypatch):
    """Context ranks shard the microbatch instead of every sequence in it: positions and losses are of other tokens."""
    real = sequence.zigzag_ranges
    monkeypatch.setattr(sequence, "zigzag_ranges", lambda rank, size, length, lengths=(): real(rank, size, length))
    result = run_parity(*PACKED, *CP, steps=1, shared=False)
    assert not result.failure and not result.is_equal


def test_padding_in_the_losses_of_packed_sequences_is_found(monkeypatch):
    """One process has no padding, so it shows where padding of the ranks counts."""
    real = router.balancing_losses
    monkeypatch.setattr(
        router, "balancing_losses", lambda *args, valid=None, **options: real(*args, **{**options, "valid": None})
    )
    result = run_parity(*PACKED, *CP, steps=1, shared=False)
    assert result.differences[0].quantity == "load_balancing_loss (step 1)", result.failure


def test_gradients_summed_instead_of_averaged_are_found(monkeypatch):
    monkeypatch.setattr(grad_buffer, "_mean_factor", lambda *_: (1.0, "sum"))
    kinds = "aux_loss seq_aux_loss global_aux_loss".split()
    losses = ["--moe-router-load-balancing-type", *kinds, "--moe-aux-loss-coeff", *["1e-2"] * 3]
    first = run_parity(*EP, *losses, steps=1).differences[0]
    assert first.quantity == "gradient (step 1)" and first.difference == pytest.approx(1.0, rel=1e-3)


def test_wrong_running_mean_is_found(monkeypatch):
    """From the third microbatch of a rank, counts are divided by two."""
    real = balancing._loss_weights

    def broken(*args):
        _, steps = args[4]
        weights = real(*args)
        return weights * (steps / 2) if steps > 2 else weights

    monkeypatch.setattr(balancing, "_loss_weights", broken)
    result = run_parity(*EP, *GLOBAL, "--global-batch-size", "6", steps=1)
    assert any("router.weight" in difference.name for difference in result.differences)


def test_auxiliary_gradient_without_accumulation_scale_is_found(monkeypatch):
    """One process has twice as many microbatches as a data rank."""
    real = router.attach_gradient
    monkeypatch.setattr(router, "attach_gradient", lambda logits_TE, grad_TE, scale: real(logits_TE, grad_TE, 1.0))
    result = run_parity(*EP, *GLOBAL, steps=1, shared=False)
    assert any("router.weight" in difference.name for difference in result.differences)


def test_reference_returns_chosen_keys(clean_pool, monkeypatch):
    """Near ties of an indexer are detected like those of a router."""
    monkeypatch.setattr(parity, "STEPS", 1)
    shown, other, dense = (
        clean_pool.run(train_reference, 1, make_case(*SPARSE, *more, *PP), 0, 0.0, 0)[1]
        for more in ([], ["--dsa-indexer-topk", "4"], ["--dsa-indexer-topk", "16"])
    )
    passes = 2 * (2 + 2)  # layers, a step of two sequences, and a validation
    assert len(shown) == len(other) == 2 * passes and len(dense) == passes, (
        "routing maps, and keys where there are more than are chosen"
    )
    assert not all(torch.equal(a, b) for a, b in zip(shown[passes:], other[passes:]))


def test_capacity_is_counted_per_sequence_shard(clean_pool):
    """The definition depends on the layout: without shards the reference drops other tokens."""
    sharded, full = (
        find_stable_reference(clean_pool, as_is([*MODEL, *flags, *CAPACITY], 2), range(8))[1] for flags in (TP, EP)
    )
    assert sharded.dropped != full.dropped and min(*sharded.dropped, *full.dropped) > 0


def test_sinkhorn_is_balanced_per_sequence_shard(clean_pool):
    flags = [*TP, "--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0"]
    assert_equal(clean_pool, make_case(NO_BIAS, *flags))


def skip_sums(monkeypatch, name):
    """Leave out the sums of gradients over a group."""
    real = finalize._sum_over
    monkeypatch.setattr(
        finalize, "_sum_over", lambda grads, group, *more: group.name == name or real(grads, group, *more)
    )


def test_missing_sum_over_sequence_shards_is_found(monkeypatch):
    """Gradients of router and norm weights are partial over tensor ranks."""
    skip_sums(monkeypatch, "tp")
    first = run_parity(*TP, steps=1).differences[0]
    assert first.quantity == "gradient (step 1)" and first.name == "decoder.final_layernorm.weight"
    assert "held by rank 0, 1" in first.detail


def test_missing_sum_of_tied_embeddings_is_found(monkeypatch):
    skip_sums(monkeypatch, "embedding")
    result = run_parity(*PP, steps=1)
    assert result.differences[0].name == "embedding.word_embeddings.weight"
    assert any(difference.quantity.startswith("copies of the gradient") for difference in result.differences)


def test_expert_bias_from_local_counts_is_found(monkeypatch):
    """Loads are summed over tensor, context and data ranks; the loss of the first step does not depend on them."""
    real = balancing.all_reduce

    def broken(tensor, group, **how):
        loads = group.name == "tp_dp_cp" and tensor.shape[-1] == 8  # experts
        return tensor if loads else real(tensor, group, **how)

    monkeypatch.setattr(balancing, "all_reduce", broken)
    result = run_parity(*TP)
    assert not result.is_equal and "step 1" not in str(result.differences[0])
    assert any("expert_bias" in difference.name for difference in result.differences)


def test_different_sequence_sharding_of_labels_is_found(monkeypatch):
    """Context ranks hold a chunk from the front and one from the back; halves would be other tokens."""
    real = sequence.SequenceShard.local

    def halves(self, x, dim):
        right = x.is_floating_point() or self.cp.size == 1
        return real(self, x, dim) if right else x.chunk(self.cp.size, dim)[self.cp.rank]

    monkeypatch.setattr(sequence.SequenceShard, "local", halves)
    first, second, *_ = run_parity(*CP, steps=1).differences
    assert str(first).startswith("output (step 1) of decoder.layers.0.self_attention")
    assert "computed by rank 0, 1" in str(first)
    assert second.quantity == "lm loss (step 1)"


def test_wrong_expert_is_found_with_layer_and_rank(monkeypatch):
    real = layer.MoELayer.forward

    def wrong(self, x_SBH, *more, **options):
        y_SBH = real(self, x_SBH, *more, **options)
        here = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return y_SBH * 1.001 if self.layer_number == 2 and here else y_SBH

    monkeypatch.setattr(layer.MoELayer, "forward", wrong)
    for flags in (TP, EP, [*TP[:2]], [*PER_TOKEN, *EP]):
        result = run_parity(*flags, steps=1)
        assert result.differences, result.failure
        first = result.differences[0]
        assert str(first).startswith("output (step 1) of decoder.layers.1.mlp: differs by"), flags
        assert "computed by rank 1" in first.detail


def test_exception_on_a_rank_is_a_failure_with_its_traceback(monkeypatch):
    """Only the parallel run fails. A lost failure would be reported as equal."""
    real = finalize._sum_over

    def raises(grads, group, chosen):
        if group.size > 1:
            raise OSError("no such link")
        return real(grads, group, chosen)

    monkeypatch.setattr(finalize, "_sum_over", raises)
    result = run_parity(*TP, steps=1)
    assert not result.is_equal and not result.differences
    assert result.failure.startswith("rank 0, 1: OSError: no such link")
    assert result.failure.count("Traceback") == 1


def test_exception_of_the_reference_is_reported_as_such(monkeypatch):
    def raises(*_):
        raise OSError("no such disk")

    monkeypatch.setattr(parity, "emulate_topology", raises)
    result = run_parity(*TP, steps=1, shared=False)
    assert not result.is_equal and "no such disk" in result.failure
    assert result.failure.startswith("the reference run failed")


def test_every_shard_has_two_fingerprints(clean_pool, monkeypatch):
    """One of the gradient and one of the weight, so that a different copy of either is found."""
    monkeypatch.setattr(parity, "STEPS", 1)
    trace = clean_pool.run(train_case, 2, make_case(*TP), 0)
    assert len(trace.shards) == 2 and all(len(shards) > 10 for shards in trace.shards)
    for shard in (shard for shards in trace.shards for shard in shards):
        gradient, weight = shard.fingerprints
        assert gradient != weight, shard.name


def test_different_copy_of_a_gradient_is_found(monkeypatch):
    """Rank 0 is right; the router of rank 1 differs."""
    real = finalize._sum_over

    def astray(grads, group, chosen):
        mine = [view for slot, view in grads.owned_views() if chosen(get_param_info(slot.param))]
        before = [view.clone() for view in mine]
        real(grads, group, chosen)
        if mine and group.size > 1 and torch.distributed.get_rank() == 1:
            torch._foreach_copy_(mine, before)

    monkeypatch.setattr(finalize, "_sum_over", astray)
    result = run_parity(*TP, steps=1)
    assert not result.failure
    found = [(one.quantity, one.name) for one in result.differences]
    assert ("copies of the gradient (step 1)", "decoder.layers.0.mlp.router.weight") in found


def test_batches_on_which_rounding_chooses_experts_are_not_used(monkeypatch):
    monkeypatch.setattr(parity, "MAX_GRAD_NORM_DRIFT", 0.0)
    monkeypatch.setattr(parity, "MAX_SEEDS", 2)
    result = run_parity(*EP, steps=1, shared=False)
    assert not result.is_equal and "rounding" in result.failure


def test_case_is_retried_if_further_perturbations_differ(monkeypatch):
    """Two perturbations can fall on the same side of a tie: a difference counts only if all of them agree."""
    monkeypatch.setattr(parity, "PERTURBATIONS", PERTURBATIONS)
    found, references, asked = [ComparisonRow("validation loss", "", 1e-4, 2e-6)], parity._run_references, []

    def ties(pool, case, seed, disturbances):
        asked.append((seed, len(disturbances)))
        return None if asked[-1] == (0, 1) else references(pool, case, seed, disturbances)

    real = parity.compare
    monkeypatch.setattr(parity, "compare", lambda one, many: found if asked[-1][0] == 0 else real(one, many))
    monkeypatch.setattr(parity, "_run_references", ties)
    result = run_parity(*EP, steps=1)
    assert result.is_equal and result.seed == 1 and asked == [(0, 2), (0, 1), (1, 2)]

    monkeypatch.setattr(parity, "_run_references", references)
    monkeypatch.setattr(parity, "compare", lambda one, many: found)
    result = run_parity(*EP, steps=1)
    assert result.differences == found and result.seed == 0
