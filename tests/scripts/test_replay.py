"""--record-step and scripts/replay.py: record a step, replay it under another mapping, and report the first different tensor."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import call_main, environment, rank_variables, read_metrics, run
from safetensors.torch import load_file, save_file

from arguments.mechanisms.formats import list_widths
from moe_trainer.debug import step_record
from moe_trainer.debug.step_record import Record
from moe_trainer.layers.mlp import MLP
from moe_trainer.moe.layer import MoELayer
from moe_trainer.moe.selections.topk import TopKSelection
from moe_trainer.resilience import rejection

# imported here, since libraries would keep the streams of the test that imports it
from moe_trainer.verification.replay import ReplayChanges, plan_replay

SCRIPT = Path(__file__).parents[2] / "scripts" / "replay.py"
MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 48 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-layer-freq ([0]*1+[1]*2) --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32 --moe-grouped-gemm --init-method-std 0.2 "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 3 "
    "--attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 120 "
    "--save ck --save-interval 100 --record-step 2"
).split()
PP2_EP2 = "--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1 --expert-model-parallel-size 2 --use-distributed-optimizer".split()


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("replay", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def replay(program, capsys, monkeypatch):
    """Runs the program; returns its exit code, standard output and standard error."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", lambda _count: None)

    return lambda folder, *words: astuple(call_main(program.main, [folder, *words], capsys))


def recorded(folder, *flags, ranks=1):
    finished = run([*MODEL, *flags], folder, ranks)
    assert finished.returncode == 0, finished.stderr
    return folder / "ck" / "recorded_step_2"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("four"), *PP2_EP2, ranks=4)


def test_replay_with_the_same_flags_is_bitwise_equal(one_rank, replay):
    code, out, err = replay(one_rank)
    assert code == 0 and "quantities within their tolerances, bit for bit" in out, out + err
    assert "chosen experts: 2, 0 differ" in out and "token losses loss" in out and "gradient norm" in out


@pytest.mark.parametrize("flags", [
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    "--expert-model-parallel-size 2 --use-distributed-optimizer",
    "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "--context-parallel-size 2",
    "--world-size 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
])  # fmt: skip
def test_replay_under_another_mapping_is_equal_within_fp32(one_rank, replay, flags):
    code, out, err = replay(one_rank, *flags.split())
    assert code == 0, out + err
    assert "(fp32): outputs" in out and "\n*" not in out


def test_report_of_equal_records(one_rank, replay, tmp_path):
    path = tmp_path / "replay.html"
    code, out, err = replay(one_rank, "--against", one_rank, "--report-html", path)
    page = path.read_text()
    assert code == 0 and out.splitlines()[-1] in page and "Equal: " in page and "first difference: " not in page, err
    assert page.count("<svg ") == 1 and f"replay.py {one_rank} --against" in page
    code, _, err = replay(one_rank, "--report-html", tmp_path / "none" / "x.html")
    assert code == 2 and "x.html: the file cannot be written" in err


def test_four_rank_record_replays_on_four_ranks_and_on_one(four_ranks, replay):
    code, out, err = replay(four_ranks)
    assert code == 0 and "pp 2 dp 2 ep 2 on 4 ranks" in out and "bit for bit" in out, out + err
    code, out, err = replay(four_ranks, "--one-process")
    assert code == 0 and "replayed: one process" in out, out + err


def test_records_of_two_mappings_have_equal_contents(one_rank, four_ranks, replay):
    """Both runs had equal batches and the same weights up to rounding."""
    one, four = Record.open(one_rank), Record.open(four_ranks)
    assert one.head["sample_numbers"] == four.head["sample_numbers"] == list(range(8, 16))
    assert one.names(step_record.TRACE) == four.names(step_record.TRACE) or set(one.names(step_record.TRACE)) == set(
        four.names(step_record.TRACE)
    )
    for name, tensor in one.batch().items():
        assert torch.equal(tensor, four.batch()[name]), name
    weights = load_file(one.weights), load_file(four.weights)
    assert set(weights[0]) == set(weights[1]) and any(name.endswith("expert_bias") for name in weights[0])
    code, out, _ = replay(one_rank, "--against", str(four_ranks))
    assert code in (0, 1) and "dp 2 ep 2 on 4 ranks" in out


def test_replay_in_another_dtype_reports_its_tolerances(one_rank, replay):
    code, out, err = replay(one_rank, "--bf16")
    assert "(bf16, the lower precision of fp32 and bf16)" in out and "recorded with fp32, replayed with bf16" in out, (
        out + err
    )
    assert code == int("first difference" in out) and ("\n*" in out) == bool(code)
    if code:
        assert "with the recorded flags, run again on this machine: 0\n" in out


