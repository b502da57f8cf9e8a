"""Pretrain a Mixture-of-Experts language model: `python pretrain_moe.py FLAGS`, with Megatron-LM's flags."""

import sys

from moe_trainer.early_signals import prepare_process


def main() -> None:
    """Run one process of a training job, and end it."""
    prepare_process(sys.argv)
    # imported after the signals are blocked, because imports take time
    from moe_trainer.commands.train_process import leave, run_command

    leave(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
