#!/usr/bin/env bash
# Qwen3.5-35B-A3B on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-16} MODEL=qwen3_5_35b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
