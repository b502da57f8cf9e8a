"""`--auto-resume`: the same command line starts a run and, after whatever ended it, goes on with it.

Found before anything is built, since the padding of the vocabulary follows the checkpoint too. What is found is put where
--load and its companions stand, so that there is one way to load. Without a checkpoint of its own the run starts as its
flags say, --load BASE --finetune included; with one, those have had their effect in the first start and are left out.
"""

import logging
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from arguments import Arguments
from moe_trainer.checkpoint.find import newest_whole
from moe_trainer.errors import user_input
from moe_trainer.parallel.state import ParallelState
from moe_trainer.run import as_rank_0_sees_it

logger = logging.getLogger(__name__)


def find_own_checkpoint(args: Arguments, ps: ParallelState) -> Arguments:
    """The flags of a start, or of going on from the newest whole checkpoint under --save. Collective with --auto-resume.

    Raises: InputError when --save cannot be looked at.
    """
    output = args.output
    if not output.auto_resume:
        return args
    with user_input(f"--auto-resume: --save {output.save}"):
        newest = as_rank_0_sees_it(lambda: newest_whole(Path(output.save), output.verify_integrity), ps)
    if newest is None:
        logger.info("--auto-resume: no complete checkpoint in %s; the run starts as its other flags say", output.save)
        return args
    logger.info("--auto-resume: going on from iteration %d in %s", newest, output.save)
    resumed = replace(
        output, load=output.save, ckpt_step=newest, finetune=False, pretrained_checkpoint=None, load_main_params_from_ckpt=False,
        # all that this run has saved, whatever was taken of what it started from
        no_load_optim=output.no_save_optim, no_load_rng=output.no_save_rng,
    )
    source = {**args.source, **dict.fromkeys(("load", "ckpt_step"), "derived")}
    return replace(args, output=resumed, source=MappingProxyType(source))
