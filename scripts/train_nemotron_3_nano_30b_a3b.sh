#!/usr/bin/env bash
# Nemotron-3-Nano-30B-A3B on 64 GPUs, the mapping of its pretraining. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} TP=${TP:-2} EP=${EP:-32} MODEL=nemotron_3_nano_30b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
