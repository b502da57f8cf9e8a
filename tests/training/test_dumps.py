"""--save-...-interval and --moe-routing-trace-path: dumps are consistent, equal under every mapping, and do not change training."""

from collections import Counter

import numpy as np
import pytest
import torch
from commands import read_metrics as read_json_lines
from safetensors.torch import load_file
from training.forked import pretrain
from training.tiny import MOCK, TINY

from moe_trainer.debug.routing_trace import list_chosen_experts

JOB = [
    *TINY,
    *MOCK,
    "--train-iters",
    "2",
    "--moe-token-dispatcher-type",
    "alltoall",
    "--mtp-num-layers",
    "1",
    "--make-vocab-size-divisible-by",
    "64",
]
KINDS = ("params", "wgrads", "activations", "dgrads", "tokens-per-expert")
ALL = [*"--save s --save-interval 100".split(), *(word for kind in KINDS for word in (f"--save-{kind}-interval", "1"))]
TRACE = (
    "--moe-routing-trace-path trace --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states "
    "--moe-routing-trace-dump-weights"
).split()


def dumped(folder, kind, iteration, ranks=None):
    path = folder / "s" / kind / f"iter_{iteration:07d}"
    return (
        load_file(path.with_suffix(".safetensors"))
        if ranks is None
        else [load_file(path / f"rank{rank}.safetensors") for rank in ranks]
    )


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--calculate-per-token-loss",
        "--recompute-granularity selective --recompute-modules layernorm moe",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ],
    ids=["plain", "per token", "recompute parts", "recompute layers"],
)
def test_dumped_activations_and_gradients_are_consistent(tmp_path, flags):
    """For a GEMM y = x W^T: <x, dL/dx> = <W, dL/dW>. One microbatch; W of iteration 2 is the dump of iteration 1."""
    pretrain([*JOB, *ALL, *TRACE, *flags.split(), "--micro-batch-size", "4"], tmp_path)
    weights, wgrads = dumped(tmp_path, "params", 1), dumped(tmp_path, "wgrads", 2)
    (inputs,), (dgrads,) = dumped(tmp_path, "activations", 2, [0]), dumped(tmp_path, "dgrads", 2, [0])
    linears = [
        name
        for name in weights
        if name.endswith(("linear_qkv.weight", "linear_proj.weight", "eh_proj.weight", "router.weight"))
    ]
    assert len(linears) == 10  # routers share their input with experts: theirs is the gradient of their reading alone
    for name in linears:
        key = name.replace(".weight", "/input0")
        expected = float((weights[name].double() * wgrads[name].double()).sum())
        assert float((inputs[key].double() * dgrads[key].double()).sum()) == pytest.approx(
            expected, rel=1e-4, abs=1e-9
        ), name
    for layer in ("decoder.layers.0", "decoder.layers.1", "mtp.layers.0.mtp_model_layer"):
        # norms without bias: y is linear in their weight; the attention's input is its norm's output
        assert torch.equal(
            inputs[f"{layer}.input_layernorm/output0"], inputs[f"{layer}.self_attention.linear_qkv/input0"]
        )
        assert inputs[f"{layer}.mlp.experts/input0"].shape == (4 * 32 * 2, 32)
    # what runs again in backward is counted once
    assert all(
        len(line["tpe"]) == 1 and sum(line["tpe"][0]) == 4 * 32 * 2
        for line in read_json_lines(tmp_path / "s" / "tokens_per_expert" / "rank0.jsonl")
    )
    traced = read_json_lines(tmp_path / "trace" / "router_trace_rank0.jsonl")
    assert len(traced) == 2 * 3 and all(line["hs_shape"] == [4 * 32, 32] for line in traced)
    assert count_expert_tokens(tmp_path, 1) == count_traced_tokens(tmp_path, 1)


def test_dumped_params_are_the_weights_after_the_update(tmp_path):
    _, weights = pretrain([*JOB, *ALL], tmp_path)
    found = dumped(tmp_path, "params", 2)
    assert sorted(found) == sorted(weights) and all(torch.equal(found[name], weights[name]) for name in weights)
    first = dumped(tmp_path, "params", 1)
    assert any(not torch.equal(found[name], first[name]) for name in weights)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    records, weights = pretrain([*JOB, *ALL, *TRACE], folder)
    return folder, records, weights


def test_dumping_does_not_change_training(one_process, tmp_path):
    records, weights = pretrain(JOB, tmp_path)
    for one, other in zip(records, one_process[1], strict=True):
        assert one["lm loss"] == other["lm loss"] and one["grad_norm"] == other["grad_norm"]
    assert all(torch.equal(weights[name], one_process[2][name]) for name in weights)
    assert not {"s", "trace", "wgrads"} & {path.name for path in tmp_path.iterdir()}


