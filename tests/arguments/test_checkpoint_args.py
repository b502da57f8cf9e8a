"""--use-checkpoint-args: the architecture is taken from the checkpoint."""

import pytest

import pretrain_moe
from arguments import ArgumentError, find_checkpoint_args_source, parse_args
from arguments.checkpoint_args import MAPPING, SHAPE, TOKENIZER, CheckpointArgsSource
from arguments.container import OPTIONS
from tests.arguments.test_tokens import TOY

LINE = [*TOY, "--load", "runs/a", "--use-checkpoint-args"]


def find(words):
    return find_checkpoint_args_source(words.split())


def test_checkpoint_source_is_found_before_parsing():
    assert find_checkpoint_args_source(LINE) == CheckpointArgsSource("runs/a", None, False)
    assert find("--use-checkpoint-args --load b --num-layers x") == CheckpointArgsSource("b", None, False)
    step = "--pretrained-checkpoint c --use-checkpoint-args --ckpt-step 5"
    assert find(step) == CheckpointArgsSource("c", 5, False)
    assert find_checkpoint_args_source([*TOY, "--load", "b"]) is None


def test_auto_resume_prefers_newest_checkpoint_of_save_folder():
    resumed = "--use-checkpoint-args --auto-resume --save own"
    assert find(resumed) == CheckpointArgsSource(None, None, True, "own")
    assert find(f"{resumed} --load base --ckpt-step 5") == CheckpointArgsSource("base", 5, False, "own")
    assert find("--auto-resume --save own") is None


def test_missing_checkpoint_is_allowed_only_in_the_save_folder():
    assert find_checkpoint_args_source([*LINE, "--save", "runs/../runs/a"]).may_come
    assert not find_checkpoint_args_source([*LINE, "--save", "runs/b"]).may_come
    assert not find_checkpoint_args_source([*LINE, "--save", "runs/a", "--ckpt-step", "5"]).may_come


def test_lists_contain_only_flags():
    assert [dest for dest in SHAPE + TOKENIZER + MAPPING if dest not in OPTIONS] == []


def test_checkpoint_values_override_flags_with_a_note():
    recorded = {"num_layers": 4, "hidden_size": 64, "num_experts": 2, "ffn_hidden_size": 300, "lr": 5.0, "unknown": 1}
    args = parse_args([*LINE, "--disable-bias-linear"], 1, checkpoint=recorded)
    assert args.model.num_layers == 4 and args.moe.num_experts == 2 and args.model.ffn_hidden_size == 300
    assert args.optimizer.lr == 1e-3 and args.source["num_layers"] == "derived"
    assert any("--num-layers 2: overridden by the checkpoint's value 4" in line for line in args.notes)
    assert not any("--hidden-size" in line for line in args.notes)


@pytest.mark.parametrize("rows, taken", [(384, 384), (129, None)])
def test_padded_vocab_size_not_divisible_by_tp_is_ignored(rows, taken):
    line = [*LINE, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--disable-bias-linear"]
    assert parse_args(line, 2, checkpoint={"padded_vocab_size": rows}).data.padded_vocab_size == taken


def test_tokenizer_is_taken_from_checkpoint_unless_disabled():
    recorded = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "t.model"}
    assert parse_args(LINE, 1, checkpoint=recorded).data.tokenizer_model == "t.model"
    line = [*LINE, "--no-use-tokenizer-model-from-checkpoint-args"]
    assert parse_args(line, 1, checkpoint=recorded).data.tokenizer_type == "NullTokenizer"


SFT = "--sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format assistant".split()


@pytest.mark.parametrize(
    ("typed", "recorded", "expected"),
    [
        (["--tokenizer-type", "SentencePieceTokenizer"], {"hf_model_type": "llama"}, "SentencePieceTokenizer"),
        ([], {"hf_model_type": "llama"}, "HuggingFaceTokenizer"),
        (["--tokenizer-type", "SentencePieceTokenizer"], {}, "HuggingFaceTokenizer"),
        (SFT, {}, "SFTTokenizer"),
    ],
)
def test_tokenizer_of_the_command_line_wins_where_no_run_used_the_recorded_one(typed, recorded, expected):
    recorded = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "folder", **recorded}
    line = [word for word in LINE if "Null" not in word and word != "--tokenizer-type"]
    data = ["--mock-data"] if typed is not SFT else ["--data-path", "chats.jsonl", "--split", "9,1,0"]
    line = [*(word for word in line if word != "--mock-data"), *data]
    args = parse_args([*line, *typed], 1, checkpoint=recorded)
    assert (args.data.tokenizer_type, args.data.tokenizer_model) == (expected, "folder")


