"""Every recorded flag of Megatron-LM is known, with its spelling, type, default and choices."""

import json

from arguments.container import OPTIONS
from arguments.flag_status import OLD_SPELLINGS, PRODUCTS, find_out_of_scope, is_known_spelling
from arguments.mechanisms.dispatchers import BACKEND, SELECTABLE, TYPE
from arguments.mechanisms.sublayers import SUBLAYERS, VARIANT
from arguments.settings import Settings
from arguments.tokens import FIELDS, parse_tokens
from tests.arguments.recorded import load, megatron_flags, megatron_parser

FLAGS = megatron_flags()
OWN_CHOICES = {
    TYPE: [each.type for each in SELECTABLE if each.backend is None and not each.is_upstream],
    BACKEND: [each.backend for each in SELECTABLE if each.backend is not None and not each.is_upstream],
    VARIANT: [each.variant for each in SUBLAYERS if each.variant and not each.is_upstream],
}
OWN_DEFAULTS = {"eval_interval": 1000}  # that of the released versions, and not main's None


def test_record_is_complete():
    assert len(FLAGS) > 800
    assert sum(record["moe_relevant"] for record in FLAGS) > 500


def test_every_spelling_of_any_version_is_known():
    other = load("retired_flags")
    names = [spelling for record in FLAGS for spelling in record["flags"]]
    names += [flag.rstrip(":") for flag, *_ in other["retired"]]
    names += [name for names, *_ in other["dev_only"] for name in names]
    assert [name for name in names if name not in FIELDS and not is_known_spelling(name)] == []


RELEASED = """
    --load-model-opt-format --langrl-inference-server-type --disable-chunked-prefill
    --disable-async-tensor-model-parallel-allreduce --disable-ckpt-fully-parallel-save --tokenizer-hf-use-fast
    --tokenizer-hf-include-special-tokens --no-stream-ckpt-dequant --disable-stream-ckpt-dequant
    --enable-routing-replay --max-seqlen-per-cp-rank --teacher-model-config
    --muon-no-use-nesterov
""".split()
"""Of the releases 0.13 to 0.19 and their development branches, and not of main."""


def test_spellings_of_releases_mean_what_they_meant():
    assert [name for name in RELEASED if not is_known_spelling(name)] == []
    assert OLD_SPELLINGS["--muon-no-use-nesterov"].status == "no effect" and not OPTIONS["muon_nesterov"].default
    words = OLD_SPELLINGS["--max-seqlen-per-cp-rank"].replacement(["64"])
    assert words == ["--max-seqlen-per-dp-cp-rank", "64"]


def test_no_spelling_is_in_two_tables():
    assert [spelling for spelling in FIELDS if is_known_spelling(spelling)] == []
    words = [word.partition("=")[0] for product in PRODUCTS for word in product.flags.split()]
    assert len(words) == len(set(words)) and not set(words) & set(OLD_SPELLINGS)


def test_prefixes_match_flags_of_their_product_only():
    """Every prefix matches a recorded flag, and no flag that another table names."""
    recorded = {spelling for record in FLAGS for spelling in record["flags"]}
    for product in PRODUCTS:
        for prefix in product.prefixes.split():
            assert any(spelling.startswith(prefix) for spelling in recorded), prefix
        for word in product.flags.split():
            assert find_out_of_scope(word.partition("=")[0])[0] is product


def test_fields_equal_the_recorded_flags():
    """Names, spellings, defaults, number of values, choices and types; every difference is listed."""
    dests = {record["dest"] for record in FLAGS if record["moe_relevant"]}
    differences = [f"{dest}: not a field" for dest in sorted(dests - set(OPTIONS))]
    for record in FLAGS:
        option = OPTIONS.get(record["dest"])
        if option is not None:
            found, recorded = of_field(option, record), of_record(record)
            differences += [
                f"{record['flags'][0]}: {name} is {found[name]!r}, recorded {value!r}"
                for name, value in recorded.items()
                if found[name] != value or type(found[name]) is bool is not type(value)
            ]
    assert not differences, "\n".join(differences)


def of_record(record: dict) -> dict:
    """What the record says about a flag."""
    facts = {"spelling": tuple(record["flags"]), "hidden": record["hidden"], "default": record["default"]}
    facts["default"] = OWN_DEFAULTS.get(record["dest"], facts["default"])
    if record["dest"] == "yarn_correction_range_round_to_int":  # (two records for one destination)
        facts["default"] = None
    if record["action"] != "store":
        return facts | {"number of values": 0}
    facts["number of values"] = 1 if record["nargs"] is None else record["nargs"]
    facts["choices"] = record["choices"] and record["choices"] + OWN_CHOICES.get(record["dest"], [])
    return facts | ({"type": record["type"]} if record["type"] in ("int", "float") else {})


def of_field(option, record: dict) -> dict:
    return {
        "spelling": option.off if record["action"] == "store_false" else option.on,
        "hidden": option.hidden,
        "default": option.default,
        "number of values": option.takes,
        "choices": option.choices and list(option.choices),
        "type": option.type_name,
    }


def parse_with_megatron(argv):
    values, unknown = megatron_parser().parse_known_args(argv)
    assert unknown == []
    return vars(values)


def parse_with_ours(argv):
    settings = Settings(OPTIONS)
    reading = parse_tokens(argv)
    assert [v.message for v in reading.violations if v.kind != "product"] == []
    reading.apply(settings, "command line")
    return settings.values


PARSED = {  # (destination: how Megatron turns the text into a value, which the records do not hold)
    "moe_layer_freq", "linear_attention_freq", "no_rope_freq", "window_size", "window_attn_skip_freq",
    "experimental_attention_variant", "yarn_correction_range_round_to_int",
}  # fmt: skip


LINES = """
--num-layers 4 --hidden-size=128 --lr 1e-3 --bf16
--data-path 0.3 a 0.7 b --split 9,1,0
--data-path --num-layers 3
--moe-aux-loss-coeff 1e-2 -1 --window-attn-skip-freq 2
--moe-expert-capacity-factor -1.0 --seed -5
--rampup-batch-size 8 8 100 --rampup-batch-size 1 2 3
--disable-bias-linear --no-fp8-wgrad --disable-fp8-wgrad
--lr 1 --lr 2 --recompute-modules moe_act layernorm
--inference-max-requests 3 --rl-default-top-k -1 --no-rl-skip-bos-token --num-layers 7
--profile-ranks 0 1 --cp-comm-type a2a p2p --persistent-save-interval 9
--wandb-exp-name=a=b --tensorboard-dir - 
"""


def test_tokens_are_parsed_as_argparse_does():
    for line in LINES.split("\n"):
        assert differing(line.split()) == set(), line


def differing(argv) -> set[str]:
    megatron, ours = parse_with_megatron(argv), parse_with_ours(argv)
    return {
        dest
        for dest in ours
        if dest in megatron and dest not in {*PARSED, *OWN_DEFAULTS} and megatron[dest] != ours[dest]
    }


def test_recipes_are_parsed_as_argparse_does(shared):
    for recipe in json.loads((shared / "reference" / "recipes.json").read_text()):
        argv = [token for token in recipe["argv"] if not token.endswith(":")]
        if len(argv) != len(recipe["argv"]):
            continue
        differ = differing(argv)
        assert differ <= {"dist_ckpt_format_deprecated"}, f"{recipe['name']}: {differ}"
