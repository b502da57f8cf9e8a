"""Generators of models on one rank."""

import torch

from moe_trainer.inference.generator import Generator
from moe_trainer.inference.model import Model
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.schedule import Schedule


def make_generator(chunk, vocab_size, batch_size=4, max_length=64, **changes):
    ps = ParallelState.single()
    cpu = torch.device("cpu")
    model = Model([chunk], Schedule(ScheduleKind(), ps.pp, cpu), ps, cpu, max_length, vocab_size, **changes)
    return Generator(model, batch_size, vocab_size)


def never_finished(tokens):
    return False
