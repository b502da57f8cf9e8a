"""A proof holds for the program as it is, and fails for the mistakes that parallel trainers are known for.

Each mistake is put into the program before the ranks are forked, and acts only where a group has several ranks.
"""

import pytest
import torch

from moe_trainer.moe import balancing, layer, router
from moe_trainer.optim import finalize, grad_buffer
from moe_trainer.parallel import sequence
from moe_trainer.parallel.params import info_of
from moe_trainer.proof.compare import Difference
from moe_trainer.proof.pool import Pool
from moe_trainer.proof.prove import Verdict, prove, steady_reference, train_case, train_reference
from moe_trainer.proof.shrink import as_is

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
DELTA = ("--norm-epsilon 1e-2 --experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-num-key-heads 2 "
         "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 8").split()
SPARSE = ("--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 4 --qk-pos-emb-head-dim 4 --v-head-dim 4 "
          "--experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 5 --dsa-indexer-loss-coeff 1").split()
GLOBAL = ["--moe-router-load-balancing-type", "global_aux_loss"]


def verdict(*flags: str, ranks: int = 2) -> Verdict:
    case = as_is([*MODEL, *flags], ranks)
    with Pool(max(ranks, 3)) as pool:
        return prove(pool, case)


def test_one_pool_proves_many_mappings():
    cases = [as_is([*MODEL, *flags], 2) for flags in (TP, PP, CP, EP, [*TP, *CAPACITY], [*CP, *CAPACITY], [*CP, *MTP], [*EP, *GLOBAL])]
    cases += [as_is([*MODEL, "--moe-latent-size", "6", *flags], 2) for flags in (TP, EP, TP[:2])]
    cases += [as_is([*(word for word in MODEL if word != "--moe-router-enable-expert-bias"), *FINE, *flags], 2) for flags in (TP, EP)]
    cases += [as_is([*MODEL, *DELTA, *flags], 2) for flags in (TP, PP, CP, TP[:2], [*CP, "--cp-comm-type", "a2a", "--reset-attention-mask"])]
    gathered = [*CP, "--cp-comm-type", "allgather"]
    frozen = [*PP, "--pipeline-model-parallel-layout", "E|t|t|L", "--dsa-indexer-warmup"]  # chunks without a parameter that learns
    cases += [as_is([*MODEL, *SPARSE, *flags], 2) for flags in ([*TP, "--dsa-indexer-use-sparse-loss"], gathered, frozen)]
    with Pool(3) as pool:
        for case in cases:
            result = prove(pool, case)
            assert result.equal, (str(case.mapping), result.failure, *map(str, result.differences[:4]))
            assert "gradients within" in result.closeness


def test_the_reference_of_the_global_loss_is_one_process_that_follows_its_definition():
    """The counts of two data ranks, and their running mean over microbatches: other gradients than those of one data rank."""
    flags = [*MODEL, *GLOBAL, "--global-batch-size", "8"]
    with Pool(3) as pool:
        outcomes = [pool.run(train_reference, 1, as_is([*flags, *more], 2), 0, 0.0, 0)[0] for more in (EP, PP)]
        many = pool.run(train_case, 2, as_is([*flags, *EP], 2), 0)
    two, one = (outcome.grads["decoder.layers.0.mlp.router.weight"] for outcome in outcomes)
    assert (two - one).norm() > 1e-3 * one.norm(), "the definition depends on the number of data ranks"
    found = [losses["global_load_balancing_loss"] for losses in many.losses]
    assert found == pytest.approx([losses["global_load_balancing_loss"] for losses in outcomes[0].losses], rel=2e-6)


