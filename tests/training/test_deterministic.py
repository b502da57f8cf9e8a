"""--deterministic-mode: torch's flags are set, an operation without a deterministic form ends the run by name, and two runs give the same bits."""

from pathlib import Path

import pytest
import torch
from commands import run
from training.forked import pretrain
from training.tiny import MOCK, TINY

from arguments import parse_args
from moe_trainer.moe.experts import Experts
from moe_trainer.training.initialize import set_numerics_flags

ROOT = Path(__file__).parents[2]
RUN = [*TINY, *MOCK, "--train-iters", "3"]
EVERYTHING = "--bf16 --hidden-dropout 0.1 --moe-permute-fusion --moe-router-dtype fp32 --moe-expert-capacity-factor 1.0 --moe-token-drop-policy probs".split()
RANKS = (
    "--bf16 --expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
).split()


@pytest.fixture
def restored_torch_flags():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize(("flags", "on"), [([], False), (["--deterministic-mode"], True)])
def test_deterministic_mode_sets_torch_flags(flags, on, restored_torch_flags):
    set_numerics_flags(parse_args([*RUN, *flags], 1))
    assert torch.are_deterministic_algorithms_enabled() is on
    assert torch.utils.deterministic.fill_uninitialized_memory is not on  # no kernels for memory that is written next
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_nondeterministic_operation_ends_the_run_with_its_name(tmp_path, monkeypatch):
    right = Experts.forward

    def scattering(self, x_RH, *args, **named):
        place = torch.arange(x_RH.numel())
        return right(self, torch.zeros_like(x_RH).put_(place, x_RH.flatten()), *args, **named)

    monkeypatch.setattr(Experts, "forward", scattering)
    assert run(RUN, tmp_path).returncode == 0
    finished = run([*RUN, "--deterministic-mode"], tmp_path)
    assert finished.returncode == 1 and "put_ does not have a deterministic implementation" in finished.stderr


@pytest.mark.parametrize(("flags", "ranks"), [(EVERYTHING, 1), (RANKS, 2)])
def test_two_deterministic_runs_are_bitwise_equal(tmp_path, flags, ranks):
    (mine, weights), (theirs, others) = (
        pretrain([*RUN, *flags, "--deterministic-mode"], tmp_path / name, ranks) for name in ("one", "two")
    )
    assert len(mine) == len(theirs) == 3 and weights.keys() == others.keys()
    for one, other in zip(mine, theirs):
        assert one["lm loss"] == other["lm loss"] and one["grad_norm"] == other["grad_norm"]
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_deterministic_mode_changes_nothing_on_cpu(tmp_path):
    """CPU kernels and gloo add in a fixed order without it."""
    (mine, weights), (theirs, others) = (
        pretrain([*RUN, *EVERYTHING, *flag], tmp_path / name)
        for name, flag in (("with", ["--deterministic-mode"]), ("without", []))
    )
    assert [record["lm loss"] for record in mine] == [record["lm loss"] for record in theirs]
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_triton_kernels_use_no_atomics():
    """The order of atomic additions varies, and torch cannot detect it in Triton kernels."""
    kernels = sorted((ROOT / "moe_trainer" / "ops").glob("triton_*.py"))
    assert len(kernels) >= 8 and not [path.name for path in kernels if "tl.atomic" in path.read_text(encoding="utf-8")]
