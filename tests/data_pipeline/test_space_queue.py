"""Of containers with enough space the least loaded one is found, whatever was asked before."""

import random

from moe_trainer.data.space_queue import SpaceQueue


def test_finds_what_a_search_of_all_finds():
    rng = random.Random(0)
    queue, held = SpaceQueue(), {}
    for number in range(3000):
        held[number] = rng.choice((0.0, 1.0, rng.random())), rng.randint(0, 20)
        queue.push(held[number][0], number, held[number][1])
        needed = rng.randint(0, 25)
        expected = min(((load, each) for each, (load, space) in held.items() if space >= needed), default=None)
        assert queue.find(needed) == expected
        if expected is not None and rng.random() < 0.9:
            queue.pop()
            del held[expected[1]]
