"""--use-checkpoint-args: the architecture is taken from the checkpoint."""

import re
from typing import get_args

import pytest

from arguments import ArgumentError, find_checkpoint_args_source, parse_args
from arguments.checkpoint_args import SHAPE, CheckpointArgsSource, apply, same_meaning
from arguments.container import OPTIONS
from arguments.flag_properties import Restore
from arguments.help import field_docs
from arguments.layer_flags import by_layer, by_sublayer, numbering_difference
from arguments.mechanisms.selections import SELECTING
from arguments.schema import layer_pattern
from arguments.settings import Settings
from arguments.tokens import parse_tokens
from moe_trainer.commands import train_process
from tests.arguments.test_tokens import TOY

LINE = [*TOY, "--load", "runs/a", "--use-checkpoint-args"]
AT_LAYERS = LINE.index("--num-layers")
LINE_WITHOUT_LAYERS = [*LINE[:AT_LAYERS], *LINE[AT_LAYERS + 2 :], "--disable-bias-linear"]
PLAIN = [word for word in LINE if word not in ("--tokenizer-type", "NullTokenizer")]


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


@pytest.mark.parametrize("section", ["model", "moe", "data"])
def test_every_flag_of_the_model_and_of_the_data_says_whether_a_checkpoint_restores_it(section):
    undecided = [option.dest for option in OPTIONS.values() if option.section == section and not option.restore]
    assert not undecided, f'say flag(..., restore="always"), or another of {get_args(Restore)}, of {undecided}'


def test_flags_name_known_ways_to_restore_them():
    assert {when for option in OPTIONS.values() for when in option.restore} == set(get_args(Restore))
    together = [option.dest for option in OPTIONS.values() if "never" in option.restore and len(option.restore) > 1]
    assert not together, f"restored never and otherwise: {together}"


def _other_value(option):
    """Return a value of a flag that is not its default."""
    if option.takes == 0:
        return not option.default
    if option.choices is not None:
        return next(choice for choice in option.choices if choice != option.default)
    value = {"int": 3, "float": 0.25}.get(option.type_name, "other")
    return [value] if option.is_list else value


@pytest.mark.parametrize("restore", get_args(Restore))
def test_restored_flags_are_taken(restore):
    """What a flag declares is what happens, in a training run and in an evaluation, a conversion, another mapping."""
    dests = [dest for dest, option in OPTIONS.items() if {*option.restore} - {"must agree"} == {restore}]
    recorded = {dest: _other_value(OPTIONS[dest]) for dest in dests} | {"bf16": True}
    recorded |= {"moe_router_load_balancing_type": "sinkhorn"} if restore == "always" else {}
    recorded |= {"moe_expert_capacity_factor": 1.0} if restore == "capacity" else {}
    usual = {"always", "storage", "adapters", "tokenizer", "tokenizer unless given", "unless given"}
    for flags, wanted in (
        ([], usual),
        (["--skip-train"], usual | {"to evaluate", "capacity", "data"}),
        (["--ckpt-convert-format", "torch"], usual | {"to convert"}),
        (["--use-mp-args-from-checkpoint-args"], usual | {"mapping"}),
        (["--no-use-tokenizer-model-from-checkpoint-args"], usual - {"tokenizer", "tokenizer unless given"}),
    ):
        settings = Settings(OPTIONS)
        parse_tokens(["--load", "runs/a", "--use-checkpoint-args", "--bf16", *flags]).apply(settings, "command line")
        apply(settings, recorded)
        taken = {dest for dest in dests if settings.why.get(dest) == "from the checkpoint"}
        assert taken == (set(dests) if restore in wanted else set()), f"with {flags}: not as declared"


@pytest.mark.parametrize(
    ("recorded", "taken"),
    [("alltoall_seq", "alltoall"), ("of_another_program", "allgather"), (["alltoall"], "allgather")],
)
def test_old_and_unknown_values_of_a_record(recorded, taken):
    checkpoint = {"moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": recorded}
    args = parse_args([*PLAIN, "--skip-train"], 1, checkpoint=checkpoint)
    assert args.moe.moe_token_dispatcher_type == taken