def test_bf16_record_replays_in_fp32_with_a_flag(tmp_path, replay):
    folder = recorded(tmp_path, "--bf16")
    assert replay(folder)[1].count("bit for bit") == 1
    code, out, err = replay(folder, "--fp32")
    assert (
        code in (0, 1) and "replayed: one process, fp32" in out and "recorded with bf16, replayed with fp32" in out
    ), out + err


def test_dropout_replays_equally_only_on_the_same_ranks(tmp_path, replay):
    folder = recorded(
        tmp_path, "--hidden-dropout", "0.1", "--tensor-model-parallel-size", "2", "--sequence-parallel", ranks=2
    )
    code, out, err = replay(folder)
    assert code == 0 and "bit for bit" in out, out + err
    code, out, _ = replay(folder, "--one-process")
    assert code == 1 and "first difference: output of embedding" in out
    assert "expected difference: --hidden-dropout: every rank draws its own random numbers" in out


def test_replay_explains_dropped_tokens_of_another_mapping(tmp_path, replay):
    folder = recorded(
        tmp_path,
        "--moe-expert-capacity-factor",
        "1.0",
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
        ranks=2,
    )
    code, out, err = replay(folder, "--one-process")
    assert (
        code == 1
        and "expected difference: --moe-expert-capacity-factor: the capacity counts the tokens of one rank" in out
    ), out + err
    assert (
        "first difference: chosen experts of decoder.layers.1.mlp.router" in out
        and "other tokens dropped, or a fault" in out
    )


MANY_TOKENS = "--bf16 --num-experts 8 --seq-length 64 --max-position-embeddings 64 --global-batch-size 16".split()


def test_replay_tells_near_ties_from_routing_faults(tmp_path, replay, monkeypatch):
    folder = recorded(tmp_path, *MANY_TOKENS)
    _, out, err = replay(folder, "--fp32")
    assert "near ties of the routing: " in out and "excluded because they follow near ties" in out, out + err
    assert "chosen experts: 2, 0 differ" in out and "first difference: chosen experts" not in out, out
    right = TopKSelection.route

    def wrong(self, logits_TE, *chosen):
        probs_TE, routing_TE = right(self, logits_TE, *chosen)
        return probs_TE, routing_TE.index_put((torch.tensor(5),), routing_TE[5].roll(3))

    monkeypatch.setattr(TopKSelection, "route", wrong)
    code, out, err = replay(folder)
    assert code == 1 and "first difference: chosen experts of decoder.layers.1.mlp.router\n" in out, out + err
    assert "tokens, first in decoder.layers.1" not in out and "token 2; 8 of 1024 tokens" in out, out


EVEN = "--num-layers 4 --moe-layer-freq 1 "
KINDS = {
    "zero bubble, tied": (
        EVEN
        + "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --untie-embeddings-and-output-weights=false",
        2,
    ),
    "virtual stages, overlap, bf16": (
        EVEN
        + "--moe-token-dispatcher-type alltoall --bf16 --overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
        4,
    ),
    "fully sharded": ("--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist", 2),
    "Megatron's full sharding": (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
        "--use-distributed-optimizer --ckpt-format fsdp_dtensor",
        2,
    ),
    "one layer for two depths": (
        "--mtp-num-layers 2 --mtp-use-repeated-layer --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 1",
        2,
    ),
    "documents over context ranks": (
        "--context-parallel-size 2 --cp-comm-type a2a --reset-attention-mask --reset-position-ids --eod-mask-loss",
        2,
    ),
    "a loss per token": ("--calculate-per-token-loss --context-parallel-size 2 --tensor-model-parallel-size 2", 4),
    "fp16": ("--fp16", 2),
    "global balance": ("--moe-router-load-balancing-type global_aux_loss", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_replays_bitwise_and_on_one_process(kind, tmp_path, replay):
    flags, ranks = KINDS[kind]
    folder = recorded(tmp_path, *flags.split(), ranks=ranks)
    code, out, err = replay(folder)
    assert code == 0 and "bit for bit" in out, out + err
    code, out, err = replay(folder, "--one-process")
    assert code == 0, out + err


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid --fp8-recipe delayed --tensor-model-parallel-size 2 --sequence-parallel",
        "--fp8-format e4m3 --fp8-recipe blockwise --expert-model-parallel-size 2",
    ],
)
def test_fp8_run_replays_bitwise(flags, tmp_path, replay):
    code, out, err = replay(recorded(tmp_path, "--bf16", *flags.split(), ranks=2))
    assert code == 0 and "bit for bit" in out and f"({list_widths('or')}): outputs" in out, out + err


@pytest.mark.slow
def planned(words, **changes):
    """Flags of the replay of an iteration that ran with these flags on one rank."""
    head = {
        "flags": [*MODEL, *words.split()],
        "samples": 4,
        "vocab_size": 120,
        "padded_vocab_size": 128,
        "loss_scale": 1,
    }
    record = SimpleNamespace(head=head, weights=Path("weights"))
    return plan_replay(record, ReplayChanges(world_size=1, **changes)).argv


