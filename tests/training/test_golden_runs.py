"""Every golden run of Megatron-LM that needs one process, data-parallel or expert-parallel ranks, through the command line.

The ranks are forked, but for one run that torchrun begins. What exchanges and overlaps change is
compared with one process in the test_*_agree modules.
"""

import json

import numpy as np
import pytest
from commands import golden_workspace, read_metrics, run, torchrun
from safetensors.numpy import load_file

SINGLE = ("a_mixtral", "a_capacity_zloss", "a2_mixtral", "b_deepseek_mtp", "c_qwen3moe", "d_dense_gpt2")
DATA_PARALLEL = ("dp2", "dp2_distopt", "c_dp2")
PIPELINE = ("pp2", "pp2vpp2")
EXPERT_PARALLEL = ("ep2_a2a", "b_ep2", "acap_ep2")
# distance of the recording from one process: in b_tp2 the reference loses the other rank's gradient of the rotary key
TENSOR_PARALLEL = {"tp2_sp": 2e-6, "b_tp2": 3e-5, "tp2ep2": 2e-6}
AUX_NAMES = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss")


def remove_flags(argv, *flags_with_counts):
    """argv with the given flags and their values removed."""
    kept, at, counts = [], 0, dict(flags_with_counts)
    while at < len(argv):
        if argv[at] in counts:
            at += 1 + counts[argv[at]]
        else:
            kept.append(argv[at])
            at += 1
    return kept


def launch(shared, folder, case, argv, world_size, start=run):
    """Run a golden command line from its initial weights with all outputs switched on; start: `run` or `torchrun`."""
    cwd = golden_workspace(shared, folder)
    argv = remove_flags(
        argv,
        ("--save", 1),
        ("--save-interval", 1),
        ("--load", 1),
        ("--finetune", 0),
        ("--no-load-optim", 0),
        ("--no-load-rng", 0),
    )
    finished = start(
        [
            *argv,
            "--init-from",
            str(shared / "golden" / case / "init.safetensors"),
            "--metrics-file",
            "metrics.jsonl",
            "--export-weights",
            "final.safetensors",
            "--dump-step",
            "1",
            "dump",
        ],
        cwd,
        world_size,
    )
    assert finished.returncode == 0, finished.stderr
    return cwd, read_metrics(cwd / "metrics.jsonl")


def expected_losses(step):
    """The reference's losses of a step under the names of the log line."""
    losses = {"lm loss": step["lm loss"]}
    for name in AUX_NAMES:
        per_layer = step.get(f"{name}/per_layer")
        if per_layer is not None:
            values = [value for value in per_layer if value != 0.0]
            losses[name] = sum(values) / len(values) if values else 0.0
    for depth, value in enumerate(step.get("mtp_losses") or [], start=1):
        losses[f"mtp_{depth} loss"] = value
    return losses


def assert_curve(records, steps, tolerance):
    assert [r["iteration"] for r in records] == [s["iteration"] for s in steps]
    for record, step in zip(records, steps):
        expected = expected_losses(step)
        expected.update({"learning_rate": step["lr_used"], "grad_norm": step["grad_norm"]})
        for name, value in expected.items():
            assert record[name] == pytest.approx(value, rel=tolerance, abs=1e-12), (record["iteration"], name)


def average_over_ranks(ranks):
    """The steps of the first rank with the auxiliary and MTP losses, which the recording holds per rank, reduced as the log does it.

    They are means over data-parallel ranks, but for the global loss, of which every rank holds its share of the sum.
    """
    steps = [dict(step) for step in ranks[0]["steps"]]
    for number, step in enumerate(steps):
        for key in [key for key in step if key.endswith("/per_layer")]:
            per_rank = [rank["steps"][number][key] for rank in ranks]
            share = 1 if key.startswith("global") else len(ranks)
            step[key] = [sum(values) / share for values in zip(*per_rank)]
        if step.get("mtp_losses"):
            per_rank = [rank["steps"][number]["mtp_losses"] for rank in ranks]
            step["mtp_losses"] = [sum(values) / len(ranks) for values in zip(*per_rank)]
    return steps


