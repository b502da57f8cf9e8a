"""Every layer under tensor and sequence parallelism equals itself in one process, in fp64.

Output, gradient of the input, every weight gradient (partial ones summed).

Weights, biases and gains are all random, drawn by name on their full shape and then sharded by their ParamInfo.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arguments.mechanisms.sublayers import SUBLAYERS, VARIANT, attention_of, variant_of
from arguments.model import ModelArgs
from arguments.parallel import ParallelArgs
from moe_trainer.layers import linear, tp_overlap, vocab
from moe_trainer.layers.attention import SelfAttention
from moe_trainer.layers.init import Init
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from moe_trainer.layers.mlp import MLP
from moe_trainer.layers.norm import Norm
from moe_trainer.layers.rotary import make_rotary
from moe_trainer.layers.tp_overlap import LinearOverlap, OverlapFileError, TpOverlap
from moe_trainer.layers.vocab import OutputHead, PositionEmbedding, VocabParallelEmbedding
from moe_trainer.model.block import load_class
from moe_trainer.parallel.params import ParamInfo
from moe_trainer.parallel.rng import named_generator
from moe_trainer.parallel.state import Group, ParallelState
from moe_trainer.parallel.weight_grads import WeightGradQueue

S, B, H, V = 8, 2, 16, 24
INIT = Init("normal", 0.1)
MODEL = ModelArgs(
    num_layers=2,
    hidden_size=H,
    num_attention_heads=8,
    num_query_groups=4,
    group_query_attention=True,
    kv_channels=4,
    ffn_hidden_size=24,
    max_position_embeddings=12,
    attention_dropout=0.0,
    position_embedding_type="rope",
    add_bias_linear=True,
)
TIED = replace(MODEL, untie_embeddings_and_output_weights=False)
LATENT = replace(
    MODEL,
    multi_latent_attention=True,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_head_dim=4,
    qk_pos_emb_head_dim=2,
    v_head_dim=6,
    rope_type="rope",
    qk_layernorm=True,
    add_bias_linear=False,
)
DELTA = replace(
    MODEL,
    experimental_attention_variant="gdn",
    linear_attention_freq=2,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=6,
    linear_value_head_dim=4,
    normalization="RMSNorm",
    layernorm_epsilon=1e-2,
)
BY_CHANNEL = {
    f"{each.name}{name}": replace(
        DELTA,
        **{dest: values[-1 if rank is None else 0] for dest, values in each.draws}
        | {VARIANT: each.variant, each.gate_rank: rank},
    )
    for each in SUBLAYERS
    if each.decays_by_channel
    for name, rank in (("", 3), (", no latents", None))
}
SHORT = replace(DELTA, experimental_attention_variant="short_conv", linear_conv_kernel_dim=3)
ROWS, COLUMNS, REPLICATED = "rows", "columns", "replicated"


@dataclass(frozen=True)
class Case:
    """make(ps, sp) builds the layer; `run(layer, x, ps, sp)` calls it.

    x: state of the input, y: of the output, where ROWS is meant under sequence parallelism and is REPLICATED without
    it. width: of the input; 0 means token ids.
    """

    make: Callable[[ParallelState, bool], nn.Module]
    x: str = ROWS
    y: str = ROWS
    width: int = H
    parts: int = 1
    run: Callable = lambda layer, x, ps, sp: layer(x)


def _options(ps: ParallelState, sp: bool) -> dict:
    return {"name": "layer", "group": ps.tp, "init": INIT, "sequence_parallel": sp}


def _linear(kind: type, x: str, y: str, in_features: int, out_features: int, **more) -> Case:
    return Case(
        lambda ps, sp: kind(in_features, out_features, **_options(ps, sp), **more),
        x,
        y,
        in_features,
        more.get("parts", 1),
    )


def _mlp(**change) -> Case:
    model = replace(MODEL, **change)
    return Case(
        lambda ps, sp: MLP(
            model, 24, name="layer", group=ps.tp, factory=LOCAL, bias=model.add_bias_linear, sequence_parallel=sp
        )
    )


def _attention(model: ModelArgs) -> Case:
    kind = load_class(variant_of(model) if variant_of(model).in_some_layers else attention_of(model))
    rotary = make_rotary(model)

    def run(layer, x, ps, sp):
        length = x.shape[0] * (ps.tp.size if sp else 1)
        return layer(x, None if rotary is None else rotary.tables(length, x.device), None)

    return Case(
        lambda ps, sp: kind(model, ps, name="layer", layer_number=1, factory=LOCAL, sequence_parallel=sp), run=run
    )


def _labels() -> Tensor:
    return torch.randint(0, V, (B, S), generator=named_generator(1, "labels"))


class _Tied(nn.Module):
    """One table that embeds the tokens and predicts the next ones."""

    def __init__(self, ps: ParallelState, sp: bool):
        super().__init__()
        self.embedding = VocabParallelEmbedding(V, H, **_options(ps, sp))
        self.head = OutputHead(TIED, V, ps.tp, sequence_parallel=sp)

    def forward(self, ids_SB: Tensor) -> Tensor:
        return self.head.loss(self.embedding(ids_SB).tanh(), _labels(), self.embedding.weight)


def _head(ps: ParallelState, sp: bool, bias: bool = False) -> OutputHead:
    model = replace(
        MODEL, untie_embeddings_and_output_weights=True, add_output_layer_bias=bias, init_method_std=INIT.std
    )
    return OutputHead(model, V, ps.tp, sequence_parallel=sp)


CASES = {
    "column": _linear(ColumnParallelLinear, ROWS, COLUMNS, H, 24),
    "column, bias": _linear(ColumnParallelLinear, ROWS, COLUMNS, H, 24, bias=True),
    "column, 2 parts": _linear(ColumnParallelLinear, ROWS, COLUMNS, H, 24, bias=True, parts=2),
    "column, 3 parts": _linear(ColumnParallelLinear, ROWS, COLUMNS, H, 24, parts=3),
    "column, gathered": _linear(ColumnParallelLinear, ROWS, ROWS, H, 24, bias=True, gather_output=True),
    "row": _linear(RowParallelLinear, COLUMNS, ROWS, 24, H),
    "row, bias": _linear(RowParallelLinear, COLUMNS, ROWS, 24, H, bias=True),
    "replicated": _linear(ReplicatedLinear, ROWS, ROWS, H, 24, bias=True),
    "norm": Case(
        lambda ps, sp: Norm(H, replace(MODEL, normalization="LayerNorm"), name="layer", partial=sp and ps.tp.size > 1)
    ),
    "mlp, gelu, biases": _mlp(),
    "mlp, swiglu": _mlp(swiglu=True, add_bias_linear=False),
    "mlp, geglu, biases": _mlp(quick_geglu=True),
    "attention": _attention(replace(MODEL, add_bias_linear=False)),
    "attention, biases": _attention(MODEL),
    "attention, qkv bias": _attention(replace(MODEL, add_bias_linear=False, add_qkv_bias=True)),
    "attention, one query a group": _attention(replace(MODEL, group_query_attention=False)),
    "attention, two groups": _attention(replace(MODEL, num_query_groups=2)),
    "attention, one group": _attention(replace(MODEL, num_query_groups=1)),
    "attention, gated": _attention(replace(MODEL, attention_output_gate=True)),
    "attention, gated, one group": _attention(replace(MODEL, num_query_groups=1, attention_output_gate=True)),
    "attention, sinks": _attention(replace(MODEL, softmax_type="learnable")),
    "attention, sinks, one group": _attention(replace(MODEL, softmax_type="learnable", num_query_groups=1)),
    "attention, one more": _attention(replace(MODEL, softmax_type="off-by-one")),
    "attention, normed": _attention(replace(MODEL, qk_layernorm=True, normalization="RMSNorm")),
    "attention, one group, normed": _attention(
        replace(MODEL, num_query_groups=1, qk_layernorm=True, normalization="LayerNorm")
    ),
    "attention, l2": _attention(replace(MODEL, qk_l2_norm=True)),
    "attention, window": _attention(replace(MODEL, window_size=(3, 0), num_query_groups=2)),
    "attention, no positions": _attention(replace(MODEL, position_embedding_type="none")),
    "gated DeltaNet": _attention(DELTA),
    **{name: _attention(model) for name, model in BY_CHANNEL.items()},
    "short convolution": _attention(SHORT),
    "gated DeltaNet, a value head a key head": _attention(replace(DELTA, linear_num_value_heads=4)),
    "latent attention": _attention(LATENT),
    "latent attention, biases": _attention(replace(LATENT, add_bias_linear=True)),
    "latent attention, no query latent": _attention(replace(LATENT, q_lora_rank=None)),
    "latent attention, gated": _attention(replace(LATENT, head_wise_attn_gate=True)),
    "latent attention, no norms": _attention(replace(LATENT, qk_layernorm=False)),
    "latent attention, yarn": _attention(
        replace(LATENT, rope_type="yarn", rotary_scaling_factor=4.0, mscale_all_dim=1.0)
    ),
    "latent attention, sinks": _attention(replace(LATENT, softmax_type="learnable")),
    "embedding": Case(lambda ps, sp: VocabParallelEmbedding(V, H, **_options(ps, sp)), REPLICATED, ROWS, 0),
    "positions": Case(lambda ps, sp: PositionEmbedding(V, H, **_options(ps, sp)), REPLICATED, ROWS, 0),
    "head, loss": Case(_head, ROWS, REPLICATED, run=lambda layer, x, ps, sp: layer.loss(x, _labels())),
    # beyond what exp can hold
    "head, loss of large logits": Case(
        _head, ROWS, REPLICATED, run=lambda layer, x, ps, sp: layer.loss(x * 1000, _labels())
    ),
    "head with a bias, loss": Case(
        functools.partial(_head, bias=True), ROWS, REPLICATED, run=lambda layer, x, ps, sp: layer.loss(x, _labels())
    ),
    "head with a bias, logits": Case(
        functools.partial(_head, bias=True), ROWS, REPLICATED, run=lambda layer, x, ps, sp: layer.logits(x)
    ),
    "head, logits": Case(_head, ROWS, REPLICATED, run=lambda layer, x, ps, sp: layer.logits(x)),
    "tied head": Case(_Tied, REPLICATED, REPLICATED, 0),
}


CHUNKED = [
    name for name in CASES if name.startswith(("column", "row", "mlp", "attention, bias", "latent attention, b"))
]


def _cut(full_tensor: Tensor, dim: int, rank: int, n: int, parts: int = 1) -> Tensor:
    return torch.cat([part.chunk(n, dim)[rank] for part in full_tensor.chunk(parts, dim)], dim)


def _cut_as(full_tensor: Tensor, info: ParamInfo) -> Tensor:
    """Return a rank's shard of every part; parts may have different sizes."""
    parts = (
        full_tensor.split(list(info.part_sizes), 0)
        if info.part_sizes
        else full_tensor.chunk(info.parts, info.sharded_dim)
    )
    return torch.cat(
        [part.chunk(info.shard_count, info.sharded_dim)[info.shard_rank] for part in parts], info.sharded_dim
    )


