"""Torch's settings for GEMMs after initialize()."""

import pytest
import torch

from arguments import parse_args
from moe_trainer.training.initialize import set_numerics_flags
from tests.arguments.test_tokens import TOY

BF16 = torch.backends.cuda.matmul


@pytest.fixture
def bf16_reduction_allowed():
    before = BF16.allow_bf16_reduced_precision_reduction
    BF16.allow_bf16_reduced_precision_reduction = True
    yield
    BF16.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("flags, stays", [([], True), (["--disable-bf16-reduced-precision-matmul"], False)])
def test_bf16_gemms_accumulate_in_fp32_when_set(flags, stays, bf16_reduction_allowed):
    set_numerics_flags(parse_args([*TOY, *flags], 1))
    assert BF16.allow_bf16_reduced_precision_reduction is stays