@pytest.mark.parametrize("kind", SELECTING)
def test_how_experts_are_chosen_is_restored(kind):
    recorded = {"num_experts": 4, "moe_router_load_balancing_type": kind}
    assert parse_args(PLAIN, 1, checkpoint=recorded).moe.moe_router_load_balancing_type == kind
    with pytest.raises(ArgumentError, match=f"type seq_aux_loss: the checkpoint has .* {kind}"):
        parse_args([*PLAIN, "--moe-router-load-balancing-type", "seq_aux_loss"], 1, checkpoint=recorded)
    # losses of training are those of the command line
    recorded |= {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]}
    args = parse_args([*PLAIN, "--moe-router-load-balancing-type", "seq_aux_loss"], 1, checkpoint=recorded)
    assert args.moe.moe_router_load_balancing_type == "seq_aux_loss"


@pytest.mark.parametrize("pattern", ["GE+-", "+E", "DE", "GE*E"])
def test_what_letters_of_a_hybrid_pattern_select_need_not_be_recorded(pattern):
    """Megatron-LM records --multi-latent-attention alone of it, and positions that its latent attention does not read."""
    indexers = (
        "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 5".split() if "D" in pattern else []
    )
    at = TOY.index("--num-layers")
    words = [
        *TOY[:at],
        *TOY[at + 2 :],
        *indexers,
        "--swiglu",
        "--num-experts",
        "4",
        "--position-embedding-type",
        "none",
    ]
    here = parse_args([*words, f"--hybrid-layer-pattern={pattern}"], 1).as_dict()
    unset = {"experimental_attention_variant": None, "linear_attention_freq": None, "position_embedding_type": "none"}
    assert [dest for dest in SHAPE if not same_meaning(dest, here | unset, here)] == []
    gpt = here | unset | {"hybrid_layer_pattern": None}
    same = all(same_meaning(dest, gpt, here) for dest in unset)
    assert same == (pattern == "+E")  # latent attention of GPT models rotates with "none" too


def test_flags_that_number_layers_are_those_of_sublayers_in_a_pattern():
    """What layers 2 and 4 of a GPT checkpoint have is of the sublayers 3, 4, 7 and 8."""
    recorded = parse_args([*LINE, "--position-embedding-type", "rope", "--disable-bias-linear"], 1).as_dict()
    recorded |= {"no_rope_freq": 2, "window_size": [4, 0], "window_attn_skip_freq": 2}
    recorded |= {"rotary_base_per_layer": [1.0, 2.0, 3.0, 4.0], "num_layers": 4}
    args = parse_args([*LINE, "--hybrid-layer-pattern=*-*-*-*-", "--num-layers", "8"], 1, checkpoint=recorded)
    assert args.model.no_rope_freq == [0, 0, 1, 1, 0, 0, 1, 1]
    assert args.model.window_attn_skip_freq == [1, 1, 0, 0, 1, 1, 0, 0]
    assert args.model.rotary_base_per_layer == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert numbering_difference(recorded, args.as_dict()) is None
    other = {**args.as_dict(), "no_rope_freq": 2}
    assert "--no-rope-freq numbers its layers" in (numbering_difference(recorded, other) or "")
    unset, none = ({**args.as_dict(), "no_rope_freq": value} for value in (None, [0] * 8))
    assert numbering_difference(unset, none) is None
    in_depth = [{"hybrid_layer_pattern": "*-*-/*-", "no_rope_freq": [0, 0, 1, 1, each, 0]} for each in (0, 1)]
    assert "[0, 1, 0] in the checkpoint, and [0, 1, 1]" in (numbering_difference(*in_depth) or "")


