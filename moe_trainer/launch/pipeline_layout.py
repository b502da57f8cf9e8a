"""Print the pipeline layout of the launchers if the layers do not divide evenly, else nothing.

    python pipeline_layout.py --pp 8 [--vpp 4 | --overlap] -- FLAGS

The last stage, with the loss and multi-token prediction, gets fewer layers.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from arguments.mtp import num_mtp_depths
from arguments.parse import resolve_command_line
from moe_trainer.estimate.parallel_configs import layer_counts, layout_text

OVERLAP_CHUNK_COUNTS = (4, 3, 2)  # overlapped expert communication needs several chunks per rank


def make_layout(num_layers: int, mtp_depths: int, pp: int, vpp: int | None, overlap: bool) -> str | None:
    """Return the layout string; None if an even split is possible."""
    if vpp is None:
        vpp = next((chunks for chunks in OVERLAP_CHUNK_COUNTS if pp * chunks <= num_layers + 1), 1) if overlap else 1
        if not overlap and num_layers % pp == 0:
            return None
    elif num_layers % (pp * vpp) == 0:
        return None
    return layout_text(layer_counts(num_layers, pp * vpp, 1.0 + mtp_depths), mtp_depths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages")
    parser.add_argument("--vpp", type=int, help="chunks per stage")
    parser.add_argument("--overlap", action="store_true", help="expert communication will be overlapped")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of pretrain_moe.py")
    options = parser.parse_args()
    # Errors in the flags are ignored: the launcher validates the full command line next. A missing layout would only
    # add a second error to its report.
    model, _ = resolve_command_line(options.flags, None)
    if not model.num_layers:
        return
    layout = make_layout(model.num_layers, num_mtp_depths(model.values), options.pp, options.vpp, options.overlap)
    if layout is not None:
        print(layout)


if __name__ == "__main__":
    main()
