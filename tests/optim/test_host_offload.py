"""--optimizer-cpu-offload and --chunked-optimizer-state-offload: bitwise equal to the same run without them, on any ranks.

A CPU plays both roles: offloaded state goes through the same copies, from host memory to host memory.
"""

import pytest
import torch
from harness import run_ranks
from toy import Toy, build_training, train_step

from arguments.parallel import ParallelArgs
from arguments.precision import PrecisionArgs
from moe_trainer.optim.host_offload import CopyStream, HostUpdatePipeline, _BufferRing
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.state import ParallelState

BF16 = PrecisionArgs(bf16=True)
AWARE = {"use_precision_aware_optimizer": True}
FORMATS = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp8": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"},
}
OFFLOAD = {
    "all": {"optimizer_cpu_offload": True},
    "half": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    "half, overlap": {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
    },
    "none": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0},
    "between steps": {"chunked_optimizer_state_offload": True},
    "between steps, part": {"chunked_optimizer_state_offload": True, "optimizer_state_offload_fraction": 0.3},
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr("moe_trainer.optim.optimizer_shard.MAX_SEGMENT_NUMEL_CPU", 128)


def _train(rank, n, more, bf16, distributed=False, pipeline=None):
    """Weights and state after four steps; the bytes of the state on the host's side and in all."""
    ps = ParallelState.create(n, rank) if n > 1 else ParallelState.single()
    model = Toy(torch.bfloat16 if bf16 else torch.float32)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 300} if distributed else {}
    grads, optimizer = build_training(
        model,
        ps=ps,
        precision=BF16 if bf16 else None,
        parallel=ParallelArgs(use_distributed_optimizer=distributed, **overlap),
        **more,
    )
    if pipeline is not None:
        optimizer._updater.host_pipeline = pipeline
    norms = [train_step(model, grads, optimizer, [n * step + rank], lr=1e-2).grad_norm for step in range(4)]
    optimizer.wait_params()
    state = [
        (held.state_name, held.param.info.names, held.start, held.values().clone()) for held in optimizer.tensors()
    ]
    sizes = [
        (block.is_updated_on_host or block.placement.always_copies, sum(kept.num_bytes for _, kept in block.storages()))
        for full in optimizer._shards
        for block in full.blocks
    ]
    return (
        norms,
        [p.detach().float() for p in model.parameters()],
        state,
        [sum(b for a, b in sizes if a), sum(b for _, b in sizes)],
    )


def _join(state):
    """Join the pieces of a parameter that are split over two places."""
    full = {}
    for name, params, _, values in sorted(state, key=lambda entry: entry[:3]):
        full.setdefault((name, params), []).append(values)
    return {key: torch.cat(parts) for key, parts in full.items()}


def _assert_equal(found, expected, bf16):
    assert found[0] == expected[0]
    ours, theirs = _join(found[2]), _join(expected[2])
    assert ours.keys() == theirs.keys()
    # the host keeps full main parameters where the device keeps remainders, which round a tie of the model the other way
    equal = torch.equal if not bf16 else lambda a, b: torch.allclose(a, b, rtol=2**-7, atol=1e-6)
    assert all(equal(ours[key], theirs[key]) for key in ours)
    assert all(equal(a, b) for a, b in zip(found[1], expected[1]))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("bf16", [False, True])
def test_optimizer_offload_changes_no_result(formats, bf16):
    expected = _train(0, 1, {**AWARE, **FORMATS[formats]}, bf16)
    for name, more in OFFLOAD.items():
        found = _train(0, 1, {**AWARE, **FORMATS[formats], **more}, bf16)
        _assert_equal(found, expected, bf16 and formats != "fp8")
        share = more.get("optimizer_offload_fraction", more.get("optimizer_state_offload_fraction", 1.0))
        away, total = found[3]
        assert abs(away / total - share) < 0.2 and (away > 0) == (share > 0), name