def test_replay_writes_and_runs_nothing_of_the_recorded_run():
    words = "--moe-routing-trace-path a --result-rejected-tracker-filename b --dump-param-to-param-group-map c "
    argv = planned(words + "--log-straggler --sample-prompts Once --sample-interval 1 --global-batch-size 4")
    assert not {"--sample-prompts", *words.split()[::2]}.intersection(argv), argv


def test_fp32_replay_leaves_out_every_flag_of_half_precision():
    argv = planned("--bf16 --fp32-residual-connection --grad-reduce-in-bf16", fp32=True)
    assert not {"--bf16", "--fp32-residual-connection", "--grad-reduce-in-bf16"} & {*argv}


def test_launched_ranks_replay_together(one_rank):
    command = [sys.executable, SCRIPT, one_rank, "--tensor-model-parallel-size", "2"]
    with rank_variables(2) as variables:
        ranks = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(**each)) for each in variables
        ]
        outputs = [process.communicate(timeout=600)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0] and "quantities within their tolerances" in outputs[0], (
        outputs
    )


def test_replay_names_the_layer_of_a_wrong_output(one_rank, replay, monkeypatch, tmp_path):
    right = MoELayer.forward

    def wrong(self, x_SBH, *args, **named):
        return right(self, x_SBH, *args, **named) * (1.001 if self.layer_number == 2 else 1.0)

    monkeypatch.setattr(MoELayer, "forward", wrong)
    code, out, err = replay(one_rank, "--expert-model-parallel-size", "2", "--report-html", tmp_path / "replay.html")
    assert code == 1, out + err
    assert "first difference: output of decoder.layers.1.mlp\n" in out
    assert "first difference: output of decoder.layers.1.mlp, by " in (tmp_path / "replay.html").read_text()
    assert "first in microbatch 1, sample 8, token 0; 256 of 256 tokens" in out
    assert (
        "quantities differ; those before this one are equal" in out and "\n*   decoder.layers.2.self_attention" in out
    )


def test_replay_names_microbatch_sample_and_token_of_a_wrong_output(one_rank, replay, monkeypatch):
    right, calls = MLP.forward, []

    def wrong(self, x_SBH):
        y_SBH = right(self, x_SBH)
        calls.append(None)
        if len(calls) == 3:
            y_SBH = y_SBH.index_put((torch.tensor(17), torch.tensor(1)), y_SBH[17, 1] * 1.01)
        return y_SBH

    monkeypatch.setattr(MLP, "forward", wrong)
    code, out, err = replay(one_rank)
    assert code == 1, out + err
    assert "first difference: output of decoder.layers.0.mlp\n" in out
    assert "first in microbatch 3, sample 13, token 17; 1 of 256 tokens" in out


def copy_record_with_changed_weight(folder, target, name, change):
    """Copy a record, change one weight, and update its checksums."""
    shutil.copytree(folder, target)
    weights = load_file(target / step_record.WEIGHTS)
    change(weights[name])
    save_file(weights, target / step_record.WEIGHTS)
    head = json.loads((target / step_record.HEAD).read_text())
    unsealed = target.rename(target.with_name("unsealed"))
    step_record.finalize_record(unsealed, target, head, head["files"])
    return target


@pytest.mark.parametrize(("name", "first"), [
    ("decoder.layers.1.self_attention.linear_proj.weight", "output of decoder.layers.1.self_attention"),
    ("decoder.layers.2.mlp.router.weight", "output of decoder.layers.2.mlp.router.logits"),
    ("decoder.layers.2.mlp.router.expert_bias", "chosen experts of decoder.layers.2.mlp.router"),
    ("decoder.final_layernorm.weight", "output of decoder.final_layernorm"),
    ("output_layer.weight", "token losses of loss"),
])  # fmt: skip
def test_replay_names_the_first_output_that_uses_a_changed_weight(one_rank, replay, tmp_path, name, first):
    def change(weight):
        weight.add_(torch.linspace(-0.5, 0.5, len(weight)).view(-1, *[1] * (weight.dim() - 1)))

    code, out, err = replay(copy_record_with_changed_weight(one_rank, tmp_path / "record", name, change))
    assert code == 1 and f"first difference: {first}\n" in out, out + err


