"""Hash routing: experts by token id, weights from scores, equal under every mapping, tables of checkpoints."""

import pytest
import torch
from harness import run_ranks
from moe.layers import EXPERTS, HIDDEN, build_layer, sections
from training.layouts import VOCAB, compare, make_argv, make_run, shallow, train_one_process, train_ranks
from training.resuming import assert_alike, load_and_save, train_and_save

from arguments.mechanisms.selections import SELECTING
from moe_trainer.checkpoint.manager import load, save
from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
from moe_trainer.checkpoint.verify import verify_checkpoint
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.moe.selections.hash_routing import HashSelection
from moe_trainer.moe.selections.topk import score_topk
from moe_trainer.parallel.state import ParallelState

HASH = "--moe-n-hash-layers 1 --moe-router-score-function sqrtsoftplus --moe-router-topk-scaling-factor 1.5".split()
MAPPINGS = {
    "tensor, sequence": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tensor": "--tensor-model-parallel-size 2",
    "context": "--context-parallel-size 2",
    "experts": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "stages": "--pipeline-model-parallel-size 2",
    "full recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective recompute": "--recompute-granularity selective --recompute-modules moe",
}


def make_router(**changes):
    layer = build_layer(sections(moe_n_hash_layers=1, moe_router_topk=3, **changes), dtype=torch.float32)
    layer.router.selection.make_tables(VOCAB, torch.device("cpu"))
    return layer.router


def test_router_equals_transformers():
    """Weights and gradients of DeepSeek-V4's hash router, with a random table."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this version of transformers has no DeepSeek-V4")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    router = make_router(moe_router_score_function="sqrtsoftplus", moe_router_topk_scaling_factor=1.5)
    config = transformers.DeepseekV4Config(
        hidden_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=3, vocab_size=VOCAB, routed_scaling_factor=1.5
    )
    reference = DeepseekV4HashRouter(config)
    table = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(VOCAB)])
    router.selection.tid2eid_VK = table.int()
    reference.tid2eid.copy_(table)
    reference.weight.data = router.weight.detach().clone()
    tokens = torch.randint(VOCAB, (7, 2))
    x, probe = torch.randn(7, 2, HIDDEN), torch.randn(14, EXPERTS)
    probs, routing = router(x, PassInputs(token_ids_T=tokens.flatten()))
    _, weights, indices = reference(x, tokens)
    expected = torch.zeros(14, EXPERTS).scatter(1, indices, weights)
    torch.testing.assert_close(probs, expected)
    assert torch.equal(routing, expected > 0)
    (probs * probe).sum().backward()
    (expected * probe).sum().backward()
    torch.testing.assert_close(router.weight.grad, reference.weight.grad)


def test_new_tables_spread_consecutive_ids_over_all_experts():
    table = make_router().selection.tid2eid_VK
    assert table.dtype == torch.int32 and table.shape == (VOCAB, 3)
    assert table[6].tolist() == [6, 7, 0] and (table[:EXPERTS].flatten().bincount() == 3).all()


def test_softmax_weights_are_scores_of_all_experts():
    router = make_router()
    router.recorder = []
    probs, routing = router(torch.randn(5, 1, HIDDEN), PassInputs(token_ids_T=torch.arange(5)))
    scores = router.recorder[0]["logits"].softmax(1)
    torch.testing.assert_close(probs, scores * routing)
    assert routing[2].nonzero().flatten().tolist() == [2, 3, 4] and router.margin(scores) is None


def test_forced_balancing_replaces_the_table():
    router = make_router(moe_router_force_load_balancing=True)
    forced = torch.randn(5, EXPERTS)
    _, routing = router(torch.randn(5, 1, HIDDEN), PassInputs(forced_TE=forced, token_ids_T=torch.arange(5)))
    assert torch.equal(routing, score_topk(forced, 3)[1])


def test_forced_bias_replaces_the_table():
    router = make_router(moe_router_force_biased=-100.0)
    _, routing = router(torch.randn(5, 1, HIDDEN), PassInputs(token_ids_T=torch.arange(5)))
    assert routing.sum(1).eq(3).all() and (routing == routing[0]).all(), "the bias is larger than every logit"


@pytest.mark.parametrize("kind", SELECTING)
def test_layers_with_tables_have_no_balancing_by_choice(kind):
    assert type(make_router(moe_router_load_balancing_type=kind).selection) is HashSelection


def test_only_the_first_layers_have_tables_and_the_others_have_biases():
    argv = [*shallow(make_argv("plain")), *HASH, "--moe-router-enable-expert-bias", "--bf16"]
    (chunk,) = make_run(argv, 0, ParallelState.single(), 1).chunks
    buffers = dict(chunk.named_state_buffers())
    assert {name: buffer.dtype for name, buffer in buffers.items()} == {
        "decoder.layers.0.mlp.router.tid2eid": torch.int32,
        "decoder.layers.1.mlp.router.expert_bias": torch.float32,
    }


def test_training_under_every_mapping_equals_one_process():
    base = [*shallow(make_argv("plain")), *HASH]
    plain = train_one_process(*shallow(make_argv("plain")), *HASH[2:])
    expected = train_one_process(*base)
    assert compare(plain, expected), "hash routing changes nothing"
    results = run_ranks(train_ranks, 2, [[*base, *mapping.split()] for mapping in MAPPINGS.values()])
    for index, name in enumerate(MAPPINGS):
        assert not compare(expected, results[0][index]), name


def test_a_checkpoints_table_replaces_the_new_one(tmp_path, monkeypatch):
    """Saved by two ranks with another table, resumed on one process and by two stages."""
    argv = [*shallow(make_argv("plain")), *HASH]

    def reversed_table(selection, vocab_size, device):
        selection.tid2eid_VK = (
            torch.arange(EXPERTS, dtype=torch.int32).repeat(vocab_size, 1)[:, :2].flip(1).contiguous()
        )

    monkeypatch.setattr(HashSelection, "make_tables", reversed_table)
    tensor = [*argv, "--tensor-model-parallel-size", "2"]
    steps = run_ranks(train_and_save, 2, tensor, tmp_path / "a")[0]
    monkeypatch.undo()
    assert not verify_checkpoint(tmp_path / "a" / "iter_0000002").problems
    assert_alike(load_and_save(0, 1, argv, tmp_path / "a", tmp_path / "b"), steps)
    stages = run_ranks(load_and_save, 2, [*argv, "--pipeline-model-parallel-size", "2"], tmp_path / "b", tmp_path / "c")
    assert_alike(stages[1], steps)


def test_legacy_checkpoint_holds_the_table(tmp_path):
    argv = [*shallow(make_argv("plain")), *HASH]
    run, fresh = (make_run([*argv, "--seed", seed], 0, ParallelState.single(), 1) for seed in "12")
    table = run.chunks[0].decoder.layers[0].mlp.router.selection.tid2eid_VK
    table.copy_(table.flip(0))
    content = CheckpointState(iteration=1, args=run.args.as_dict())
    save(tmp_path, content, run.chunks, run.optimizer, run.ps, SaveOptions(save_rng=False, ckpt_format="torch"))
    assert not verify_checkpoint(tmp_path / "iter_0000001").problems
    load(tmp_path, fresh.chunks, fresh.optimizer, fresh.ps, LoadOptions(fresh.args.as_dict(), load_rng=False))
    assert torch.equal(fresh.chunks[0].decoder.layers[0].mlp.router.selection.tid2eid_VK, table)