@pytest.mark.parametrize("loss", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_gradients_that_are_summed_over_data_ranks_and_not_averaged_are_found(monkeypatch, loss):
    monkeypatch.setattr(grad_buffer, "_mean_factor", lambda *_: (1.0, "sum"))
    first = verdict(*EP, "--moe-router-load-balancing-type", loss).differences[0]
    assert first.quantity == "gradient (step 1)" and first.size == pytest.approx(1.0, rel=1e-3)


def test_a_running_mean_that_stops_running_is_found(monkeypatch):
    """From the third microbatch on the counts are divided by two."""
    real = balancing._loss_weights

    def broken(*args):
        _, steps = args[5]
        weights = real(*args)
        return weights * (steps / 2) if steps > 2 else weights

    monkeypatch.setattr(balancing, "_loss_weights", broken)
    result = verdict(*EP, *GLOBAL, "--global-batch-size", "8")
    assert any("router.weight" in difference.where for difference in result.differences)


def test_an_auxiliary_gradient_that_ignores_accumulation_is_found(monkeypatch):
    """Not scaled by the number of microbatches; one process has twice as many as a data rank."""
    real = router.attach_gradient
    monkeypatch.setattr(router, "attach_gradient", lambda logits_TE, grad_TE, scale: real(logits_TE, grad_TE, 1.0))
    result = verdict(*EP, *GLOBAL)
    assert any("router.weight" in difference.where for difference in result.differences)


def test_a_reference_shows_the_keys_that_it_chooses():
    """A near tie of an indexer counts like one of a router."""
    few = ["--dsa-indexer-topk", "4"]
    with Pool(3) as pool:
        shown, other, dense = (pool.run(train_reference, 1, as_is([*MODEL, *SPARSE, *more, *EP], 2), 0, 0.0, 0)[1] for more in ([], few, ["--dsa-indexer-topk", "16"]))
    passes = 2 * (3 * 4 + 4)  # layers, steps of four sequences, and a validation
    assert len(shown) == len(other) == 2 * passes and len(dense) == passes, "routing maps, and keys where there are more than are chosen"
    assert not all(torch.equal(a, b) for a, b in zip(shown[passes:], other[passes:]))


def test_capacity_is_counted_per_sequence_shard():
    """Without the shards the reference drops other tokens: the definition depends on the topology, and the reference knows."""
    case = as_is([*MODEL, *TP, *CAPACITY], 2)
    with Pool(3) as pool:
        _, sharded = steady_reference(pool, case, range(8))
        _, whole = steady_reference(pool, as_is([*MODEL, *EP, *CAPACITY], 2), range(8))
    assert sharded.dropped != whole.dropped and min(*sharded.dropped, *whole.dropped) > 0


def test_sinkhorn_balances_the_tokens_of_each_sequence_shard():
    model = [word for word in MODEL if word != "--moe-router-enable-expert-bias"]
    case = as_is([*model, *TP, "--moe-router-load-balancing-type", "sinkhorn", "--moe-aux-loss-coeff", "0"], 2)
    with Pool(3) as pool:
        result = prove(pool, case)
    assert result.equal, (result.failure, *map(str, result.differences[:4]))


def test_gradients_of_sequence_shards_that_are_not_summed_are_found(monkeypatch):
    """Router and norm weights see a shard of the sequence each: their gradients are partial over tensor ranks."""
    real = finalize._sum
    monkeypatch.setattr(finalize, "_sum", lambda grads, group, chosen: None if group.name == "tp" else real(grads, group, chosen))
    first = verdict(*TP).differences[0]
    assert first.quantity == "gradient (step 1)" and first.where == "decoder.final_layernorm.weight"
    assert "held by rank 0, 1" in first.detail


def test_tied_embeddings_that_are_not_summed_over_stages_are_found(monkeypatch):
    real = finalize._sum
    monkeypatch.setattr(finalize, "_sum", lambda grads, group, chosen: None if group.name == "embedding" else real(grads, group, chosen))
    result = verdict(*PP)
    assert result.differences[0].where == "embedding.word_embeddings.weight"
    assert any(difference.quantity.startswith("copies of the gradient") for difference in result.differences)


def test_expert_bias_from_the_counts_of_one_rank_is_found(monkeypatch):
    """The loads are summed over tensor, context and data ranks; the loss of the first step cannot tell."""
    real = balancing.all_reduce

    def broken(tensor, group, **how):
        loads = group.name == "tp_dp_cp" and tensor.shape[-1] == 8  # experts
        return tensor if loads else real(tensor, group, **how)

    monkeypatch.setattr(balancing, "all_reduce", broken)
    result = verdict(*TP)
    assert not result.equal and "step 1" not in str(result.differences[0])
    assert any("expert_bias" in difference.where for difference in result.differences)


def test_a_sequence_cut_another_way_for_the_labels_is_found(monkeypatch):
    """Context ranks hold a piece from the front and one from the back; plain halves would be other tokens."""
    real = sequence.SequenceShard.local

    def halves(self, x, dim):
        return real(self, x, dim) if x.is_floating_point() or self.cp.size == 1 else x.chunk(self.cp.size, dim)[self.cp.rank]

    monkeypatch.setattr(sequence.SequenceShard, "local", halves)
    first, second, *_ = verdict(*CP).differences
    assert str(first).startswith("output (step 1) of decoder.layers.0.self_attention") and "computed by rank 0, 1" in str(first)
    assert second.quantity == "lm loss (step 1)"


def test_an_expert_that_computes_something_else_is_found_at_its_layer_and_rank(monkeypatch):
    real = layer.MoELayer.forward

    def wrong(self, x_SBH, *more):
        y_SBH = real(self, x_SBH, *more)
        here = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        return y_SBH * 1.001 if self.layer_number == 2 and here else y_SBH

    monkeypatch.setattr(layer.MoELayer, "forward", wrong)
    for flags in (TP, EP, [*TP[:2]]):
        result = verdict(*flags)
        assert result.differences, result.failure
        first = result.differences[0]
        assert str(first).startswith("output (step 1) of decoder.layers.1.mlp: apart by"), flags
        assert "computed by rank 1" in first.detail


def test_a_rank_that_raises_is_a_verdict_with_its_traceback(monkeypatch):
    """Only the parallel run fails: a failure that is dropped would be a proof of equality."""
    real = finalize._sum

    def raises(grads, group, chosen):
        if group.size > 1:
            raise OSError("no such link")
        return real(grads, group, chosen)

    monkeypatch.setattr(finalize, "_sum", raises)
    result = verdict(*TP)
    assert not result.equal and not result.differences and result.failure.startswith("rank 0, 1: OSError: no such link")
    assert result.failure.count("Traceback") == 1


def test_a_reference_that_raises_is_told_as_one(monkeypatch):
    from moe_trainer.proof import prove as module

    def raises(*_):
        raise OSError("no such disk")

    monkeypatch.setattr(module, "emulate", raises)
    result = verdict(*TP)
    assert not result.equal and result.failure.startswith("the reference itself failed") and "no such disk" in result.failure


def test_what_every_rank_holds_has_two_fingerprints():
    """Those of the gradient and of the weight: a copy of either that goes its own way is to be seen."""
    with Pool(2) as pool:
        many = pool.run(train_case, 2, as_is([*MODEL, *TP], 2), 0)
    assert len(many.pieces) == 2 and all(len(mine) > 10 for mine in many.pieces)
    for piece in (piece for mine in many.pieces for piece in mine):
        gradient, weight = piece.fingerprints
        assert gradient != weight, piece.name


def test_a_copy_of_a_gradient_that_one_rank_does_not_sum_is_found(monkeypatch):
    """Rank 0 is right; what rank 1 holds of the router is no copy of it any more."""
    real = finalize._sum

    def astray(grads, group, chosen):
        mine = [view for slot, view in grads.owned_views() if chosen(info_of(slot.param))]
        before = [view.clone() for view in mine]
        real(grads, group, chosen)
        if mine and group.size > 1 and torch.distributed.get_rank() == 1:
            torch._foreach_copy_(mine, before)

    monkeypatch.setattr(finalize, "_sum", astray)
    result = verdict(*TP)
    assert not result.failure
    found = [(one.quantity, one.where) for one in result.differences]
    assert ("copies of the gradient (step 1)", "decoder.layers.0.mlp.router.weight") in found


def test_batches_on_which_rounding_chooses_the_experts_are_not_used(monkeypatch):
    from moe_trainer.proof import prove as module

    monkeypatch.setattr(module, "STEADY_NORM", 0.0)
    result = verdict(*EP)
    assert not result.equal and "rounding" in result.failure


def test_a_case_that_parts_where_more_disturbances_do_too_is_tried_on_other_batches(monkeypatch):
    """Two disturbances can fall on the same side of a tie: a difference counts where all of them agree."""
    from moe_trainer.proof import prove as module

    found, references, asked = [Difference("loss of a validation", "", 1e-4, 2e-6)], module._references, []

    def ties(pool, case, seed, disturbances):
        asked.append((seed, len(disturbances)))
        return None if asked[-1] == (0, 6) else references(pool, case, seed, disturbances)

    real = module.compare
    monkeypatch.setattr(module, "compare", lambda one, many: found if asked[-1][0] == 0 else real(one, many))
    monkeypatch.setattr(module, "_references", ties)
    result = verdict(*EP)
    assert result.equal and result.seed == 1 and asked == [(0, 2), (0, 6), (1, 2)]

    monkeypatch.setattr(module, "_references", references)
    monkeypatch.setattr(module, "compare", lambda one, many: found)
    result = verdict(*EP)
    assert result.differences == found and result.seed == 0
