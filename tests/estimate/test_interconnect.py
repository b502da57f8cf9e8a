"""The exchange of tokens against measured times, and the fractions of links that follow from them."""

from dataclasses import replace

import pytest

from arguments import parse_args
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.interconnect import (
    NETWORK,
    NVLINK,
    NVLINK_ALL_TO_ALL,
    Interconnect,
    dispatch_combine_seconds,
    exchange_seconds,
    expected_distinct,
    expected_domains,
)

# arXiv 2603.07685, table 7: microseconds by (machine, dispatcher), dispatch and combine, of 8, 16, 32 and 64 ranks
MEASURED = {
    ("h100", "hybridep"): ((661, 1485, 3064, 4626), (624, 1688, 3088, 4398)),
    ("h100", "alltoall"): ((1265, 5774, 8059, 9164), (1277, 5628, 7815, 8727)),
    ("gb200", "hybridep"): ((391, 578, 612, 675), (353, 527, 646, 744)),
    ("gb200", "alltoall"): ((735, 743, 769, 930), (741, 765, 758, 827)),
}
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"


@pytest.mark.parametrize("machine, dispatcher", MEASURED)
def test_estimated_exchange_times_match_measurements(machine, dispatcher):
    for number, ep in enumerate((8, 16, 32, 64)):
        flags = f"--preset deepseek_v3 --mock-data --num-layers 61 --expert-model-parallel-size {ep} {FLEX if dispatcher == 'hybridep' else ''}"
        args = parse_args([*flags.split(), "--global-batch-size", "8192"], ep)
        estimated = 1e6 * exchange_seconds(args, Interconnect(find_hardware(machine)), 4096, 2)
        measured = sum(way[number] for way in MEASURED[machine, dispatcher]) / 2
        assert estimated == pytest.approx(measured, rel=0.3), (ep, estimated, measured)


def test_deepep_is_slower_than_hybridep_in_large_nvlink_domains():
    flags = f"--preset deepseek_v3 --mock-data --expert-model-parallel-size 32 --global-batch-size 8192 {FLEX}"
    hybrid = parse_args(flags.split(), 32)
    deep = parse_args([*flags.split(), "--moe-flex-dispatcher-backend", "deepep"], 32)
    for machine, factor in (("gb200", 2.0), ("h100", 1.0)):
        links = Interconnect(find_hardware(machine))
        assert exchange_seconds(deep, links, 4096, 2) == pytest.approx(
            factor * exchange_seconds(hybrid, links, 4096, 2), rel=0.05
        )


def test_hierarchical_dispatch_sends_a_token_once_to_a_node():
    """Over the network as DeepEP, then inside the node; in one node as an all-to-all."""
    flags = "--preset deepseek_v3 --mock-data --global-batch-size 8192 --expert-model-parallel-size"
    links, seconds = Interconnect(find_hardware("h100")), {}
    for ep in (8, 32):
        for backend in ("alltoall", "deepep", "hierarchical"):
            dispatcher = "" if backend == "alltoall" else f"{FLEX} --moe-flex-dispatcher-backend {backend}"
            args = parse_args([*f"{flags} {ep} {dispatcher}".split()], ep)
            seconds[ep, backend] = exchange_seconds(args, links, 4096, 2)
    assert seconds[8, "hierarchical"] == seconds[8, "alltoall"]
    assert seconds[32, "deepep"] < seconds[32, "hierarchical"] < 0.8 * seconds[32, "alltoall"]


@pytest.mark.parametrize("network_gb_s", [50, 1e9])
def test_exchange_of_one_expert_per_token_takes_the_bytes_over_each_link(network_gb_s):
    """Over 4 nodes of 8: 3 of 4 tokens leave the node and 7 of 8 the rank in it; with a fast network only the latter counts."""
    hardware = replace(find_hardware("h100"), network_gb_s=network_gb_s)
    flags = "--preset qwen3_30b_a3b --mock-data --global-batch-size 8192 --moe-router-topk 1 --moe-router-pre-softmax"
    seconds = {}
    for backend in ("alltoall", "hybridep", "hierarchical"):
        dispatcher = "" if backend == "alltoall" else f"{FLEX} --moe-flex-dispatcher-backend {backend}"
        args = parse_args(f"{flags} --expert-model-parallel-size 32 {dispatcher}".split(), 32)
        seconds[backend] = exchange_seconds(args, Interconnect(hardware), 4096, 2)
    num_bytes, latency = 4096 * args.model.hidden_size * 2, hardware.constants.latency
    network = num_bytes * 3 / 4 / (network_gb_s * 1e9 * NETWORK * hardware.constants.links)
    nvlink = num_bytes * 7 / 8 / (hardware.nvlink_gb_s * 1e9 * hardware.constants.links)
    assert seconds["alltoall"] == pytest.approx(max(network, nvlink / 4 / NVLINK_ALL_TO_ALL) + latency)
    assert seconds["hybridep"] == pytest.approx(max(network, nvlink / NVLINK) + latency)
    assert seconds["hierarchical"] == pytest.approx(network + nvlink / NVLINK_ALL_TO_ALL + 2 * latency)


