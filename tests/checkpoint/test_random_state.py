"""Random states: every stream of every chunk continues where it was captured."""

import torch

from moe_trainer.checkpoint import random_state


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
