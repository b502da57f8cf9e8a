"""A matrix of pairs: which pairs of dimensions the checked cases had together, and whether these cases were equal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moe_trainer.drawing.svg import FAINT, GRAY, GREEN, INK, PALE, RED, Picture, text_on

_WIDTH, _HEIGHT = 96, 40


def pair_text(pair: Collection[str], cases: Sequence[tuple[Collection[str], bool]]) -> tuple[str, str]:
    """Return what the cases show about a pair, and its color.

    Args:
        pair: two dimensions, or one.
        cases: the dimensions of each case, and whether it was equal.
    """
    outcomes = [is_equal for dimensions, is_equal in cases if set(pair) <= set(dimensions)]
    if not outcomes:
        return "not covered", GRAY
    if all(outcomes):
        return f"{len(outcomes)} equal", GREEN
    return f"{outcomes.count(False)} of {len(outcomes)} differ", RED


def pair_matrix(
    title: str,
    heading: str,
    names: Sequence[str],
    needed: Collection[str],
    cases: Sequence[tuple[Collection[str], bool]],
) -> str:
    """Draw the lower half of the matrix; the diagonal has the single dimensions.

    Args:
        title: for screen readers.
        heading: above the matrix.
        names: of all dimensions.
        needed: dimensions that should be covered; the others are left empty.
        cases: the dimensions of each case, and whether it was equal.
    """
    left, top, used = 70, 50, {PALE}
    picture = Picture(left + len(names) * _WIDTH + 14, top + len(names) * _HEIGHT, title, heading)
    for row, name in enumerate(names):
        y = top + row * _HEIGHT
        picture.text(left - 10, y + 24, name, "end")
        for column, other in enumerate(names[: row + 1]):
            x = left + column * _WIDTH
            if not {name, other} <= set(needed):
                picture.box(x, y, _WIDTH - 3, _HEIGHT - 3, PALE, f"{name}, {other}: not in this mapping", stroke=FAINT)
                continue
            text, color = pair_text({name, other}, cases)
            used.add(color)
            what = name if name == other else f"{name} with {other}"
            picture.box(x, y, _WIDTH - 3, _HEIGHT - 3, color, f"{what}: {text}", rx=3)
            picture.text(x + (_WIDTH - 3) / 2, y + 23, text, "middle", 11, text_on(color))
    for column, name in enumerate(names):
        picture.text(left + column * _WIDTH + _WIDTH / 2, top + len(names) * _HEIGHT + 14, name, "middle", 12, INK)
    entries = [(GREEN, "equal"), (RED, "a case differs"), (GRAY, "in no case"), (PALE, "not in this mapping")]
    picture.legend(left, top + len(names) * _HEIGHT + 40, [entry for entry in entries if entry[0] in used])
    return picture.svg()
