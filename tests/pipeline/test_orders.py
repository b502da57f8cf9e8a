"""Schedule orders, simulated: they are complete, can run, never deadlock, and have the published bubbles."""

import itertools
from dataclasses import replace

import pytest

from arguments.mechanisms.schedules import INTERLEAVED, ONE_F_ONE_B, ZERO_BUBBLE
from arguments.parallel import ParallelArgs
from moe_trainer.pipeline.orders import (
    ScheduleKind,
    split_backward,
)
from moe_trainer.pipeline.p2p_program import Message, P2PBatch, channel, program
from moe_trainer.pipeline.simulate import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Action,
    Pair,
    UniformCosts,
    simulate_schedule,
    source,
    step_actions,
    target,
)

SPLIT = UniformCosts(1.0, 1.0, 1.0)


def plain(pp, m, pairs=False):
    return ScheduleKind(pairs=pairs).orders(pp, m)


def virtual(pp, vpp, m, group=None, pairs=False):
    return ScheduleKind(INTERLEAVED, vpp, group, pairs).orders(pp, m)


def split(orders):
    return [split_backward(order, rank) for rank, order in enumerate(orders)]


CASES = {
    **{f"1f1b pp{pp} m{m}": (plain(pp, m), 1) for pp in (1, 2, 3, 4, 8) for m in (1, 2, 3, 7, 16)},
    **{
        f"interleaved pp{pp} vpp{vpp} m{m} group {group}": (virtual(pp, vpp, m, group), vpp)
        for pp, vpp, m, group in (
            (2, 2, 2, 2),
            (2, 3, 4, 2),
            (2, 2, 5, 3),
            (4, 2, 8, 4),
            (4, 3, 4, 4),
            (4, 2, 11, 6),
            (8, 4, 16, 8),
            (2, 2, 8, 8),
        )
    },
}
PAIRED = {
    **{f"pairs pp{pp} m{m}": (plain(pp, m, True), 1) for pp in (1, 2, 4) for m in (1, 2, 3, 7, 16)},
    **{
        f"pairs pp{pp} vpp{vpp} m{m} group {group}": (virtual(pp, vpp, m, group, True), vpp)
        for pp, vpp, m, group in ((2, 2, 2, 2), (2, 3, 4, 2), (2, 2, 5, 3), (4, 2, 8, 4), (4, 2, 11, 6), (2, 2, 8, 8))
    },
}
CASES.update({f"zero bubble {name}": (split(orders), chunks) for name, (orders, chunks) in CASES.items()})


@pytest.mark.parametrize("name", [*CASES, *PAIRED])
def test_every_action_occurs_once_in_a_valid_order(name):
    orders, chunks = (CASES | PAIRED)[name]
    ends = simulate_schedule(orders, chunks)
    for rank, order in enumerate(orders):
        actions = [action for step in order for action in step_actions(step)]
        assert len(set(actions)) == len(actions) == len(ends[rank])
        seen = set()
        for action in actions:
            if action.kind == BACKWARD:
                assert action._replace(kind=FORWARD) in seen
            if action.kind == WEIGHT:
                assert action._replace(kind=BACKWARD) in seen
            seen.add(action)
            needed = source(rank, action, len(orders), chunks)
            if needed is not None:
                assert target(*needed, len(orders), chunks) == (rank, action)


def sends(step):
    return [message.action for message in step.messages if message.is_send]


def receives(step):
    return [message.action for message in step.messages if not message.is_send]


