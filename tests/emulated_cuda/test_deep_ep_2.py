"""DeepEP 2's own Python (ElasticBuffer) over its compiled part in torch, against the all-to-all on two emulated devices."""

from pathlib import Path

import pytest
from emulated_cuda.run import on_device
from emulated_cuda.test_deep_ep import (
    CASES,
    MXFP8,
    RANKS,
    check_parity,
    compare_with_alltoall,
    count_with,
    same_results,
    unpack,
)
from emulated_cuda.test_waits import FEW_LAYERS, MICROBATCHES, expected


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    return unpack("origin/main", tmp_path_factory.mktemp("deep_ep_2"))


def by_expert(counts: list[int], rows: list, probs: list) -> list[list]:
    """Rows and probabilities of every expert, whatever their order."""
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    pairs = list(zip(rows, probs, strict=True))
    return [sorted(pairs[end - count : end]) for count, end in zip(counts, ends, strict=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_library_equals_all_to_all(sources, deterministic, case):
    topk, sizes, kind = CASES[case]
    for plain, library in on_device(
        compare_with_alltoall,
        sources,
        "deepep",
        topk,
        sizes,
        kind,
        {"deterministic": deterministic},
        devices=RANKS,
        ranks=RANKS,
    ):
        assert plain[0] == library[0] and by_expert(*plain[:3]) == by_expert(*library[:3])
        assert not deterministic or plain[:3] == library[:3]
        same_results(plain, library)


@pytest.mark.parametrize("which", MXFP8)
def test_mxfp8_over_the_library_equals_all_to_all(sources, which):
    changes = MXFP8[which] | {"deterministic": True}
    for plain, library in on_device(
        compare_with_alltoall, sources, "deepep", 1, (16, 16), "drops", changes, devices=RANKS, ranks=RANKS
    ):
        assert plain == library


@pytest.mark.parametrize(
    "flags",
    ["", "--deterministic-mode", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"],
)
def test_host_waits_once_per_layer(sources, flags):
    expects = expected("", 0, 0) | dict.fromkeys(
        (f"{kind} moe/dispatch/deepep.py" for kind in ("train", "evaluate")), FEW_LAYERS * MICROBATCHES // 2
    )
    for found in on_device(
        count_with,
        sources,
        f"--hidden-size 256 --moe-flex-dispatcher-backend deepep {flags}",
        ranks=RANKS,
        devices=RANKS,
    ):
        assert found == expects


def test_parity_with_the_all_to_all(sources):
    check_parity(sources, "deepep")