MAPPINGS = {
    "ep": "--expert-model-parallel-size 2",
    "tp sp, distributed optimizer": "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-param-gather "
    "--overlap-grad-reduce",
    "pp": "--pipeline-model-parallel-size 2",
    "dp, distributed optimizer": "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
}


@pytest.mark.parametrize("flags", MAPPINGS.values(), ids=MAPPINGS)
def test_dumps_under_parallelism_equal_one_process(one_process, tmp_path, flags):
    pretrain([*JOB, *ALL, *TRACE, *flags.split()], tmp_path, 2)
    for kind in ("params", "wgrads"):
        one, two = dumped(one_process[0], kind, 1), dumped(tmp_path, kind, 1)
        assert sorted(one) == sorted(two)
        for name in one:
            assert torch.allclose(one[name], two[name], rtol=1e-4, atol=2e-6 if kind == "params" else 1e-6), name
    assert (
        count_expert_tokens(tmp_path, 2)
        == count_expert_tokens(one_process[0], 1)
        == count_traced_tokens(tmp_path, 2)
        == count_traced_tokens(one_process[0], 1)
    )
    # every module of the model is on one of the ranks; of ranks that hold the same experts one writes
    written = [rank for rank in range(2) if (tmp_path / f"s/activations/iter_0000001/rank{rank}.safetensors").exists()]
    assert written == ([0] if flags.startswith("--use-distributed-optimizer") else [0, 1])
    names = set().union(*dumped(tmp_path, "activations", 1, written))
    assert names == set(dumped(one_process[0], "activations", 1, [0])[0])


def count_expert_tokens(folder, ranks):
    """(iteration, block, layer, expert) -> received tokens, over ranks and microbatches."""
    found = Counter()
    for rank in range(ranks):
        for line in read_json_lines(folder / "s" / "tokens_per_expert" / f"rank{rank}.jsonl"):
            first = 4 // ranks * rank if len(line["tpe"][0]) < 4 else 0
            for counts in line["tpe"]:
                for expert, rows in enumerate(counts):
                    found[line["iter"], line["block"], line["layer"], first + expert] += rows
    return found


def count_traced_tokens(folder, ranks):
    """(iteration, block, layer, expert) -> tokens that chose it in the routing trace."""
    found = Counter()
    for rank in range(ranks):
        path = folder / "trace" / f"router_trace_rank{rank}.jsonl"
        for line in read_json_lines(path) if path.exists() else []:
            assert line["rank"] == rank and line["num_tokens"] == len(line["top_indices"]) and line["topk"] == 2
            for experts in line["top_indices"]:
                found.update((line["step"] + 1, line["block"], line["layer"], expert) for expert in experts)
    return found


def test_dumped_logits_and_hidden_states_match_the_routing_trace(one_process):
    folder = one_process[0] / "trace"
    states = torch.load(folder / "router_state_rank0.pt", weights_only=True)
    assert (
        sorted(states, key=str) == [0, 1, "mtp.0"]
        and states[0]["topk"] == 2
        and states[0]["score_function"] == "softmax"
    )
    assert states[1]["expert_bias"] is None
    seen = 0
    for line in read_json_lines(folder / "router_trace_rank0.jsonl"):
        read = {}
        for file, prefix in (("logits", "logit"), ("hidden_states", "hs")):
            data = (folder / f"{file}_rank0.bin").read_bytes()[line[f"{prefix}_offset"] :][: line[f"{prefix}_bytes"]]
            read[prefix] = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(line[f"{prefix}_shape"]).float()
        best = read["logit"].topk(2, dim=1)
        clear = read["logit"].topk(3, dim=1).values.diff(dim=1)[:, 1].abs() > 0.02 * best.values[:, 1].abs()
        assert clear.sum() > 20
        assert torch.equal(best.indices.sort(dim=1).values[clear], torch.tensor(line["top_indices"])[clear])
        if line["step"] == 0:  # the weights are those that the trace begins with
            weight = states[line["layer"] if line["block"] == "decoder" else "mtp.0"]["weight"]
            assert torch.allclose(read["hs"] @ weight.t(), read["logit"], atol=0.01)
            seen += 1
    assert seen == 3 * 2  # layers, microbatches


