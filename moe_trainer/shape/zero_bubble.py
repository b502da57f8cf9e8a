"""Zero bubble (H1): weight gradients are computed apart and fill the time in which a rank would wait. Pure.

Only the gradient of a chunk's input holds up the rank before it. So backward B leaves the weight gradients of its linear layers
and experts undone (parallel/weight_grads.py), and W computes them `rank` microbatches later: the last rank, which everybody waits
for, puts them off longest; the first one, which nobody waits for, not at all. What waits is bounded by the warm-up that the rank
does not need, so no rank holds more microbatches than the first one does under 1F1B. The bubble shrinks from (pp - 1)(F + B + W) to
(pp - 1)(F + B - W). With virtual stages the same is done to the interleaved order.

torch.distributed.pipelining has such schedules (ScheduleZBVZeroBubble, ScheduleInterleavedZeroBubble) and was not taken: its stages
infer the shapes of their inputs by running the model, want all inputs on the first stage and labels on the last one (here a layer
anywhere may need tokens and masks, and the loss its token counts), and scale or reduce gradients themselves; its split of backward
walks the autograd graph to find weights, which custom functions (experts, tensor-parallel linears) hide.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism" (arXiv:2401.10241), schedule ZB-H1.
"""

from moe_trainer.shape.timetable import BACKWARD, WEIGHT, Action, Order, Pair, actions_of


def split_backward(order: Order, lag: int | None, chunk: int | None = None) -> Order:
    """Insert W actions: one behind every backward (of one chunk, if given), `lag` of them late; those that remain stand at the end.

    lag None: all do.
    """
    found: list[Action | Pair] = []
    waiting: list[Action] = []
    for step in order:
        found.append(step)
        for action in actions_of(step):
            if action.kind == BACKWARD and chunk in (None, action.chunk):
                waiting.append(action._replace(kind=WEIGHT))
                if lag is not None and len(waiting) > lag:
                    found.append(waiting.pop(0))
    return (*found, *waiting)
