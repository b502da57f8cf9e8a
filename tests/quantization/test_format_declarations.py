"""Declarations of number formats: complete, equal to flags and modules, and true of the recipes."""

import pkgutil
from types import SimpleNamespace

import pytest
from structure.declared import leave_out

from arguments.container import OPTIONS
from arguments.mechanisms import formats
from arguments.mechanisms.format_kinds.declaration import CUSTOM, FormatCapability
from arguments.mechanisms.formats import FLAGS, QUANTIZED, of_width, quantized_format
from arguments.mechanisms.support import NoEffect, Rejected
from arguments.parse import resolve_command_line
from arguments.precision import PrecisionArgs
from arguments.stored_weights import stored_weight_format
from moe_trainer.estimate.hardware import Hardware
from moe_trainer.quantization import formats as modules
from moe_trainer.quantization.quantize import FP32
from moe_trainer.quantization.recipe import make_recipe

DROPLESS_GRAPH = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--num-experts 8 --disable-bias-linear --swiglu --bf16 --micro-batch-size 1 --moe-grouped-gemm "
    "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5 "
    "--transformer-impl transformer_engine --use-transformer-engine-op-fuser --cuda-graph-impl full_iteration"
)
MADE = tuple(each for each in QUANTIZED if each.key != CUSTOM)


def selecting(fmt, **others):
    return PrecisionArgs(**{fmt.flags.name: fmt.flags.values[0], fmt.flags.recipe: fmt.key}, **others)


def test_flags_declarations_and_modules_are_the_same_set():
    for flags in FLAGS:
        keys = {each.key for each in of_width(flags)}
        assert set(OPTIONS[flags.recipe].choices) == keys and OPTIONS[flags.name].choices == flags.values
        assert {flags.factory, flags.param_gather, *filter(None, (flags.wgrad,)), *flags.displaced} <= set(OPTIONS)
        assert Hardware.__dataclass_fields__[flags.name].type == "float", "a device has a rate for each width"
    assert {info.name for info in pkgutil.iter_modules(modules.__path__)} == {each.key for each in MADE}


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: f"{fmt.flags.name} {fmt.key}")
def test_flags_select_a_format(fmt):
    assert quantized_format(selecting(fmt)) is fmt
    parallel = SimpleNamespace(use_distributed_optimizer=True, use_torch_fsdp2=False, use_megatron_fsdp=False)
    gathers = {fmt.flags.param_gather: True} | ({fmt.stored.flag: True} if fmt.stored else {})
    assert stored_weight_format(selecting(fmt, **gathers), parallel) is fmt.stored
    assert stored_weight_format(selecting(fmt), parallel) is None


def test_without_flags_no_format_is_selected():
    assert quantized_format(PrecisionArgs(bf16=True)) is None
    assert formats.plain_format(PrecisionArgs(bf16=True)) is formats.BF16


@pytest.mark.parametrize("fmt", MADE, ids=lambda fmt: fmt.key)
def test_recipes_are_what_is_declared(fmt):
    """Scales, bits, padding and stored bytes of the module are those that rules and estimates count with."""
    recipe = make_recipe(fmt.key)
    assert recipe.name == fmt.key and formats.TOKEN_MULTIPLE % recipe.alignment == 0
    assert (recipe.delayed is not None) == fmt.keeps_scales
    assert fmt.tokens_per_scale == (None if recipe.x_t.per_tensor else recipe.x_t.cols)
    assert fmt.scales_whole_tensor == (recipe.x.per_tensor or fmt.has_global_scale)
    assert recipe.weight.fmt.name == ("e4m3" if fmt.flags.bits == 8 else "e2m1")
    assert recipe.weight_class.elements_per_byte == 8 // fmt.flags.bits
    if recipe.weight.scales != FP32 and recipe.weight.rows == 1:  # a byte for each scale
        assert fmt.copy_bytes == fmt.flags.bits / 8 + 1 / recipe.weight.cols


@pytest.mark.parametrize("fmt", QUANTIZED, ids=lambda fmt: f"{fmt.flags.name} {fmt.key}")
def test_graphs_of_dropless_experts_accept_the_op_fuser_as_declared(fmt):
    width = fmt.flags.name.replace("_", "-")
    argv = f"{DROPLESS_GRAPH} --{width}-format {fmt.flags.values[0]} --{width}-recipe {fmt.key}".split()
    argv += [f"--{width}-quantizer-factory", "a.b"] if fmt.is_custom else []
    found = resolve_command_line(argv, 1)[1]
    kinds = [each.kind for each in found if "cannot capture dropless experts" in each.message]
    support = fmt.capabilities[FormatCapability.DROPLESS_GRAPH]
    assert kinds == ([support.kind] if isinstance(support, Rejected) else [])


def test_a_declaration_says_everything():
    with pytest.raises(TypeError, match="fp8 delayed leaves out PROOF"):
        leave_out(MADE[0], FormatCapability.PROOF)
    for each in QUANTIZED:
        for support in each.capabilities.values():
            assert support is True or isinstance(support, Rejected | NoEffect) and support.reason
