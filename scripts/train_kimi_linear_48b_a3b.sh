#!/usr/bin/env bash
# Kimi-Linear-48B on 64 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} EP=${EP:-32} MODEL=kimi_linear_48b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
