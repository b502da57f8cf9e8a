"""The files with settings of single layers, and the functions that choose their formats, for checks before a run."""

from collections.abc import Callable, Iterator
from functools import partial

from arguments import Arguments
from arguments.mechanisms.formats import quantized_format


def layer_files(args: Arguments) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the flag of every such file or function, and what reads it as the model's construction does."""
    parallel, precision = args.parallel, args.precision
    if args.training.spec:
        from moe_trainer.model.custom_layers import import_spec

        yield "--spec", partial(import_spec, args.training.spec)
    if parallel.tp_comm_overlap and parallel.tp_comm_overlap_cfg is not None:
        from moe_trainer.layers.tp_overlap import TpOverlap

        yield "--tp-comm-overlap-cfg", partial(TpOverlap.from_args, parallel)
    path, fmt = precision.te_precision_config_file, quantized_format(precision)
    if fmt is None:
        return
    from moe_trainer.quantization.config import get_recipe

    if fmt.is_custom:
        yield f"--{fmt.flags.factory.replace('_', '-')}", partial(get_recipe, precision)
    if path is not None:
        from moe_trainer.quantization.precision_file import PrecisionFile

        def load() -> None:
            recipe = get_recipe(precision)
            if recipe is not None:
                PrecisionFile.load(path, recipe)

        yield "--te-precision-config-file", load
