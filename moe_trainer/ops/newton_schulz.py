"""Newton-Schulz iteration: the approximate orthogonal factor of a matrix, by matmuls alone.

X = U S V^T becomes U f(S) V^T with an odd polynomial f applied repeatedly: X <- a X + (b A + c A^2) X, A = X X^T, of
the smaller dimension. Matrices sharded by columns need only sums of squares and of A over the ranks.

Sources: arXiv 2502.16982 (Muon); coefficients: "simple" and "quintic" of modded-nanogpt, "polar_express" of arXiv
2505.16932, "cans" of arXiv 2506.10935, "aol" of flash-newton-schulz, "deepseekv4" for ten iterations, "cubic5" of
degree three.
"""

from collections.abc import Callable, Iterator
from types import MappingProxyType

import torch
from torch import Tensor

_SIMPLE = (3.4445, -4.7750, 2.0315)
COEFFICIENTS = MappingProxyType(
    {
        "simple": (_SIMPLE,),
        "quintic": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "cans": (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "aol": (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "deepseekv4": (*(_SIMPLE,) * 8, *((2.0, -1.5, 0.5),) * 2),
        "cubic5": (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
    }
)
"""Per set, (a, b, c) of each step."""
_REPEAT_LAST_STEP = frozenset({"polar_express", "cans", "deepseekv4"})  # the other sets are repeated from the start
EPS = 1e-7


def coefficients(kind: str, steps: int) -> Iterator[tuple[float, float, float]]:
    """Yield (a, b, c) of every step."""
    table = COEFFICIENTS[kind]
    for step in range(steps):
        yield table[min(step, len(table) - 1) if kind in _REPEAT_LAST_STEP else step % len(table)]


def orthogonalize(
    x: Tensor,
    kind: str,
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    sharded_dim: int | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return approximately U V^T of each matrix U S V^T.

    Args:
        x: [n, rows, columns], fp32.
        dtype: of the matmuls' operands.
        sharded_dim: dimension (0 rows, 1 columns) along which ranks hold shards of each matrix.
        sum_over_ranks: sums a tensor over these ranks in place.

    Returns:
        fp32, this rank's shard.
    """
    transpose = x.shape[1] > x.shape[2] if sharded_dim is None else sharded_dim == 0
    x = x.mT if transpose else x
    squares = x.square().sum(dim=(1, 2), keepdim=True)
    if sum_over_ranks is not None:
        squares = sum_over_ranks(squares)
    x = (x / squares.sqrt().clamp_min(EPS)).to(dtype)
    for a, b, c in coefficients(kind, steps):
        gram = x @ x.mT
        if sum_over_ranks is not None:
            gram = sum_over_ranks(gram)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.float()
    return x.mT if transpose else x
