"""Random states: every stream of every chunk continues where it was captured."""

from dataclasses import replace
from pathlib import Path

import torch
from checkpoint.fake import RECORD
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from moe_trainer.checkpoint import loading, random_state
from moe_trainer.checkpoint.options import LoadOptions
from moe_trainer.checkpoint.sharding import rng_key
from moe_trainer.parallel.state import Group, ParallelState


def test_streams_of_every_chunk_continue():
    streams = [
        {name: torch.Generator().manual_seed(10 * chunk + number) for number, name in enumerate("ab")}
        for chunk in range(3)
    ]

    def draw():
        return [torch.rand(3, generator=generator).tolist() for chunk in streams for generator in chunk.values()]

    state = random_state.capture(streams)
    expected = draw()
    random_state.restore(state, streams)
    assert draw() == expected


def test_a_rank_gets_the_state_of_its_place_among_data_and_context_ranks(monkeypatch):
    states = [random_state.capture([]) for _ in range(2)]
    monkeypatch.setattr(loading, "read_object", lambda *_: states)
    ps = replace(ParallelState.single(), cp=Group("cp", (0, 1), 1, 2), dp_cp=Group("dp_cp", (0, 1), 1, 2))
    loader = loading.Loader(Path(), Metadata({rng_key(ps): BytesStorageMetadata()}), LoadOptions(RECORD), {})
    assert loader.random_states(ps) is states[1]
