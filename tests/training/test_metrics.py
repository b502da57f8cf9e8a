"""The description of a run in its first record."""

import socket

import torch
from harness import run_ranks
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.parallel.state import ParallelState
from moe_trainer.training.metrics import MAX_HOSTNAMES, describe_environment, node_names


def _names(rank, n):
    socket.gethostname = lambda: ("first", "second", "first")[rank]
    return node_names(ParallelState.create(n, rank).world)


def test_nodes_of_all_ranks_are_named_once():
    assert run_ranks(_names, 3) == [["first", "second"]] * 3


def test_description_names_the_first_nodes():
    args = parse_args([*TINY, *MOCK, "--train-iters", "1"], world_size=1)
    hosts = [f"node-{at}" for at in range(20)]
    found = describe_environment(args, 160, 256, torch.device("cpu"), hosts)
    assert found["mapping"]["nodes"] == 20 and found["hardware"]["hostnames"] == hosts[:MAX_HOSTNAMES]
