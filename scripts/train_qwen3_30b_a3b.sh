#!/usr/bin/env bash
# Qwen3-30B-A3B on 32 GPUs, the mapping of the Megatron MoE model zoo. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=qwen3_30b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