def test_expert_tensor_ranks_gather_every_received_token_once():
    """With hierarchical dispatch, which brings a token once to a rank; two nodes of 8 ranks."""
    links, tokens = Interconnect(find_hardware("h100")), 4096
    flags = (
        f"--preset qwen3_30b_a3b --mock-data --global-batch-size 8192 {FLEX} --moe-flex-dispatcher-backend hierarchical"
    )
    args = parse_args(f"{flags} --expert-model-parallel-size 8 --expert-tensor-parallel-size 2".split(), 16)
    hardware, row = links.hardware, args.model.hidden_size * 2
    sent = (
        tokens * row * expected_distinct(2, 8) / 2 / (hardware.network_gb_s * 1e9 * NETWORK * hardware.constants.links)
    )
    received = tokens * row * expected_distinct(8, 8)
    inside = received * 7 / 8 / (hardware.nvlink_gb_s * 1e9 * NVLINK_ALL_TO_ALL * hardware.constants.links)
    gathered = links.ring(2 * received, 1, 2)
    found = exchange_seconds(args, links, tokens, 2)
    assert found == pytest.approx(sent + inside + 2 * hardware.constants.latency + gathered)


def test_latent_experts_send_narrow_rows_both_ways():
    links = Interconnect(find_hardware("h100"))
    plain = "--preset qwen3_30b_a3b --mock-data --expert-model-parallel-size 8"
    wide, latent = (parse_args([*plain.split(), *more.split()], 8) for more in ("", "--moe-latent-size 512"))
    assert dispatch_combine_seconds(latent, links, 8192, 2) == pytest.approx(
        dispatch_combine_seconds(wide, links, 8192, 2) / 4, rel=0.1
    )


@pytest.mark.parametrize("flag", ["--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype"])
def test_each_pass_sends_half_the_bytes_where_its_flag_says_mxfp8(flag):
    links = Interconnect(find_hardware("h100"))
    words = f"--preset deepseek_v3 --mock-data --expert-model-parallel-size 32 --global-batch-size 8192 {FLEX}".split()
    args, half = parse_args(words, 32), parse_args([*words, flag, "mxfp8"], 32)
    for backward in (False, True):
        whole, found = (dispatch_combine_seconds(each, links, 4096, 2, backward) for each in (args, half))
        is_rounded = backward == (flag == "--moe-combine-bwd-dtype")
        assert found == pytest.approx(whole * (0.5 + 33 / 128 if is_rounded else 1.0), rel=0.01)


def test_expected_number_of_domains_per_token():
    assert expected_distinct(1, 8) == 1 and expected_distinct(1000, 1) == pytest.approx(1)
    assert expected_domains(2, 8, None, None) == pytest.approx(2 * (1 - 0.5**8))
    assert expected_domains(8, 8, 8, 4) == pytest.approx(4)  # one group in a domain: as many domains as groups
    assert expected_domains(4, 8, 8, 8) == expected_domains(4, 8, None, None)
    assert expected_domains(16, 8, 8, 4) == pytest.approx(4 * expected_distinct(2, 2))


def test_ring_bandwidth():
    links = Interconnect(find_hardware("h100"))
    assert links.bandwidth(1, 8) == links.bandwidth(4, 2) >= links.bandwidth(1, 16) > links.bandwidth(8, 16)
    assert links.bandwidth(1, 16) == pytest.approx(min(450e9 * 0.75, 8 * 50e9 * 0.87))
    assert links.bandwidth(8, 4) == links.bandwidth(8, 16)  # one rank of each node
    assert links.ring(1e9, 1, 1) == 0