def test_counted_first_layers_are_twice_as_many_in_a_pattern():
    gpt = {"num_layers": 4, "num_experts": 4, "moe_router_topk": 2, "moe_n_hash_layers": 2}
    args = parse_args([*LINE_WITHOUT_LAYERS, "--hybrid-layer-pattern=*E*E*E*E"], 1, checkpoint=gpt)
    assert args.moe.moe_n_hash_layers == 4
    hybrid = args.as_dict()
    assert numbering_difference(gpt, hybrid) is None and numbering_difference(hybrid, gpt) is None
    for saved, here, wrong, right in ((gpt, hybrid, 2, 4), (hybrid, gpt, 4, 2)):
        found = numbering_difference(saved, {**here, "moe_n_hash_layers": wrong}) or ""
        assert "one entry for each MoE layer is [1, 1, 0, 0] in the checkpoint" in found
        assert found.endswith(f"with --moe-n-hash-layers {wrong} of this run. Give --moe-n-hash-layers {right}")
    never = numbering_difference({**gpt, "moe_n_hash_layers": 0}, hybrid) or ""
    assert never.endswith("Leave --moe-n-hash-layers out")


@pytest.mark.parametrize(
    ("flags", "given"),
    [
        ({"no_rope_freq": 2}, "--no-rope-freq ([0]*2+[1]*2+[0]*2+[1]*2)"),
        ({"window_attn_skip_freq": [1, 1, 0, 1], "window_size": (4, 0)}, "--window-attn-skip-freq ([1]*4+[0]*2+[1]*2)"),
        ({"rotary_base_per_layer": [1.0, 2.0, 3.0, 4.0]}, "--rotary-base-per-layer 1.0 1.0 2.0 2.0 3.0 3.0 4.0 4.0"),
    ],
)
def test_the_error_about_numbered_layers_has_the_right_flag(flags, given):
    gpt, hybrid = {"num_layers": 4, **flags}, {"hybrid_layer_pattern": "*-*-*-*-"}
    assert (numbering_difference(gpt, {**hybrid, **dict.fromkeys(flags)}) or "").endswith(f"Give {given}")
    back = {**hybrid, **by_sublayer(gpt)}
    assert (
        by_layer(back).keys() == by_sublayer(gpt).keys()
        and numbering_difference(back, {**gpt, **by_layer(back)}) is None
    )


OF_ALL_LAYERS = {
    "csa_compress_ratios": "no pattern has layers with compressed keys",
    "dsa_indexer_topk_freq": "rejected: no layers share a selection",
    "mtp_num_layers": "depths, which have numbers of their layers",
    "rope_scaling_high_freq_factor": "a frequency of rotations",
    "mtp_use_repeated_layer": "of the depths",
    "qk_l2_norm_rope_layers_only": "the layers are those of --no-rope-freq",
}
SPEAKS_OF_LAYERS = re.compile(r"(?<!key_)layers|_freq(_|$)|per_layer")


def test_flags_of_single_layers_say_how_a_pattern_numbers_them():
    """A flag that is forgotten would be taken unchanged by a model of the other flavor."""
    named = {dest for dest in SHAPE if SPEAKS_OF_LAYERS.search(dest) or OPTIONS[dest].read is layer_pattern}
    helps = {dest: doc for section in ("model", "moe") for dest, (_, doc) in field_docs(section).items()}
    named |= {dest for dest in SHAPE if re.search("every N-th|first layers|each layer|per layer", helps.get(dest, ""))}
    undecided = {dest for dest in named if OPTIONS[dest].layers is None} - OF_ALL_LAYERS.keys()
    assert not undecided, f"say flag(..., layers=...) of {undecided}"


def test_a_pattern_of_other_layers_than_those_of_the_checkpoint_names_the_first_one():
    gpt = {"num_layers": 2, "num_experts": 4, "moe_router_topk": 2}
    message = r"\*E\*-: the checkpoint is of a GPT model; .* layers are \*E\*E, .*: layer 3 \(from 0\) is E in the "
    with pytest.raises(ArgumentError, match=message):
        parse_args([*LINE_WITHOUT_LAYERS, "--hybrid-layer-pattern=*E*-"], 1, checkpoint=gpt)


