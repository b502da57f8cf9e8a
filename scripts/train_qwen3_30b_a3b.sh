#!/usr/bin/env bash
# Qwen3-30B-A3B on 32 GPUs, the mapping of the Megatron MoE model zoo. What is set already wins; the variables stand in launch_flags.sh.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=qwen3_30b_a3b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