def _join(pieces: list[Tensor], dim: int, parts: int = 1) -> Tensor:
    by_rank = [piece.chunk(parts, dim) for piece in pieces]
    return torch.cat([piece[part] for part in range(parts) for piece in by_rank], dim)


def _fill(layer: nn.Module) -> nn.Module:
    """Every parameter random, fp64, sharded by its info."""
    for param in layer.parameters():
        info, shape = param.info, list(param.shape)
        if info.sharded_dim is not None:
            shape[info.sharded_dim] *= info.shard_count
        full_tensor = torch.randn(shape, generator=named_generator(3, info.names[0]), dtype=torch.float64) * 0.5
        if info.sharded_dim is not None:
            full_tensor = _cut_as(full_tensor, info)
        param.data = full_tensor
    return layer


def _state(state: str, sp: bool) -> str:
    return REPLICATED if state == ROWS and not sp else state


def _local(full_tensor: Tensor, state: str, group: Group, parts: int = 1) -> Tensor:
    if state == REPLICATED:
        return full_tensor
    return _cut(full_tensor, 0 if state == ROWS else -1, group.rank, group.size, parts if state == COLUMNS else 1)


def _run(
    case: Case, ps: ParallelState, sp: bool, queue: WeightGradQueue | None = None, overlap: LinearOverlap | None = None
) -> tuple[Tensor, Tensor, dict]:
    """(output, gradient of the input, {name: (info, gradient)}) of this rank for <random weights, output>."""
    layer = _fill(case.make(ps, sp))
    for module in layer.modules() if overlap is not None else ():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
            module.overlap = overlap
    if queue is not None:
        for module in layer.modules():
            if hasattr(module, "queue"):
                module.queue = queue
    if case.width:
        full_tensor = torch.randn(S, B, case.width, generator=named_generator(1, "x"), dtype=torch.float64)
    else:
        full_tensor = torch.randint(0, V, (S, B), generator=named_generator(1, "ids"))
    x = _local(full_tensor, _state(case.x, sp), ps.tp).clone()
    if case.width:
        x.requires_grad_()
    y = case.run(layer, x, ps, sp)
    state = _state(case.y, sp)
    shape = list(y.shape)
    if state != REPLICATED:
        shape[0 if state == ROWS else -1] *= ps.tp.size
    weight = torch.randn(shape, generator=named_generator(1, "weight"), dtype=torch.float64)
    (y * _local(weight, state, ps.tp, case.parts)).sum().backward()
    if queue is not None:
        queue.run()
    return y.detach(), x.grad, {param.info.names[0]: (param.info, param.grad) for param in layer.parameters()}