def test_a_pattern_with_experts_is_made_of_a_dense_gpt_checkpoint():
    recorded = {"num_layers": 2, "no_rope_freq": 2, "position_embedding_type": "rope"}
    words = "--num-experts 4 --moe-use-upcycling --save new --save-interval 5 --hybrid-layer-pattern".split()
    args = parse_args([*LINE_WITHOUT_LAYERS, *words[:-1], f"{words[-1]}=*E*-"], 1, checkpoint=recorded)
    assert (args.model.num_layers, args.model.no_rope_freq) == (4, [0, 0, 1, 1])
    with pytest.raises(ArgumentError, match="layers are .-.-, and those of this run .--.: layer 2"):
        parse_args([*LINE_WITHOUT_LAYERS, *words[:-1], f"{words[-1]}=*E-*"], 1, checkpoint=recorded)


def test_a_pattern_with_experts_is_kept_where_a_dense_one_is_upcycled():
    line = [*LINE, "--disable-bias-linear"]
    recorded = parse_args([*line, "--hybrid-layer-pattern=*-*-"], 1).as_dict()
    words = "--num-experts 4 --moe-use-upcycling --save new --save-interval 5 --hybrid-layer-pattern=*E*-".split()
    args = parse_args([*line, *words], 1, checkpoint=recorded)
    assert args.model.hybrid_layer_pattern == "*E*-" and args.moe.moe_layer_freq == [0, 1, 0, 0]


def test_stages_of_a_pattern_are_the_runs_own():
    line = [*LINE, "--position-embedding-type", "rope", "--disable-bias-linear"]
    line = [word for at, word in enumerate(line) if "--num-layers" not in line[max(at - 1, 0) : at + 1]]
    recorded = parse_args([*line, "--hybrid-layer-pattern=*-*-"], 1).as_dict()
    stages = ["--hybrid-layer-pattern=*-*|-", "--pipeline-model-parallel-size", "2"]
    args = parse_args([*line, *stages], 2, checkpoint=recorded)
    assert args.parallel.pipeline_model_parallel_layout == "Ettt|tL"


def test_new_adapters_start_on_a_checkpoint_without_adapters():
    recorded = {"lora_dim": None, "lora_alpha": 32.0, "swiglu": True}
    args = parse_args([*LINE, "--lora-dim", "4"], 1, checkpoint=recorded)
    assert (args.model.lora_dim, args.model.swiglu) == (4, True)


def test_precision_of_the_residual_stream_needs_the_runs_own_precision():
    recorded = {"fp32_residual_connection": True, "bf16": True}
    assert not parse_args(LINE, 1, checkpoint=recorded).model.fp32_residual_connection
    assert parse_args([*LINE, "--bf16"], 1, checkpoint=recorded).model.fp32_residual_connection


def test_checkpoint_values_override_flags_with_a_note():
    recorded = {"num_layers": 2, "hidden_size": 64, "num_experts": 2, "ffn_hidden_size": 300, "lr": 5.0, "unknown": 1}
    recorded |= {"make_vocab_size_divisible_by": 16}
    line = [*LINE, "--disable-bias-linear", "--make-vocab-size-divisible-by", "64"]
    args = parse_args(line, 1, checkpoint=recorded)
    assert args.moe.num_experts == 2 and args.model.ffn_hidden_size == 300
    assert args.optimizer.lr == 1e-3 and args.source["num_experts"] == "derived"
    expected = "--make-vocab-size-divisible-by 64: overridden by the checkpoint's value 16 (--use-checkpoint-args)"
    assert [line for line in args.notes if "overridden" in line] == [expected]


LATENT = "--multi-latent-attention --position-embedding-type rope"
GROUPS = (
    "--num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-score-function sigmoid"
)