@pytest.mark.parametrize("offload", ["half, overlap", "between steps, part"])
def test_optimizer_offload_on_two_ranks_with_overlap(offload):
    plain = run_ranks(_train, 2, {**AWARE, **FORMATS["bf16"]}, False, True)
    for found, expected in zip(
        run_ranks(_train, 2, {**AWARE, **FORMATS["bf16"], **OFFLOAD[offload]}, False, True), plain
    ):
        _assert_equal(found, expected, False)


def test_sgd_with_offload_between_steps_equals_plain_sgd():
    expected = _train(0, 1, {"optimizer": "sgd"}, True)
    _assert_equal(_train(0, 1, {"optimizer": "sgd", **OFFLOAD["between steps"]}, True), expected, False)


@pytest.mark.parametrize("bf16", [False, True])
def test_muon_with_offload_equals_muon(bf16):
    """The host updates what AdamW does; momenta of matrices only visit the device."""
    expected = _train(0, 1, {"optimizer": "muon"}, bf16)
    for name in ("all", "half, overlap", "between steps", "between steps, part"):
        found = _train(0, 1, {"optimizer": "muon", **OFFLOAD[name]}, bf16)
        _assert_equal(found, expected, False)
        away, total = found[3]
        assert (away == total) == (name in ("all", "between steps")) and away > 0.2 * total, name


def test_muon_never_orthogonalizes_on_the_host():
    _, optimizer = build_training(Toy(), optimizer="muon", optimizer_cpu_offload=True)
    found = {
        (shard.has_whole_params, block.is_updated_on_host) for shard in optimizer._shards for block in shard.blocks
    }
    assert found == {(True, False), (False, True)}


class LateCopies(CopyStream):
    """Copies that happen only when they are waited for or the device continues; before that the target holds invalid values."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.started, self.most = [], 0

    def start(self, target, source):
        target.fill_(float("nan"))
        self.started.append((target, source))
        self.most = max(self.most, len(self.started))
        return self.started[-1]

    def wait(self, mark):
        for number, entry in enumerate(self.started):
            if entry is mark:
                for target, source in self.started[: number + 1]:  # a stream keeps its order
                    target.copy_(source)
                del self.started[: number + 1]
                return

    def end(self):
        for entry in list(self.started):
            self.wait(entry)


@pytest.mark.parametrize("overlap", [False, True])
def test_host_copies_are_synchronized_with_updates(overlap):
    expected = _train(0, 1, {**AWARE, **OFFLOAD["all"]}, True)
    copies = LateCopies()
    pipeline = HostUpdatePipeline(
        torch.device("cpu"), pinned_grads=True, pinned_params=True, overlap=overlap, copies=copies
    )
    found = _train(0, 1, {**AWARE, **OFFLOAD["all"]}, True, pipeline=pipeline)
    _assert_equal(found, expected, False)
    assert copies.most >= 3 if overlap else copies.most <= 1, "copies are in flight during the update only with overlap"


def test_a_host_buffer_is_reused_after_its_copy():
    copies, ring, target = LateCopies(), _BufferRing(4, torch.float32, pinned=False), torch.zeros(4)
    index, buffer = ring.take(copies, 4)
    ring.mark_busy(index, copies.start(target, buffer.fill_(1.0)))
    while ring.take(copies, 4)[0] != index:
        pass
    buffer.fill_(2.0)
    copies.end()
    assert target.tolist() == [1.0] * 4


def test_chunk_size_limits_update_segments():
    model = Toy()
    _, optimizer = build_training(model, chunked_optimizer_state_offload=True, optimizer_state_offload_chunk_size_mb=1)
    plan_longest = max(segment.stop - segment.start for state in optimizer._shards for segment in state.update_segments)
    assert plan_longest <= 2**20 // 12


def test_offload_fraction_is_exact_and_contiguous():
    for share in (0.0, 0.25, 0.75, 1.0):
        model = torch.nn.Linear(64, 64, bias=False)
        model.weight.info = ParamInfo(("w",))
        _, optimizer = build_training(model, **AWARE, optimizer_cpu_offload=True, optimizer_offload_fraction=share)
        away = sum(
            block.stop - block.start
            for state in optimizer._shards
            for block in state.blocks
            if block.is_updated_on_host
        )
        assert away == share * 4096
