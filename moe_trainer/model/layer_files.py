"""The files with settings of single layers, for checks before a run."""

from collections.abc import Callable, Iterator
from functools import partial

from arguments import Arguments
from arguments.mechanisms.formats import quantized_format


def layer_files(args: Arguments) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the flag of every such file, and a function that reads it as the model's construction does."""
    parallel, precision = args.parallel, args.precision
    if parallel.tp_comm_overlap and parallel.tp_comm_overlap_cfg is not None:
        from moe_trainer.layers.tp_overlap import TpOverlap

        yield "--tp-comm-overlap-cfg", partial(TpOverlap.from_args, parallel)
    path = precision.te_precision_config_file
    if path is not None and quantized_format(precision):
        from moe_trainer.quantization.config import get_recipe
        from moe_trainer.quantization.precision_file import PrecisionFile

        def load() -> None:
            recipe = get_recipe(precision)
            if recipe is not None:
                PrecisionFile.load(path, recipe)

        yield "--te-precision-config-file", load
