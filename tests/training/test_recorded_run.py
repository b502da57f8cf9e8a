"""A recorded run of Megatron-LM that every checkout carries: ten iterations from its weights, on its batches.

The command line is run against all recorded cases in test_golden_runs.py, which needs the folder of reference facts.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import arguments
from moe_trainer.model.build import build_chunks
from moe_trainer.model.weights import load_named_weights
from moe_trainer.moe.balancing import collect_moe_metrics, start_iteration, update_expert_bias
from moe_trainer.optim.buckets import plan_layouts
from moe_trainer.optim.grad_buffer import DataParallelGrads
from moe_trainer.optim.optimizer import Optimizer
from moe_trainer.optim.schedules import build_lr_schedule
from moe_trainer.parallel.state import ParallelState
from moe_trainer.pipeline.orders import ScheduleKind
from moe_trainer.pipeline.schedule import Schedule, ScheduleInputs

FOLDER = Path(__file__).resolve().parents[1] / "data" / "a2_mixtral"


def test_ten_iterations_equal_the_recorded_megatron_run():
    recorded = json.loads((FOLDER / "recorded.json").read_text())
    args, ps = arguments.parse_args(recorded["argv"], 1), ParallelState.single()
    chunks = build_chunks(args, ps, 512)
    load_named_weights(chunks, load_file(FOLDER / "init.safetensors"), ps)
    layouts = plan_layouts(chunks[0].parameters(), ps, args.parallel)
    grads = DataParallelGrads(layouts, ps, args.parallel, args.precision, per_token_loss=False)
    optimizer = Optimizer(chunks, grads, args, ps)
    schedule = build_lr_schedule(args.optimizer, args.training, args.training.global_batch_size)
    with np.load(FOLDER / "batches.npz") as data:
        tokens, labels = (torch.from_numpy(data[name].astype(np.int64)) for name in ("tokens", "labels"))
    batches = iter(zip(tokens, labels, strict=True))
    pipeline = Schedule(ScheduleKind(), ps.pp, torch.device("cpu"))
    positions = torch.arange(tokens.shape[-1]).expand(tokens.shape[1:])

    def forward_step(*_):
        tokens_BS, labels_BS = next(batches)
        loss = chunks[0](tokens_BS, positions, labels_BS, torch.ones(tokens_BS.shape), None, 0.5).mean()
        return loss, loss.item()

    for number, step in enumerate(recorded["steps"]):
        optimizer.zero_grad()
        start_iteration(chunks)
        losses = pipeline.run(
            ScheduleInputs(forward_step, 2, lambda *_: None, grad_scale=0.5, accumulate=grads.accumulate)
        )
        grads.finish()
        outcome = optimizer.step(schedule.lr(number * args.training.global_batch_size), args.optimizer.weight_decay)
        update_expert_bias(chunks, ps)
        aux = collect_moe_metrics(chunks, ps, 2, args.moe, args.model.num_layers).losses["load_balancing_loss"]
        assert np.mean(losses) == pytest.approx(step["lm loss"], rel=2e-6)
        assert outcome.grad_norm == pytest.approx(step["grad_norm"], rel=2e-6)
        assert aux == pytest.approx(np.mean(step["load_balancing_loss/per_layer"]), rel=2e-6)
