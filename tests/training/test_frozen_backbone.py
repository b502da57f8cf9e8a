"""--freeze-backbone: embedding, norms, routers and routed experts train, the rest stays, and layouts equal one process."""

import pytest
import torch
from training.forked import pretrain
from training.layouts import make_argv, make_run, shallow

from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState
from moe_trainer.verification.parity import check_parity
from moe_trainer.verification.rank_pool import RankPool
from moe_trainer.verification.shrink import as_is

FROZEN = (
    "--num-experts 8 --moe-router-topk 2 "
    "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --qk-layernorm --freeze-backbone"
)
PLAIN = [*shallow(make_argv("plain")), *FROZEN.split()]
TRAINED = ("embedding.", ".router.", ".mlp.experts.", "layernorm.")
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 300"
LAYOUTS = {
    "tensor, sequence": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "expert, overlapped optimizer": (f"--expert-model-parallel-size 2 {OVERLAP}", 4),
    "pipeline, recompute": (
        "--pipeline-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe layernorm",
        2,
    ),
}


def test_layouts_equal_one_process():
    cases = {name: as_is([*PLAIN, *flags.split()], ranks) for name, (flags, ranks) in LAYOUTS.items()}
    with RankPool(4) as pool:
        results = {name: check_parity(pool, case) for name, case in cases.items()}
    assert {name: result for name, result in results.items() if not result.is_equal} == {}


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --bf16"])
def test_frozen_parameters_have_no_gradients_and_no_optimizer_state(flags):
    run_ = make_run([*PLAIN, *flags.split()], 0, ParallelState.single(), 1)
    trained, frozen = [], []
    for param in run_.chunks[0].parameters():
        name = get_param_info(param).names[0]
        (trained if any(part in name for part in TRAINED) else frozen).append(param)
    assert all(param.requires_grad and hasattr(param, "main_grad") for param in trained)
    assert not any(param.requires_grad or hasattr(param, "main_grad") for param in frozen)
    assert len(trained) > 10 and len(frozen) > 10
    assert {id(entry.param) for entry in run_.optimizer.tensors()} == {id(param) for param in trained}


def test_frozen_weights_stay_and_training_resumes_bitwise(tmp_path):
    base = [*PLAIN, "--log-interval", "1", "--save-interval", "2", "--eval-interval", "1000", "--save", "saved"]
    _, before = pretrain([*base, "--train-iters", "1"], tmp_path / "short")
    records, after = pretrain([*base, "--train-iters", "4"], tmp_path / "one")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if any(part in name for part in TRAINED)}
    pretrain([*base, "--train-iters", "4", "--exit-interval", "2"], tmp_path / "two")
    again, weights = pretrain([*base, "--train-iters", "4", "--load", "saved"], tmp_path / "two")
    assert [record["lm loss"] for record in again][-2:] == [record["lm loss"] for record in records][-2:]
    assert all(torch.equal(weights[name], tensor) for name, tensor in after.items())