@pytest.mark.parametrize(
    ("flags", "recorded", "refused"),
    [
        ("--rotary-base 20000 --position-embedding-type rope", {"rotary_base": 10000}, "--rotary-base 20000: the"),
        ("--disable-bias-linear", {"add_bias_linear": True}, "--disable-bias-linear: the checkpoint has add_bias_l"),
        ("--group-query-attention --num-query-groups 2", {"group_query_attention": False}, "--group-query-attention: "),
        ("--lora-dim 4", {"lora_dim": 8, "lora_alpha": 32.0}, "--lora-dim 4: the checkpoint has lora_dim 8"),
        ("", {"num_layers": 4}, "--num-layers 2: the checkpoint has num_layers 4, which .* Leave --num-layers out, or"),
        # ways to write the same model
        ("--group-query-attention --num-query-groups 4", {"group_query_attention": False, "num_query_groups": 1}, None),
        ("--num-experts 4 --moe-layer-freq ([1]*2)", {"num_experts": 4, "moe_layer_freq": 1}, None),
        ("--num-experts 4 --moe-router-topk-scaling-factor 1", {"num_experts": 4}, None),
        ("--swiglu --ffn-hidden-size 128", {"swiglu": True, "ffn_hidden_size": 128}, None),
        ("--kv-channels 16", {"kv_channels": None}, None),
        ("--max-position-embeddings 64", {"max_position_embeddings": 32}, None),
        (f"{LATENT} --attention-latent-norm-epsilon 1e-5", {}, None),
        (f"{LATENT} --attention-latent-norm-epsilon 1e-6", {}, "--attention-latent-norm-epsilon 1e-06: the check"),
        (GROUPS, dict.fromkeys(("moe_router_num_groups", "moe_router_group_topk")), "--moe-router-num-groups 4: the"),
        (f"{GROUPS} --moe-router-group-score-topk 2", {}, None),
        (f"{GROUPS} --moe-router-group-score-topk 1", {}, "--moe-router-group-score-topk 1: the checkpoint has"),
    ],
)
def test_a_typed_value_that_is_not_the_checkpoints_is_refused(flags, recorded, refused):
    if not recorded:  # of the same run without its last flag
        recorded = parse_args([*LINE, *flags.split()[:-2]], 1).as_dict()
    line = [*LINE, *flags.split()]
    if refused is None:
        parse_args(line, 1, checkpoint=recorded)
    else:
        with pytest.raises(ArgumentError, match=refused):
            parse_args(line, 1, checkpoint=recorded)
    parse_args(line, 1)


def test_multi_token_prediction_can_be_left_out_where_tensors_may_stay_unread():
    rope = [*LINE, "--position-embedding-type", "rope"]
    recorded = parse_args([*rope, "--mtp-num-layers", "1", "--mtp-use-repeated-layer"], 1).as_dict()
    line = [*rope, "--mtp-num-layers", "0"]
    args = parse_args([*line, "--dist-ckpt-strictness", "log_unexpected"], 1, checkpoint=recorded)
    assert not args.model.mtp_num_layers and not args.model.mtp_use_repeated_layer
    for more in ([], ["--dist-ckpt-strictness", "raise_all"]):
        with pytest.raises(ArgumentError, match="--mtp-num-layers 0: .* with --dist-ckpt-strictness log_unexpected"):
            parse_args([*line, *more], 1, checkpoint=recorded)
    hybrid = [*rope, "--hybrid-layer-pattern=*-/*-", "--disable-bias-linear"]
    recorded = parse_args(hybrid, 1).as_dict()
    line = [*rope, "--disable-bias-linear", "--mtp-num-layers", "0"]
    args = parse_args([*line, "--dist-ckpt-strictness", "log_unexpected"], 1, checkpoint=recorded)
    assert not args.model.mtp_num_layers and args.model.hybrid_layer_pattern == "*-"
    with pytest.raises(ArgumentError, match="--mtp-num-layers 0: .* with --dist-ckpt-strictness log_unexpected"):
        parse_args(line, 1, checkpoint=recorded)


def test_flags_of_the_run_itself_are_no_contradiction():
    line = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --swiglu --disable-bias-linear"
    line = [*LINE, *line.split(), "--position-embedding-type", "rope", "--num-experts", "4", "--untie-embeddings-and"]
    line[-1] += "-output-weights"
    parse_args(line, 1, checkpoint=parse_args(line, 1).as_dict())


@pytest.mark.parametrize("rows, taken", [(384, 384), (129, None)])
def test_padded_vocab_size_not_divisible_by_tp_is_ignored(rows, taken):
    line = [*LINE, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--disable-bias-linear"]
    assert parse_args(line, 2, checkpoint={"padded_vocab_size": rows}).data.padded_vocab_size == taken


def test_tokenizer_is_taken_from_checkpoint_unless_disabled():
    recorded = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "t.model"}
    assert parse_args(PLAIN, 1, checkpoint=recorded).data.tokenizer_model == "t.model"
    line = [*LINE, "--no-use-tokenizer-model-from-checkpoint-args"]
    assert parse_args(line, 1, checkpoint=recorded).data.tokenizer_type == "NullTokenizer"


