#!/usr/bin/env bash
# Qwen3-235B-A22B on 256 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-32} TP=${TP:-2} PP=${PP:-8} EP=${EP:-32} MODEL=qwen3_235b_a22b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