def test_nonfinite_iteration_is_recorded_before_the_run_ends(tmp_path, replay, monkeypatch):
    right = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda self, x_SBH: right(self, x_SBH) * float("nan"))
    finished = run([*MODEL[:-1], "1"], tmp_path)
    assert finished.returncode not in (0, 2) and "iteration 1 is recorded in ck/recorded_step_1" in finished.stderr, (
        finished.stderr
    )
    found = Record.open(tmp_path / "ck" / "recorded_step_1")
    assert "nan" in found.head["failure"]
    assert found.joined("trace/embedding").isfinite().all() and found.joined("trace/decoder.layers.0.mlp").isnan().all()
    code, out, err = replay(found.folder)
    assert code == 0 and "the recorded run failed: " in out and "bit for bit" in out, out + err


def test_skipped_iteration_replays_bitwise(tmp_path, replay, monkeypatch):
    spike = rejection.RejectionReason("spike", "the loss is a spike")
    monkeypatch.setattr(rejection.LossHistory, "judge_loss", lambda self, loss, rules: spike if rules.spikes else None)
    finished = run([*MODEL, "--check-for-spiky-loss", "--on-loss-spike", "skip", "--rerun-mode", "disabled"], tmp_path)
    found = Record.open(tmp_path / "ck" / "recorded_step_2")
    assert finished.returncode == 0 and found.head["skipped"] == "the loss is a spike", finished.stderr
    code, out, err = replay(found.folder)
    assert code == 0 and "the recorded run skipped the update: the loss is a spike\n" in out and "bit for bit" in out, (
        out + err
    )


@pytest.mark.parametrize(
    "name", [step_record.WEIGHTS, step_record.GRADIENTS, "rank_00000.safetensors", "random_00000.pt", step_record.HEAD]
)
def test_damaged_record_is_refused_with_the_file_name(one_rank, replay, tmp_path, name):
    shutil.copytree(one_rank, tmp_path / "record")
    path = tmp_path / "record" / name
    path.write_bytes(path.read_bytes()[:-8])
    code, _, err = replay(tmp_path / "record")
    assert code == 2 and name in err and "Traceback" not in err
    path.unlink()
    code, _, err = replay(tmp_path / "record")
    assert code == 2 and name in err and "Traceback" not in err


@pytest.mark.parametrize(("words", "message"), [
    (["--swigluu"], "--swigluu"),
    (["--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3"),
    (["--world-size", "3"], "--micro-batch-size 2 on each of 3 data ranks"),
    (["--world-size", "0"], "--world-size 0 must be above 0"),
    (["--without", "--bf16"], "--without --bf16: no such flag was recorded"),
    (["--num-experts", "8"], "the weights do not fit the model"),
    (["--against", "nowhere"], "nowhere: there is no such folder"),
    (["--against", "nowhere", "--swiglu"], "it takes no flags"),
    (["--against", "nowhere", "--fp32"], "and no options of a replay"),
    (["--timeout", "nan"], "--timeout nan"),
    (["--keep", "/"], "--keep /: already exists"),
])  # fmt: skip
def test_invalid_replay_input_exits_with_2_without_traceback(one_rank, replay, words, message):
    code, out, err = replay(one_rank, *words)
    assert code == 2 and message in err and "Traceback" not in err, (code, out, err)


def test_missing_record_is_refused(replay, tmp_path):
    assert replay(tmp_path / "none")[0] == 2
    code, _, err = replay(tmp_path)
    assert code == 2 and "record.json: there is no such file" in err
    code, _, err = replay("--one-process")
    assert code == 2 and "the directory of the record comes first" in err


def test_unwritable_record_does_not_end_the_run(tmp_path):
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "recorded_step_2.unfinished").write_text("in the way")
    finished = run(MODEL, tmp_path)
    assert (
        finished.returncode == 0
        and "this iteration is not recorded" in finished.stderr
        and "the run continues" in finished.stderr
    )
    assert not (tmp_path / "ck" / "recorded_step_2").exists() and (tmp_path / "ck" / "iter_0000003").is_dir()


def test_recording_does_not_change_training(tmp_path, one_rank):
    finished = run(MODEL[:-2], tmp_path)
    assert finished.returncode == 0
    read = [read_metrics(folder / "metrics.jsonl") for folder in (one_rank.parent, tmp_path / "ck")]
    for mine, theirs in zip(*read, strict=True):
        assert mine["lm loss"] == theirs["lm loss"] and mine["grad_norm"] == theirs["grad_norm"]


def test_record_step_requires_save(tmp_path):
    words = MODEL[: MODEL.index("--save")]
    finished = run([*words, "--record-step", "2"], tmp_path)
    assert finished.returncode == 2 and "--record-step 2 needs --save DIR" in finished.stderr


@pytest.mark.parametrize("flags", ["--train-iters 1", "--iterations-to-skip 2", "--skip-train"])
def test_unreachable_record_step_is_reported_before_the_run(tmp_path, flags):
    finished = run([*MODEL, *flags.split()], tmp_path)
    assert finished.returncode == 0 and "--record-step 2: nothing will be recorded" in finished.stderr, finished.stderr