def test_another_tokenizer_than_the_checkpoints_is_refused(tmp_path):
    for name, content in (("a", "same"), ("b", "same"), ("c", "other")):
        (tmp_path / name).write_text(content)
    recorded = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(tmp_path / "a")}
    typed = [*PLAIN, "--tokenizer-model"]
    for same in ("a", "b"):
        args = parse_args([*typed, str(tmp_path / same)], 1, checkpoint=recorded)
        assert args.data.tokenizer_model == recorded["tokenizer_model"]
    for other in (str(tmp_path / "c"), "elsewhere"):
        with pytest.raises(ArgumentError, match="keep .* with --no-use-tokenizer-model-from-checkpoint-args"):
            parse_args([*typed, other], 1, checkpoint=recorded)


def test_copy_of_a_tokenizer_folder_is_the_same_tokenizer(tmp_path):
    for folder, tokens in (("a", "same"), ("copy", "same"), ("other", "else"), ("weights", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(folder)  # of the model
        if tokens:
            (tmp_path / folder / "tokenizer.json").write_text(tokens)
    recorded = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "a")}
    typed = [*PLAIN, "--tokenizer-model"]
    assert parse_args([*typed, str(tmp_path / "copy")], 1, checkpoint=recorded).data.tokenizer_model == str(
        tmp_path / "a"
    )
    for other in ("other", "weights"):
        with pytest.raises(ArgumentError, match="keep .* with --no-use-tokenizer-model-from-checkpoint-args"):
            parse_args([*typed, str(tmp_path / other)], 1, checkpoint=recorded)
    (tmp_path / "copy" / "merges.txt").write_text("more")
    with pytest.raises(ArgumentError, match="--tokenizer-model"):
        parse_args([*typed, str(tmp_path / "copy")], 1, checkpoint=recorded)


SFT = "--sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format assistant".split()


@pytest.mark.parametrize(
    ("typed", "recorded", "expected"),
    [
        (["--tokenizer-type", "SentencePieceTokenizer"], {"hf_model_type": "llama"}, "SentencePieceTokenizer"),
        ([], {"hf_model_type": "llama"}, "HuggingFaceTokenizer"),
        (SFT, {}, "SFTTokenizer"),
    ],
)
def test_tokenizer_of_the_command_line_wins_where_no_run_used_the_recorded_one(typed, recorded, expected):
    recorded = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "folder", **recorded}
    line = PLAIN
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
    recorded = {"num_layers": 2, "num_experts": 4, "num_layers_per_virtual_pipeline_stage": 1}
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
    assert train_process.main([*line, *mode]) == 2
    error = capsys.readouterr().err
    assert "no checkpoint in" in error and "--no-such-flag" in error and "--train-iters" in error
    supplied = [flag for flag in ("--num-layers", "--seq-length") if flag in error]
    assert not supplied, "what the checkpoint would supply is not missing"
    assert train_process.main([*line[:3], *line[4:], "--train-iters", "2", "--eval-iters", "0", *mode]) == 2
    assert "problems" not in capsys.readouterr().err


def test_the_command_line_may_write_the_layers_of_a_gpt_checkpoint_as_a_pattern():
    recorded = parse_args([*LINE, "--num-experts", "4", "--moe-layer-freq", "[0,1]"], 1).as_dict()
    at = LINE.index("--num-layers")
    line = [*LINE[:at], *LINE[at + 2 :]]
    model = parse_args([*line, "--hybrid-layer-pattern=*-*E"], 1, checkpoint=recorded).model
    assert (model.hybrid_layer_pattern, model.num_layers) == ("*-*E", 4)
    with pytest.raises(ArgumentError, match="--hybrid-layer-pattern"):
        parse_args([*line, "--hybrid-layer-pattern=*E*-"], 1, checkpoint=recorded)
