"""Given experts (moe_trainer/training/routing_replay.py) on a rank with several virtual pipeline stages."""

from dataclasses import replace

import numpy as np
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.training.routing_replay import RoutingReplay

FLAGS = (
    "--num-layers 4 --train-iters 1 --moe-enable-routing-replay --pipeline-model-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2"
)


def test_routers_of_every_stage_choose_again():
    args = parse_args([*TINY, *MOCK, *FLAGS.split()], 2)
    chunks = build_chunks(args, replace(ParallelState.single(), pp=Group("pp", (0, 1), 0, 2)), 128)
    replay, experts = RoutingReplay(args, chunks), np.broadcast_to(np.arange(2), (8, 4, 2))
    (first,), (second,) = ([layer.router for layer in chunk.moe_layers()] for chunk in chunks)
    for chunk, router, other in zip(chunks, (first, second), (second, first)):
        with replay.given(chunk, [experts]):
            assert router.given_TK is not None and other.given_TK is None
        assert router.given_TK is None
