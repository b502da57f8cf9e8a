"""Print the pipeline layout that the launchers use where layers do not divide evenly, or nothing where they need none.

    python scripts/pipeline_layout.py --pp 8 [--vpp 4 | --overlap] -- FLAGS

The last stage, with the loss and multi-token prediction, gets fewer layers. --overlap: expert communication is going to be
overlapped, which needs several chunks per rank: as many as four.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments.parse import understand
from moe_trainer.planner.mappings import layer_counts, layout_text

CHUNKS = (4, 3, 2)


def layout(layers: int, depths: int, pp: int, vpp: int | None, overlap: bool) -> str | None:
    """The layout string of so many decoder layers and multi-token prediction depths; None where an even split does."""
    if vpp is None:
        vpp = next((chunks for chunks in CHUNKS if pp * chunks <= layers + 1), 1) if overlap else 1
        if not overlap and layers % pp == 0:
            return None
    elif layers % (pp * vpp) == 0:
        return None
    return layout_text(layer_counts(layers, pp * vpp, 1.0 + depths), depths)


def main() -> None:
    """Read the flags as far as they tell the model, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--vpp", type=int)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("flags", nargs="*")
    asked = parser.parse_args()
    # whatever else is wrong with the flags: the launcher judges the whole command line next, and should not find a second mistake there that
    # is only the missing layout
    model, _ = understand(asked.flags, None)
    if not model.num_layers:
        return
    text = layout(model.num_layers, model.mtp_num_layers or 0, asked.pp, asked.vpp, asked.overlap)
    if text is not None:
        print(text)


if __name__ == "__main__":
    main()
