"""The own Python of DeepEP 1 and 2 and of HybridEP over their compiled parts in torch, against the all-to-all on two emulated devices.

DEEP_EP_CHECKOUT names a git checkout of the library; without one these tests are skipped.
"""

import functools
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from emulated_cuda.run import HERE, check_races, environment, on_device
from emulated_cuda.test_waits import FEW_LAYERS, MICROBATCHES, count, expected

HIDDEN, RANKS = 512, 2
BACKENDS = ("deepep", "hybridep")
SETTINGS = {"EP_SUPPRESS_NCCL_CHECK": "1", "EP_NCCL_ROOT_DIR": "/usr", "CUDA_HOME": "/usr"}
"""What version 2 looks for when it is imported."""


def unpack(branch: str, folder: Path) -> Path:
    """The library's Python and pybind sources, with the module that version 2 has for its compiled part."""
    checkout = os.environ.get("DEEP_EP_CHECKOUT")
    if not checkout:
        pytest.skip("DEEP_EP_CHECKOUT names no git checkout of DeepEP")
    packed = subprocess.run(
        ["git", "-C", checkout, "archive", branch, "deep_ep", "csrc"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "deep_ep/_C.py").write_text("from deep_ep_elastic import *  # noqa: F403\n")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Of version 1 and HybridEP."""
    return unpack("origin/hybrid-ep", tmp_path_factory.mktemp("deep_ep"))


def use_library(sources: Path) -> None:
    """Make the package importable in this process with devices."""
    os.environ.update(SETTINGS, DEEP_EP_SOURCES=str(sources))
    sys.path[:0] = [str(HERE / "libraries"), str(sources)]


def flex(sources: Path, backend: str, ps, max_tokens: int, deterministic: bool = False, **changes):
    from moe.layers import sections

    from moe_trainer.backends import BackendPolicy
    from moe_trainer.moe.dispatch.flex import DispatchBufferSpec
    from moe_trainer.moe.dispatch.select import build_dispatcher

    use_library(sources)
    moe = sections(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, **changes).moe
    rows = DispatchBufferSpec(
        HIDDEN, max_tokens, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()), deterministic
    )
    return build_dispatcher(moe, ps, rows, BackendPolicy("error", cuda=True))


def compare_with_alltoall(
    rank: int, n: int, sources: Path, backend: str, topk: int, sizes: tuple[int, ...], kind: str, changes: dict
):
    """Compare dispatched rows, combined rows and gradients of the all-to-all and the library, with race checks."""
    from moe.test_flex import random_routing

    from moe_trainer.moe.dispatch.alltoall import AllToAllDispatcher
    from moe_trainer.ops.permute import Permutation
    from moe_trainer.parallel.state import ParallelState

    check_races()
    ps = ParallelState.create(n, rank, ep=n)
    library = flex(sources, backend, ps, max(sizes), moe_router_topk=topk, **changes)
    probs, routing = (table.cuda() for table in random_routing(rank, sizes[rank], topk, kind))
    x, weight = torch.randn(2, sizes[rank], HIDDEN, generator=torch.Generator().manual_seed(rank)).cuda()
    return [
        run(dispatcher, x.bfloat16(), probs, routing, weight)
        for dispatcher in (AllToAllDispatcher(ps, Permutation(), library.mxfp8), library)
    ]


def run(dispatcher, x, probs, routing, weight) -> list:
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    sent = dispatcher.dispatch(x, probs, routing)
    expert_R = torch.repeat_interleave(torch.tensor(sent.tokens_per_expert_e)).cuda()
    y = torch.tanh(sent.x_RH * (1.0 + expert_R.unsqueeze(1))) * sent.probs_R.unsqueeze(1)
    y = dispatcher.combine(y.to(x.dtype), sent)
    (y.float() * weight).sum().backward()
    tables = [sent.x_RH, sent.probs_R, y, x.grad, probs.grad]
    return [sent.tokens_per_expert_e, *(table.detach().float().cpu().tolist() for table in tables)]


CASES = {
    "top-1": (1, (16, 16), "plain"),
    "top-2": (2, (16, 16), "plain"),
    "top-4": (4, (16, 16), "plain"),
    "uneven": (2, (5, 9), "plain"),
    "nothing for the last rank": (2, (16, 16), "nothing for the last rank"),
    "drops": (2, (16, 16), "drops"),
    "no tokens": (2, (16, 16), "no tokens"),
}
MXFP8 = {
    "forward": {"moe_dispatch_fwd_dtype": "mxfp8"},
    "backward": {"moe_combine_bwd_dtype": "mxfp8"},
    "both": {"moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [*BACKENDS, "hybridep, fused"])
def test_library_equals_all_to_all(sources, backend, case):
    topk, sizes, kind = CASES[case]
    changes = {
        "moe_hybridep_pad_uneven_dispatch_inputs": len(set(sizes)) > 1,
        "moe_permute_fusion_into_hybridep": "fused" in backend,
    }
    for plain, library in on_device(
        compare_with_alltoall,
        sources,
        backend.partition(",")[0],
        topk,
        sizes,
        kind,
        changes,
        devices=RANKS,
        ranks=RANKS,
    ):
        assert plain[:3] == library[:3]
        same_results(plain, library)


@pytest.mark.parametrize("which", MXFP8)
@pytest.mark.parametrize("backend", [*BACKENDS, "hybridep, fused"])
def test_mxfp8_over_the_library_equals_all_to_all(sources, backend, which):
    changes = MXFP8[which] | {"moe_permute_fusion_into_hybridep": "fused" in backend}
    name, case = backend.partition(",")[0], (1, (16, 16), "drops")
    for plain, library in on_device(compare_with_alltoall, sources, name, *case, changes, devices=RANKS, ranks=RANKS):
        assert plain == library  # a token has one expert: there are no sums


def same_results(plain: list, library: list) -> None:
    """But for the rows of the experts."""
    for ours, theirs in zip(plain[3:], library[3:], strict=True):
        torch.testing.assert_close(torch.tensor(theirs), torch.tensor(ours), atol=0.02, rtol=0.02)


def count_with(rank: int, n: int, sources: Path, flags: str) -> dict[str, int]:
    use_library(sources)
    found = count(rank, n, f"--bf16 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex {flags}")
    return {key: times for key, times in found.items() if "collectives" not in key}


@pytest.mark.parametrize(
    "flags", ["", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_host_waits_once_per_layer(sources, backend, flags):
    expects = expected("", 0, 0) | dict.fromkeys(
        (f"{kind} moe/dispatch/{backend}.py" for kind in ("train", "evaluate")), FEW_LAYERS * MICROBATCHES // 2
    )
    for found in on_device(
        count_with, sources, f"--moe-flex-dispatcher-backend {backend} {flags}", ranks=RANKS, devices=RANKS
    ):
        assert found == expects


def watch_streams(rank: int, n: int, sources: Path) -> tuple[list[bool], list[int], int]:
    """Of forward and backward of one HybridEP dispatch: is each call in flight when it returns, and on which streams they run."""
    from moe.test_flex import random_routing

    from moe_trainer.parallel.state import ParallelState

    ps = ParallelState.create(n, rank, ep=n)
    library, streams = flex(sources, "hybridep", ps, 16, moe_router_topk=2), []

    def noted(call, **kwargs):
        streams.append(torch.cuda.current_stream().cuda_stream)
        return call(**kwargs)

    for name in ("dispatch_with_permute", "combine_with_unpermute"):
        setattr(library.buffer, name, functools.partial(noted, getattr(library.buffer, name)))
    probs, routing = (table.cuda() for table in random_routing(rank, 16, 2, "plain"))
    x = torch.randn(16, HIDDEN, dtype=torch.bfloat16, device="cuda").requires_grad_()
    state = library.start_token_dispatch(library.dispatch_preprocess(x, probs.requires_grad_(), routing))
    waits = [bool(state.handle.exchange._in_flight)]
    state = library.dispatch_postprocess(library.finish_token_dispatch(state))
    y, handle = library.start_token_combine(state.x_RH * state.probs_R.to(x.dtype).unsqueeze(1), state)
    waits.append(bool(handle._in_flight))
    library.finish_token_combine(y, handle, state).sum().backward()
    return waits, streams, torch.cuda.current_stream().cuda_stream


def test_hybridep_runs_on_a_stream_of_its_own(sources):
    for in_flight, streams, compute in on_device(watch_streams, sources, ranks=RANKS, devices=RANKS):
        assert in_flight == [True, True]
        assert len(streams) == 4 and len(set(streams)) == 1 and compute not in streams


BUDGET = "--moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor"
RECOMPUTE = (
    "",
    "--recompute-granularity selective --recompute-modules moe",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)


@pytest.mark.parametrize(
    "flags",
    [
        *RECOMPUTE,
        "--overlap-moe-expert-parallel-comm --moe-shared-expert-intermediate-size 16",
        "--moe-hybridep-pad-uneven-dispatch-inputs",
        "--moe-paged-stash --moe-paged-stash-page-size 4",
        "--num-experts 4 --fp8-format e4m3 --fp8-recipe mxfp8",
        "--num-experts 4 --fp4-format e2m1",
    ],
)
def test_no_host_waits_in_training_with_a_budget(sources, flags):
    """An evaluation reads the counts, because lost rows would go unnoticed."""
    expects = expected("", 0, 0) | {"evaluate moe/dispatch/hybridep.py": FEW_LAYERS * MICROBATCHES // 2}
    for found in on_device(count_with, sources, f"{BUDGET} 3 {flags}", ranks=RANKS, devices=RANKS):
        assert found == expects


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cpu 1",  # which needs Triton's kernel
        "--moe-permute-fusion-into-hybridep",
    ],
)
def test_settings_that_need_host_counts_still_wait(sources, flags):
    expects = expected("", 0, 0) | dict.fromkeys(
        (f"{kind} moe/dispatch/hybridep.py" for kind in ("train", "evaluate")), FEW_LAYERS * MICROBATCHES // 2
    )
    for found in on_device(count_with, sources, f"{BUDGET} 3 {flags}", ranks=RANKS, devices=RANKS):
        assert found == expects


def trained(rank: int, n: int, sources: Path, flags: str, small: bool = False) -> tuple:
    """Three steps in bf16; small: in the second one the first layer of the last rank has space for hardly any row."""
    from training.layouts import create_groups, make_argv

    from arguments import parse_args
    from moe_trainer.training import step
    from moe_trainer.verification import training_trace

    use_library(sources)
    argv = [
        *make_argv("plain"),
        *f"--bf16 --hidden-dropout 0.1 --expert-model-parallel-size 2 --moe-router-enable-expert-bias "
        f"--moe-router-score-function sigmoid {flags}".split(),
    ]
    train_step, attempt, attempts = training_trace.train_step, step.forward_backward_reduce, []

    def shrinking(run, state, *rest):
        if small and state.iteration and rank == n - 1:
            run.chunks[0].moe_layers()[0].receive.budget.adopt(0.1 if state.iteration == 1 else 3.0)
        return train_step(run, state, *rest)

    def counting(*args, **kwargs):
        attempts.append(args[1].iteration)
        return attempt(*args, **kwargs)

    training_trace.train_step, step.forward_backward_reduce = shrinking, counting
    found = training_trace.train(parse_args(argv, n), rank, create_groups(argv, rank, n), 3, device="cuda")
    weights = {name: weight.float().numpy() for name, weight in found.weights.items()}
    return found.losses, found.grad_norms, weights, attempts


def test_iteration_with_lost_rows_is_repeated_exactly(sources):
    """Bitwise equal to a run with enough space from the start, and equal to the all-to-all."""
    flex = f"--moe-token-dispatcher-type flex {BUDGET} 3"
    enough = on_device(trained, sources, flex, ranks=RANKS, devices=RANKS)
    overflown = on_device(trained, sources, flex, True, ranks=RANKS, devices=RANKS)
    plain = on_device(trained, sources, "--moe-token-dispatcher-type alltoall", ranks=RANKS, devices=RANKS)
    for one, other, exchanged in zip(enough, overflown, plain, strict=True):
        assert one[3] == [0, 1, 2] and other[3] == [0, 1, 1, 2]
        assert one[:2] == other[:2] and all((weight == other[2][name]).all() for name, weight in one[2].items())
        for ours, theirs in zip(one[0], exchanged[0], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-3)


def trained_with_races_checked(rank: int, n: int, sources: Path, flags: str) -> tuple:
    check_races()
    return trained(rank, n, sources, flags)


def test_paged_stash_changes_nothing(sources):
    """Bitwise; with too few pages the second iteration is repeated."""
    flex = f"--moe-token-dispatcher-type flex {BUDGET} 3"
    stash = f"{flex} --moe-paged-stash --moe-paged-stash-page-size 4 --moe-paged-stash-buffer-size-factor-cuda"
    plain, enough, full = (
        on_device(trained_with_races_checked, sources, flags, ranks=RANKS, devices=RANKS)
        for flags in (flex, f"{stash} 2", f"{stash} 0.6")
    )
    for one, other, repeated in zip(plain, enough, full, strict=True):
        assert other[3] == [0, 1, 2] and repeated[3][:3] == [0, 1, 1]
        for found in (other, repeated):
            assert one[:2] == found[:2] and all((weight == found[2][name]).all() for name, weight in one[2].items())


def test_parity_with_the_all_to_all(sources):
    check_parity(sources, "deepep or hybridep")


def check_parity(sources: Path, which: str) -> None:
    """tests/gpu/test_flex_parity.py unchanged, on two devices."""
    env = environment(RANKS) | SETTINGS | {"DEEP_EP_SOURCES": str(sources)}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "site"), str(HERE / "libraries"), str(sources), env["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu/test_flex_parity.py", "-k", which],
        cwd=HERE.parent,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout.splitlines()[-1], (
        done.stdout[-6000:] + done.stderr[-2000:]
    )