@pytest.mark.parametrize("case", SINGLE)
def test_one_process_equals_the_reference(shared, tmp_path, case):
    meta = json.loads((shared / "golden" / case / "meta.json").read_text())
    cwd, records = launch(shared, tmp_path, case, meta["argv"], 1)
    assert_curve(records, meta["steps"], 2e-6)

    grads = load_file(shared / "golden" / case / "grads_step1.safetensors")
    ours = load_file(cwd / "dump" / "grads_step1.safetensors")
    assert ours.keys() == grads.keys()
    for name, grad in grads.items():
        assert np.linalg.norm(ours[name] - grad) <= 1e-5 * np.linalg.norm(grad) + 1e-12, name

    final = load_file(shared / "golden" / case / "final.safetensors")
    ours = load_file(cwd / "final.safetensors")
    assert ours.keys() == final.keys()
    for name, value in final.items():
        assert np.abs(ours[name] - value).max() <= 2e-6, name

    data = np.load(shared / "golden" / case / "data.npz")
    routing = [key for key in data.files if key.startswith("routing/")]
    if routing:
        dump = np.load(cwd / "dump" / "routing_step1_rank0.npz")
        assert sorted(dump.files) == sorted(routing)
        for key in routing:
            if key.endswith("/map"):
                assert np.array_equal(dump[key], data[key]), key
            else:
                assert np.allclose(dump[key], data[key], rtol=0, atol=2e-6), key


@pytest.mark.parametrize("case", DATA_PARALLEL)
def test_data_parallel_ranks_equal_the_reference(shared, tmp_path, case):
    meta = json.loads((shared / "golden" / "parallel" / f"{case}.json").read_text())
    overlap = (
        ["--overlap-grad-reduce", "--overlap-param-gather"] if "--use-distributed-optimizer" in meta["argv"] else []
    )
    _, records = launch(shared, tmp_path, meta["base_config"], [*meta["argv"], *overlap], meta["world_size"])
    assert_curve(records, average_over_ranks(meta["ranks"]), 2e-6)


@pytest.mark.parametrize("case", PIPELINE)
def test_pipeline_stages_equal_the_reference(shared, tmp_path, case):
    """Curve, and everything that leaves the run: the layers of all stages, once and whole."""
    meta = json.loads((shared / "golden" / "parallel" / f"{case}.json").read_text())
    cwd, records = launch(shared, tmp_path, meta["base_config"], meta["argv"], meta["world_size"])
    assert_curve(records, combine_stages(meta["ranks"]), 2e-6)
    assert_tensors_of_one_process(shared / "golden" / meta["base_config"], cwd)


def combine_stages(ranks):
    """The steps of the last stage, which has the loss, with the auxiliary losses of all stages' layers.

    Every rank of the recording has zeros for the layers of other stages.
    """
    steps = [dict(step) for step in ranks[-1]["steps"]]
    for number, step in enumerate(steps):
        for key in [key for key in step if key.endswith("/per_layer")]:
            step[key] = [sum(values) for values in zip(*(rank["steps"][number][key] for rank in ranks))]
    return steps


def with_flag(argv, flag, value):
    return [*remove_flags(argv, (flag, 1)), flag, value]


@pytest.mark.parametrize("case", EXPERT_PARALLEL)
def test_expert_parallel_ranks_equal_the_reference(shared, tmp_path, case):
    """Curve, and everything that leaves the run: experts of all ranks are in the exported weights and gradients."""
    meta = json.loads((shared / "golden" / "parallel" / f"{case}.json").read_text())
    cwd, records = launch(shared, tmp_path, meta["base_config"], meta["argv"], meta["world_size"])
    assert_curve(records, average_over_ranks(meta["ranks"]), 2e-6)

    # the recording has no tensors of these cases, but where a capacity is not per rank they are those of one process
    assert_tensors_of_one_process(shared / "golden" / meta["base_config"], cwd)


def assert_tensors_of_one_process(folder, cwd):
    """Gradients of the first step and final weights, whole."""
    grads, ours = load_file(folder / "grads_step1.safetensors"), load_file(cwd / "dump" / "grads_step1.safetensors")
    assert ours.keys() == grads.keys()
    for name, grad in grads.items():
        assert np.linalg.norm(ours[name] - grad) <= 1e-5 * np.linalg.norm(grad) + 1e-12, name
    final, ours = load_file(folder / "final.safetensors"), load_file(cwd / "final.safetensors")
    assert ours.keys() == final.keys()
    for name, value in final.items():
        assert np.abs(ours[name] - value).max() <= 2e-6, name