def test_command_line_is_used_when_no_checkpoint_exists():
    args = parse_args(LINE, 1, checkpoint={})
    assert args.model.num_layers == 2 and args.output.use_checkpoint_args is False
    with pytest.raises(ArgumentError, match="--num-layers is missing"):
        parse_args(LINE[2:], 1, checkpoint={})


def test_checkpoint_is_ignored_without_use_checkpoint_args():
    args = parse_args(TOY, 1, checkpoint={"num_layers": 4})
    assert args.model.num_layers == 2


def test_flags_from_the_checkpoint_are_not_required():
    line = "--load a --use-checkpoint-args --seq-length 32 --micro-batch-size 2 --train-iters 3 --lr 1e-3 --mock-data"
    recorded = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    recorded |= {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
    args = parse_args([*line.split(), "--eval-interval", "10"], 1, checkpoint=recorded)
    assert (args.model.num_layers, args.model.hidden_size, args.data.vocab_size) == (4, 32, 100)


def test_parallel_sizes_are_taken_from_checkpoint_on_request():
    recorded = {"num_layers": 4, "num_experts": 4, "num_layers_per_virtual_pipeline_stage": 1}
    sizes = {"tensor": 1, "pipeline": 2, "expert": 2}
    recorded |= {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    recorded |= {"expert_tensor_parallel_size": 1, "context_parallel_size": 8}
    more = "--disable-bias-linear --moe-token-dispatcher-type alltoall --global-batch-size 16"
    line = [*LINE, "--expert-model-parallel-size", "4", *more.split()]
    args = parse_args([*line, "--use-mp-args-from-checkpoint-args"], 4, checkpoint=recorded)
    parallel = args.parallel
    assert (parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage) == (2, 1)
    assert parallel.expert_model_parallel_size == 2 and parallel.context_parallel_size == 1
    assert any("--expert-model-parallel-size 4: overridden by the checkpoint's value 2" in text for text in args.notes)
    assert parse_args(line, 4, checkpoint=recorded).parallel.pipeline_model_parallel_size == 1


def test_parallel_sizes_from_checkpoint_are_validated():
    recorded = {"num_layers": 4, "pipeline_model_parallel_size": 2}
    with pytest.raises(ArgumentError, match="3"):
        parse_args([*LINE, "--use-mp-args-from-checkpoint-args"], 3, checkpoint=recorded)


def test_format_conversion_needs_no_training_flags():
    recorded = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    recorded |= {"seq_length": 32, "bf16": True, "optimizer": "sgd", "lr": 1.0}
    line = "--load x --use-checkpoint-args --ckpt-convert-format torch_dist --ckpt-convert-save y --lr-warmup-iters 5"
    args = parse_args(line.split(), 1, checkpoint=recorded)
    assert args.training.skip_train and args.optimizer.use_checkpoint_opt_param_scheduler
    assert args.precision.bf16 and args.optimizer.optimizer == "sgd" and args.data.seq_length == 32
    assert not parse_args([*line.split(), "--fp16"], 1, checkpoint={**recorded, "bf16": False}).precision.bf16
    with pytest.raises(ArgumentError, match="--lr is missing"):
        parse_args([*line.split(), "--override-opt_param-scheduler"], 1, checkpoint=recorded)


@pytest.mark.parametrize("mode", [[], ["--validate-only"], ["--dry-run", "--world-size", "1"]])
def test_missing_checkpoint_does_not_hide_other_errors(mode, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    more = "--use-checkpoint-args --no-such-flag --micro-batch-size 2 --lr 1e-3 --mock-data".split()
    line = ["--load", str(tmp_path / "none"), *more]
    assert pretrain_moe.main([*line, *mode]) == 2
    error = capsys.readouterr().err
    assert "no checkpoint in" in error and "--no-such-flag" in error and "--train-iters" in error
    supplied = [flag for flag in ("--num-layers", "--seq-length") if flag in error]
    assert not supplied, "what the checkpoint would supply is not missing"
    assert pretrain_moe.main([*line[:3], *line[4:], "--train-iters", "2", "--eval-iters", "0", *mode]) == 2
    assert "problems" not in capsys.readouterr().err