def test_every_layer_of_a_hybrid_depth_is_dumped_and_replayed(tmp_path):
    """Two of experts in one depth: neither takes the place of the other, and a replay gives each its own."""
    job = list(JOB)
    for flag in ("--num-layers", "--mtp-num-layers"):
        del job[job.index(flag) : job.index(flag) + 2]
    job += "--hybrid-layer-pattern=*E/E*E --moe-enable-routing-replay --train-iters 1".split()
    dumps = "--save s --save-interval 100 --save-tokens-per-expert-interval 1 --dump-step 1 step".split()
    expected, _ = pretrain([*job, *TRACE, *dumps], tmp_path)
    places = {("decoder", None, 1), ("mtp", 0, 0), ("mtp", 0, 2)}
    for path in ("trace/router_trace_rank0.jsonl", "s/tokens_per_expert/rank0.jsonl"):
        lines = read_json_lines(tmp_path / path)
        assert {(line["block"], line.get("mtp_idx"), line["layer"]) for line in lines} == places, path
    states = torch.load(tmp_path / "trace/router_state_rank0.pt", weights_only=True)
    assert set(states) == {1, "mtp.0", "mtp.0.2"}
    dumped_step = np.load(tmp_path / "step/routing_step1_rank0.npz").files
    assert {key.split("/")[1] for key in dumped_step} == {"layer2", "mtp1", "mtp1.3"}
    replayed, _ = pretrain([*job, "--moe-routing-replay-path", str(tmp_path / "trace")], tmp_path / "replay")
    assert [each["mtp_1 loss"] for each in replayed] == [each["mtp_1 loss"] for each in expected]


def test_routing_trace_contains_dropped_tokens(tmp_path):
    records, _ = pretrain([*JOB, *TRACE[:2], "--moe-expert-capacity-factor", "0.5"], tmp_path)
    gaps = Counter()
    for line in read_json_lines(tmp_path / "trace" / "router_trace_rank0.jsonl"):
        gaps[line["step"]] += sum(experts.count(-1) for experts in line["top_indices"])
    assert [gaps[step] for step in (0, 1)] == [
        record["dropped_tokens"] for record in records if "dropped_tokens" in record
    ]
    assert gaps[0] > 0
    assert list_chosen_experts(torch.tensor([[True, False, True], [False, False, True]]), 2).tolist() == [
        [0, 2],
        [2, -1],
    ]


def test_resumed_run_continues_dump_files_without_gaps(one_process, tmp_path):
    """Iterations 1 to 3, then a restart from 2: no record is repeated or missing."""
    job = [*JOB, "--train-iters", "4", "--lr-decay-iters", "4", *ALL, *TRACE, "--save-interval", "1"]
    pretrain([*job, "--exit-interval", "3"], tmp_path)
    with open(tmp_path / "trace" / "router_trace_rank0.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "sta')  # killed
    pretrain([*job, "--load", "s", "--ckpt-step", "1"], tmp_path)
    full = tmp_path / "whole"
    pretrain(job, full)
    for name in (
        "s/tokens_per_expert/rank0.jsonl",
        "trace/router_trace_rank0.jsonl",
        "trace/logits_rank0.bin",
        "trace/hidden_states_rank0.bin",
    ):
        assert (tmp_path / name).read_bytes() == (full / name).read_bytes(), name


def test_routing_trace_ends_after_max_training_iters(tmp_path):
    pretrain([*JOB, "--train-iters", "3", *TRACE[:2], "--moe-routing-trace-max-training-iters", "2"], tmp_path)
    assert {line["step"] for line in read_json_lines(tmp_path / "trace" / "router_trace_rank0.jsonl")} == {0, 1}
    assert [path.name for path in (tmp_path / "trace").iterdir()] == ["router_trace_rank0.jsonl"]


def test_failed_dumps_do_not_stop_the_run(one_process, tmp_path, capfd):
    """Plain files stand where the folders belong: every dump fails, on both ranks, and the run continues."""
    (tmp_path / "s").mkdir(parents=True)
    for name in ("s/params", "s/wgrads", "s/activations", "s/dgrads", "s/tokens_per_expert", "trace"):
        (tmp_path / name).write_text("")
    records, weights = pretrain([*JOB, *ALL, *TRACE, "--expert-model-parallel-size", "2"], tmp_path, 2)
    assert [record["lm loss"] for record in records] == pytest.approx(
        [record["lm loss"] for record in one_process[1]], rel=1e-5
    )
    output = "".join(capfd.readouterr())
    for kind in KINDS:
        assert output.count(f"--save-{kind}-interval cannot be written") in (1, 2), kind  # ranks
    assert "--moe-routing-trace-path cannot be written" in output
