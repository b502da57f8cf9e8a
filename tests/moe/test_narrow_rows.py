"""Rows are sent with the width that experts read and write: latents both ways (LatentMoE)."""

import pytest
import torch
from harness import run_ranks
from moe.layers import HIDDEN, build_shard, sections

from moe_trainer.parallel import collectives
from moe_trainer.parallel.state import ParallelState

TOKENS, TOPK = 12, 4
LATENT = {"moe_latent_size": 6, "moe_router_topk": TOPK}
PLAIN = {"moe_router_topk": TOPK}


def _collect_sent_rows(rank, n, dispatcher, changes, backward):
    """Return (width, rows) of every send of rows by this rank, in order."""
    ps = ParallelState.create(n, rank, ep=n)
    layer = build_shard(sections(moe_token_dispatcher_type=dispatcher, moe_aux_loss_coeff=0.0, **changes), ps)
    run, found = collectives.communicate, []

    def counting(group, operation, x, /, *args, **kwargs):
        if x is not None and x.is_floating_point() and x.dim() == 2:
            found.append((x.shape[1], x.shape[0]))
        return run(group, operation, x, *args, **kwargs)

    collectives.communicate = counting
    x = torch.randn(
        TOKENS, 1, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank), requires_grad=True
    )
    y = layer(x)
    if backward:
        found.clear()
        y.sum().backward()
    return found


@pytest.mark.parametrize(("changes", "there", "back"), [(PLAIN, 16, 16), (LATENT, 6, 6)])
@pytest.mark.parametrize("backward", [False, True])
def test_width_of_rows_in_all_to_all(changes, there, back, backward):
    check_widths(changes, there, back, backward)


def check_widths(changes, there, back, backward):
    """In backward the gradients of the combined rows are sent first, with the same width."""
    ranks = run_ranks(_collect_sent_rows, 2, "alltoall", changes, backward)
    widths = (back, there) if backward else (there, back)
    for sent in ranks:
        assert [width for width, _ in sent] == list(widths)
    rows = [sum(sent[way][1] for sent in ranks) for way in (0, 1)]
    assert rows == [2 * TOKENS * TOPK] * 2, "a row for every pair of token and expert, both ways"


def test_all_gather_sends_latents():
    sent = run_ranks(_collect_sent_rows, 2, "allgather", LATENT, False)[0]
    assert (6, TOKENS) in sent
    assert all(width != HIDDEN for width, _ in sent)