# three chunks of a rank's four rows differ in size
OVERLAPPED = {f"{name}, overlapped": LinearOverlap(True, 3, chunks) for name, chunks in (("bulk", 1), ("rs dgrad", 2))}


def _on_ranks(rank, n, sp):
    ps = ParallelState.create(n, rank, tp=n)
    found = {name: _run(case, ps, sp) for name, case in CASES.items()}
    for how, overlap in OVERLAPPED.items() if sp else ():
        found |= {(name, how): _run(CASES[name], ps, sp, overlap=overlap) for name in CHUNKED}
    return found


@functools.cache
def _ranks(n: int, sp: bool) -> list[dict]:
    return run_ranks(_on_ranks, n, sp)


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    assert (ours - theirs).norm() <= 1e-12 * theirs.norm() + 1e-14, f"{what}: {(ours - theirs).abs().max():.2e}"


def _full_grad(found: list[tuple[ParamInfo, Tensor]], what: str) -> Tensor:
    info = found[0][0]
    grads = [grad for _, grad in found]
    if info.sharded_dim is not None:
        assert not info.is_grad_partial and [each.shard_rank for each, _ in found] == list(range(len(found))), what
        if info.part_sizes:
            pieces = [grad.split([size // info.shard_count for size in info.part_sizes]) for grad in grads]
            return torch.cat([piece[part] for part in range(info.parts) for piece in pieces])
        return _join(grads, info.sharded_dim, info.parts)
    if info.is_grad_partial:
        return torch.stack(grads).sum(0)
    for grad in grads:
        _close(grad, grads[0], f"{what}: replicated gradients differ")
    return grads[0]


def _assert_equal(case: Case, results: list, expected: tuple, sp: bool) -> None:
    y, grad_x, grads = expected
    for what, place, full_tensor, state, parts in (
        ("output", 0, y, _state(case.y, sp), case.parts),
        ("input gradient", 1, grad_x, _state(case.x, sp), 1),
    ):
        for rank, result in enumerate(results):
            if full_tensor is not None:
                part = _local(full_tensor, state, Group("tp", tuple(range(len(results))), rank, len(results)), parts)
                _close(result[place], part, f"{what} of rank {rank}")
    for name, (_, grad) in grads.items():
        assert grad.abs().max() > 0, f"{name}: an expected gradient of zero proves nothing"
        _close(_full_grad([result[2][name] for result in results], name), grad, f"gradient of {name}")
    assert all(result[2].keys() == grads.keys() for result in results)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sp", [False, True], ids=["replicated", "sequence parallel"])
@pytest.mark.parametrize("n", [2, 4])
def test_layer_on_ranks_equals_one_process(n, sp, name):
    results = [report[name] for report in _ranks(n, sp)]
    _assert_equal(CASES[name], results, _run(CASES[name], ParallelState.single(), False), sp)


@pytest.mark.parametrize("how", OVERLAPPED)
@pytest.mark.parametrize("n", [2, 4])
def test_chunked_communication_equals_one_process(n, how):
    for name in CHUNKED:
        results = [report[name, how] for report in _ranks(n, True)]
        _assert_equal(CASES[name], results, _run(CASES[name], ParallelState.single(), False), True)


def _deferred(rank, n, sp):
    ps = ParallelState.create(n, rank, tp=n) if n > 1 else ParallelState.single()
    report = {}
    for name, case in CASES.items():
        queue = WeightGradQueue()
        queue.active = True
        report[name] = _run(case, ps, sp, queue)
    return report


@pytest.mark.parametrize(("n", "sp"), [(1, False), (2, False), (2, True)])
def test_deferred_weight_gradients_equal_one_process(n, sp):
    reports = run_ranks(_deferred, n, sp)
    for name, case in CASES.items():
        _assert_equal(case, [report[name] for report in reports], _run(case, ParallelState.single(), False), sp)


@pytest.mark.parametrize("name", ["column, bias", "row", "replicated", "head, loss"])
def test_queue_receives_the_weight_gradient_gemms(name):
    queue, calls = WeightGradQueue(), []
    queue.active = True
    defer = queue.defer
    queue.defer = lambda param, compute: (calls.append(param.info.names[0]), defer(param, compute))
    _run(CASES[name], ParallelState.single(), False, queue)
    assert calls == ["output_layer.weight" if name == "head, loss" else "layer.weight"]


def test_queue_on_one_rank_gives_identical_results():
    for name, case in CASES.items():
        plain, waiting = (_run(case, ParallelState.single(), False, queue) for queue in (None, WeightGradQueue()))
        assert torch.equal(plain[0], waiting[0]), name
        for param, (_, grad) in plain[2].items():
            assert torch.equal(grad, waiting[2][param][1]), f"{name}: {param}"


class _GemmLog(TorchDispatchMode):
    """Logs every matrix GEMM."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.log.append("GEMM")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "sp", "expected"),
    [
        ("column", True, "gather / GEMM / reduce-scatter / gather done / GEMM / reduce-scatter done"),
        ("column", False, "GEMM / all-reduce / GEMM / all-reduce done"),
        ("head, loss", True, "gather / GEMM / reduce-scatter / gather done / GEMM / reduce-scatter done"),
        ("row", True, "gather / GEMM / GEMM"),
    ],
)
def test_backward_communication_overlaps_its_gemms(name, sp, expected, monkeypatch):
    """In one process: the group nominally has two ranks, and communication is simulated."""
    log = []

    def started(what, result, async_op):
        log.append(what)
        return result, SimpleNamespace(wait=lambda: log.append(f"{what} done")) if async_op else None

    def gather(x, group, async_op=False):
        return started("gather", torch.cat([x, x]), async_op)

    def reduce_scatter(x, group, async_op=False):
        return started("reduce-scatter", x[: len(x) // 2].clone(), async_op)

    def reduce(x, group, op="sum", async_op=False):
        return started("all-reduce", x, async_op)[1 if async_op else 0]

    for module in (linear, vocab):
        monkeypatch.setattr(module, "gather_rows", gather)
        monkeypatch.setattr(module, "all_reduce", reduce)
    monkeypatch.setattr(linear, "reduce_scatter_rows", reduce_scatter)
    case, two = CASES[name], replace(ParallelState.single(), tp=Group("tp", (0, 1), 0, 2))
    layer = _fill(case.make(two, sp))
    x = torch.randn(
        S // 2 if sp and case.x == ROWS else S,
        B,
        case.width // (2 if case.x == COLUMNS else 1),
        dtype=torch.float64,
        requires_grad=True,
    )
    y = case.run(layer, x, two, sp)
    log.clear()
    with _GemmLog(log):
        y.backward(torch.ones_like(y))
    assert " / ".join(log) == expected


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        (
            "column",
            "exchange / GEMM / exchange done / GEMM",
            "gather / GEMM / scatter / GEMM / scatter / gather done / GEMM / scatter done / scatter done",
        ),
        (
            "row",
            "GEMM / scatter / GEMM / scatter / scatter done / scatter done",
            "exchange / GEMM / exchange done / GEMM / GEMM",
        ),
    ],
)
def test_chunked_communication_overlaps_all_gemms(name, forward, backward, monkeypatch):
    """As above: each GEMM but the last in a row runs while the next rows are on their way."""
    log = []

    def started(what):
        log.append(what)
        return SimpleNamespace(wait=lambda: log.append(f"{what} done"))

    def gather(x, group, async_op=False):
        return torch.cat([x, x]), started("gather")

    monkeypatch.setattr(linear, "gather_rows", gather)
    monkeypatch.setattr(tp_overlap, "exchange", lambda messages, group: started("exchange"))
    monkeypatch.setattr(tp_overlap, "reduce_scatter_flat", lambda *args, **options: started("scatter"))
    case, two = CASES[name], replace(ParallelState.single(), tp=Group("tp", (0, 1), 0, 2))
    layer = _fill(case.make(two, True))
    layer.overlap = LinearOverlap(True, 2, 2)
    rows, width = (S // 2, case.width) if case.x == ROWS else (S, case.width // 2)
    x = torch.randn(rows, B, width, dtype=torch.float64, requires_grad=True)
    with _GemmLog(log):
        y = layer(x)
        assert " / ".join(log) == forward
        log.clear()
        y.backward(torch.ones_like(y))
    assert " / ".join(log) == backward


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("proj: {num_splits: 2}", "proj is no GEMM"),
        ("proj_fprop: 2", "proj_fprop is no table"),
        ("proj_fprop: {num_splits: 0}", "num_splits 0 must be"),
        ("proj_fprop: {num_split: 2}", "num_split is no setting; choose from method, "),
        ("proj_fprop: {method: [ring]}", r"method \['ring'\] must be one of ring_exchange, "),
        ("[proj_fprop]", "no table of GEMMs"),
        ("a: [", "--tp-comm-overlap-cfg .*overlap.yaml: while parsing"),
    ],
)
def test_overlap_file_is_checked(tmp_path, text, message):
    file = tmp_path / "overlap.yaml"
    file.write_text(text)
    with pytest.raises(OverlapFileError, match=message):
        TpOverlap.from_args(ParallelArgs(tp_comm_overlap=True, tp_comm_overlap_cfg=str(file)))


def test_overlap_file_sets_the_chunks_of_reduce_scatters(tmp_path):
    file = tmp_path / "overlap.yaml"
    file.write_text("proj_fprop: {num_splits: 3}\nfc1_dgrad: {method: ring_exchange}")
    flags = {"tp_comm_overlap": True, "tp_comm_overlap_cfg": str(file), "tp_comm_overlap_rs_dgrad": True}
    overlap = TpOverlap.from_args(ParallelArgs(**flags))
    names = ("linear_proj", "linear_fc1", "linear_fc2")
    assert [overlap.for_linear(f"decoder.layers.0.{name}", 2) for name in names] == [
        LinearOverlap(True, 3, 4),
        LinearOverlap(True, 4, 2),
        LinearOverlap(True, 4, 4),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda group: ColumnParallelLinear(4, 6, name="a.b", group=group, init=INIT),
            "a.b: 6 output features .* 4 ranks of tp",
        ),
        (
            lambda group: ColumnParallelLinear(4, 12, name="a.b", group=group, init=INIT, parts=2),
            "a.b: 12 .* in 2 equal parts",
        ),
        (lambda group: RowParallelLinear(6, 4, name="a.b", group=group, init=INIT), "a.b: 6 input features"),
        (lambda group: VocabParallelEmbedding(6, 4, name="a.b", group=group, init=INIT), "a.b: 6 rows"),
        (lambda group: OutputHead(TIED, 6, group), "output_layer: 6 rows"),
    ],
)
def test_indivisible_sizes_are_rejected_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make(Group("tp", (0, 1, 2, 3), 0, 4))


def _unknown_token(rank, n, token):
    ps = ParallelState.create(n, rank, tp=n)
    for layer in (VocabParallelEmbedding(V, H, **_options(ps, False)), _head(ps, False)):
        ids = torch.full((B, S), token)
        with pytest.raises(RuntimeError, match=f"not one of the vocabulary's {V} rows"):
            layer(ids) if isinstance(layer, VocabParallelEmbedding) else layer.loss(torch.ones(S, B, H), ids)


@pytest.mark.parametrize("token", [-1, V])
def test_a_token_that_no_rank_holds_is_an_error_on_every_rank(token):
    run_ranks(_unknown_token, 2, token)


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 6, "num_query_groups": 2}, {"num_attention_heads": 12, "num_query_groups": 3}]
)
def test_heads_that_cannot_be_divided_are_rejected(change):
    four = replace(ParallelState.single(), tp=Group("tp", (0, 1, 2, 3), 0, 4))
    with pytest.raises(ValueError, match="a: .* heads in . groups do not divide over 4"):
        SelfAttention(replace(MODEL, **change), four, name="a", layer_number=1, factory=LOCAL)
