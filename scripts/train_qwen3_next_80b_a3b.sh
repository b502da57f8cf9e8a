#!/usr/bin/env bash
# Qwen3-Next-80B-A3B on 64 GPUs. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} PP=${PP:-2} EP=${EP:-32} MODEL=qwen3_next_80b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
