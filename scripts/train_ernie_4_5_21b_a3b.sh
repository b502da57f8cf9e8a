#!/usr/bin/env bash
# ERNIE-4.5-21B-A3B on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=ernie_4_5_21b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
