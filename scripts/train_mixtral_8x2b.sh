#!/usr/bin/env bash
# Mixtral-8x2B on 64 GPUs, the mapping of the Megatron MoE model zoo. What is set already wins; the variables stand in launch_flags.sh.
NNODES=${NNODES:-8} EP=${EP:-8} MODEL=mixtral_8x2b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