def simulate_rendezvous(programs, pp, chunks, batched, channels=1):
    """Run the programs with messages that rendezvous. Returns True if all end.

    A batch of messages ends only when both sides of all its messages have started, and a rank continues only when what
    it has sent is through.
    """
    queues = range(channels * pp)  # rank * channels + channel
    place = [0] * pp
    started = [set() for _ in range(pp)]  # ids of messages whose end at this rank is started
    open_batches = [[] for _ in queues]  # NCCL: a rank's batches of one communicator run one after the other
    unlaunched = [[] for _ in queues]
    leaving = [[] for _ in range(pp)]

    def ident(rank, action, is_send):
        return (rank, action) if is_send else source(rank, action, pp, chunks)

    def settle():
        moved = True
        while moved:
            moved = False
            for queue in queues:
                if not open_batches[queue] and unlaunched[queue]:
                    batch = unlaunched[queue].pop(0)
                    started[queue // channels] |= batch
                    open_batches[queue] = [batch]
                    moved = True
                if open_batches[queue] and all(
                    sum(message in s for s in started) == 2 for message in open_batches[queue][0]
                ):
                    open_batches[queue].pop()
                    moved = True

    def started_batches(rank):
        return [
            batch
            for queue in range(rank * channels, (rank + 1) * channels)
            for batch in (*unlaunched[queue], *open_batches[queue])
        ]

    moved = True
    while moved:
        moved = False
        settle()
        for rank in range(pp):
            while place[rank] < len(programs[rank]):
                step = programs[rank][place[rank]]
                if any(sent in batch for sent in leaving[rank] for batch in started_batches(rank)):
                    break
                if isinstance(step, P2PBatch):
                    leaving[rank] = [ident(rank, a, True) for a in sends(step)]
                    messages = [
                        (channel(rank, message, pp) % channels, ident(rank, message.action, message.is_send))
                        for message in step.messages
                    ]
                    for which, together in (
                        [(0, {message for _, message in messages})]
                        if batched
                        else [(number, {message}) for number, message in messages]
                    ):
                        unlaunched[rank * channels + which].append(together)
                else:
                    pending = started_batches(rank)
                    needed = {source(rank, action, pp, chunks) for action in step_actions(step)} - {None}
                    if needed - started[rank] or any(needed & batch for batch in pending):
                        break
                place[rank] += 1
                moved = True
                settle()
    return (
        all(place[rank] == len(programs[rank]) for rank in range(pp)) and not any(open_batches) and not any(unlaunched)
    )


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("name", [*CASES, *PAIRED])
def test_blocking_messages_never_deadlock(name, ahead):
    orders, chunks = (CASES | PAIRED)[name]
    pp = len(orders)
    programs = [program(orders, chunks, rank, ahead) for rank in range(pp)]
    for rank, steps in enumerate(programs):
        assert tuple(step for step in steps if not isinstance(step, P2PBatch)) == orders[rank]
        done = set()
        for step in steps:
            if isinstance(step, P2PBatch):
                assert set(sends(step)) <= done and not set(receives(step)) & done
            else:
                done.update(step_actions(step))
    for a, b in itertools.permutations(range(pp), 2):  # both ends of a channel see one sequence
        sent = [
            target(a, x, pp, chunks)[1]
            for step in programs[a]
            if isinstance(step, P2PBatch)
            for x in sends(step)
            if target(a, x, pp, chunks)[0] == b
        ]
        received = [
            x
            for step in programs[b]
            if isinstance(step, P2PBatch)
            for x in receives(step)
            if source(b, x, pp, chunks)[0] == a
        ]
        assert sent == received
    assert simulate_rendezvous(programs, pp, chunks, batched=True)
    assert all(simulate_rendezvous(programs, pp, chunks, batched=False, channels=channels) for channels in (1, 2))


@pytest.mark.parametrize("name", [name for name, (_, chunks) in CASES.items() if chunks > 1])
def test_directions_do_not_wait_for_each_other(name):
    """Both ends of a message use the same communicator.

    On none of them does a rank wait for what comes to send what it has made (two ranks), or in one direction for the
    other (more).
    """
    orders, chunks = CASES[name]
    pp, carried = len(orders), {}
    for rank in range(pp):
        for step in program(orders, chunks, rank, 1):
            for message in step.messages if isinstance(step, P2PBatch) else ():
                which = channel(rank, message, pp)
                carried.setdefault((rank, which), set()).add(message.is_send if pp == 2 else message.action.kind)
                other, action = (target if message.is_send else source)(rank, message.action, pp, chunks)
                assert message.peer == other
                if message.is_send:
                    assert channel(other, Message(action, False, rank), pp) == which
    assert len(carried) == 2 * pp and all(len(kinds) == 1 for kinds in carried.values())


@pytest.mark.parametrize(("ahead", "early"), [(0, [0, 0, 0]), (1, [0, 1, 1]), (3, [0, 2, 2])])
def test_receives_start_ahead_of_their_use(ahead, early):
    """But not before a send of what exists then: the last stage sends its gradients between its receives."""
    orders, done, found = plain(2, 3), 0, []
    for step in program(orders, 1, 1, ahead):
        if isinstance(step, P2PBatch):
            found += [orders[1].index(action) - done for action in receives(step)]
        else:
            done += 1
    assert found == early


@pytest.mark.parametrize(("pp", "vpp", "m", "group", "pairs", "forwards"), [
    (2, 2, 8, 2, False, [5, 3]),
    (4, 2, 8, 4, False, [11, 9, 7, 5]),
    (4, 3, 16, 4, False, [15, 13, 11, 9]),
    (4, 2, 16, 6, False, [13, 11, 9, 7]),
    (2, 2, 2, 2, False, [4, 3]),  # no more than there are: the first rank runs all of them
    (2, 2, 8, 2, True, [6, 4]),
])  # fmt: skip
def test_warmup_of_virtual_stages_equals_megatron(pp, vpp, m, group, pairs, forwards):
    """Forward passes before the first backward.

    2 (pp - rank - 1) + (vpp - 1) group, one more with overlapped experts, then one of the steady state's; at most all.
    More would hold more activations than planned, fewer would stall the pipeline.
    """
    found = []
    for order in virtual(pp, vpp, m, group, pairs):
        actions = [action for step in order for action in step_actions(step)]
        found.append(next(place for place, action in enumerate(actions) if action.kind == BACKWARD))
    assert found == forwards


def test_forward_backward_pairs_fill_the_steady_state():
    for rank, order in enumerate(plain(2, 9, True)):
        assert sum(isinstance(step, Pair) for step in order) == 9 - (2 - rank)
    alone = plain(1, 4, True)[0]
    assert [len(step_actions(step)) for step in alone] == [1, 2, 2, 2, 1]


def makespan(orders, chunks, costs):
    return max(max(rank.values()) for rank in simulate_schedule(orders, chunks, costs))


@pytest.mark.parametrize("pp, m", [(2, 4), (4, 8), (4, 13), (8, 16)])
def test_bubbles_equal_the_published_formulas(pp, m):
    assert makespan(plain(pp, m), 1, UniformCosts()) == 3 * (m + pp - 1)
    assert makespan(split(plain(pp, m)), 1, SPLIT) == 3 * m + pp - 1  # (pp - 1)(F + B - W)
    if m % pp == 0:  # a chunk is half a stage: all costs count half
        assert makespan(virtual(pp, 2, m), 2, UniformCosts()) / 2 == 3 * m + 3 * (pp - 1) / 2


@pytest.mark.parametrize("pp, m", [(2, 5), (4, 9)])
def test_number_of_microbatches_in_flight(pp, m):
    def most(order, last):
        held = peak = 0
        for action in order:
            held += (action.kind == FORWARD) - (action.kind == last)
            peak = max(peak, held)
        return peak

    assert [most(order, BACKWARD) for order in plain(pp, m)] == [pp - rank for rank in range(pp)]
    assert max(most(order, WEIGHT) for order in split(plain(pp, m))) == pp


def test_order_that_cannot_run_is_rejected():
    forward = [Action(FORWARD, 0, 0), Action(FORWARD, 0, 1)]
    backward = [Action(BACKWARD, 0, 0), Action(BACKWARD, 0, 1)]
    with pytest.raises(ValueError, match="rank 0 waits before"):
        simulate_schedule([(forward[0], backward[0], forward[1], backward[1]), (*forward, *backward)], 1)


def test_a_lag_of_zero_defers_all_weight_gradients_of_the_head():
    last, late = (ScheduleKind(head_lag=lag).orders(2, 4)[-1] for lag in (0, 1))
    assert [action.kind for action in last[-4:]] == [WEIGHT] * 4
    assert [action.kind for action in late] != [action.kind for action in last]


def test_flags_select_the_kind_of_schedule():
    assert ScheduleKind.of_flags(ParallelArgs(), 1) == ScheduleKind(ONE_F_ONE_B)
    assert ScheduleKind.of_flags(ParallelArgs(), 2) == ScheduleKind(INTERLEAVED, 2)
    late = ScheduleKind.of_flags(ParallelArgs(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=3), 1)
    assert late.has_wgrad_actions and late == ScheduleKind(head_lag=3)
    zero_bubble = ParallelArgs(pipeline_schedule="zero-bubble", pipeline_model_parallel_size=2)
    assert ScheduleKind.of_flags(zero_bubble, 1) == ScheduleKind(ZERO_BUBBLE)
    assert ScheduleKind.of_flags(zero_bubble, 2).has_wgrad_actions
    one_stage = replace(zero_bubble, pipeline_model_parallel_size=1)
    assert ScheduleKind.of_flags(one_stage, 1) == ScheduleKind() and not one_stage.has_deferred_wgrad


def test_zero_bubble_splits_the_backwards_of_the_other_orders():
    assert ScheduleKind(ZERO_BUBBLE).orders(4, 7) == split(plain(4, 7))
    assert ScheduleKind(ZERO_BUBBLE, 2, 6).orders(4, 11) == split(virtual(4, 2, 11, 6))