@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_tensor_parallel_ranks_equal_one_process(shared, tmp_path, case):
    """The recording on several ranks within its own tolerance; the one on one process, tensors included, within ours."""
    meta = json.loads((shared / "golden" / "parallel" / f"{case}.json").read_text())
    single = json.loads((shared / "golden" / meta["base_config"] / "meta.json").read_text())
    start = torchrun if case == "tp2_sp" else run  # as a user starts the ranks
    cwd, records = launch(shared, tmp_path, meta["base_config"], meta["argv"], meta["world_size"], start)
    assert_curve(records, single["steps"], 2e-6)
    for record, step in zip(records, meta["ranks"][0]["steps"], strict=True):
        for name in ("lm loss", "grad_norm"):
            assert record[name] == pytest.approx(step[name], rel=TENSOR_PARALLEL[case]), (record["iteration"], name)
    assert_tensors_of_one_process(shared / "golden" / meta["base_config"], cwd)


def test_context_parallel_ranks_equal_the_reference(shared, tmp_path):
    meta = json.loads((shared / "golden" / "parallel" / "cp2.json").read_text())
    cwd, records = launch(shared, tmp_path, meta["base_config"], meta["argv"], meta["world_size"])
    steps = json.loads((shared / "golden" / meta["base_config"] / "meta.json").read_text())["steps"]
    assert_curve(records, steps, 2e-6)
    for record, step in zip(records, meta["ranks"][0]["steps"], strict=True):
        for name in ("lm loss", "grad_norm"):
            assert record[name] == pytest.approx(step[name], rel=2e-6), (record["iteration"], name)
    assert_tensors_of_one_process(shared / "golden" / meta["base_config"], cwd)


RESUMED = {
    1: "",
    2: "--pipeline-model-parallel-size 2",
    4: "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 "
    "--use-distributed-optimizer",
}


@pytest.mark.parametrize("checkpoint, world_size", [("a2_torch_dist", 2), ("a2_torch_dist", 4), ("a2_torch", 1)])
def test_megatron_checkpoint_resumes_like_megatron(shared, tmp_path, checkpoint, world_size):
    """Iterations 6 to 10 from Megatron-LM's own checkpoint of iteration 5, as it went on itself; under other mappings and of the legacy format too."""
    meta = json.loads((shared / "golden" / "parallel" / "res_a2_torch_dist.json").read_text())
    cwd = golden_workspace(shared, tmp_path)
    argv = with_flag(
        remove_flags(meta["argv"], ("--save", 1), ("--save-interval", 1)),
        "--load",
        str(shared / "golden/ckpt" / checkpoint),
    )
    finished = run([*argv, *RESUMED[world_size].split(), "--metrics-file", "metrics.jsonl"], cwd, world_size)
    assert finished.returncode == 0, finished.stderr
    steps = [{**step, "iteration": step["iteration"] + 5} for step in meta["ranks"][0]["steps"]]
    assert_curve(read_metrics(cwd / "metrics.jsonl"), steps, 2e-6)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_the_global_aux_loss_sees_the_tokens_of_all_expert_ranks(shared, tmp_path, dispatcher):
    """Its counts run over tensor x data x context ranks: spreading the experts over the two data ranks changes nothing."""
    meta = json.loads((shared / "golden" / "parallel" / "c_dp2.json").read_text())
    argv = with_flag([*meta["argv"], "--expert-model-parallel-size", "2"], "--moe-token-dispatcher-type", dispatcher)
    _, records = launch(shared, tmp_path, meta["base_config"], argv, 2)
    assert_curve(records, average_over_ranks(meta["ranks"]), 2e-6)


def test_bf16_stays_within_the_measured_distance_of_the_reference(shared, tmp_path):
    meta = json.loads((shared / "golden" / "a_mixtral_bf16" / "meta.json").read_text())
    _, records = launch(shared, tmp_path, "a_mixtral", meta["argv"], 1)
    for record, step in zip(records, meta["steps"]):
        assert record["lm loss"] == pytest.approx(step["lm loss"], rel=7e-4)
        assert record["grad_norm"] == pytest.approx(step["grad_norm"], rel=5.5e-3)
