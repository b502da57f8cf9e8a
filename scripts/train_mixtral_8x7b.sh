#!/usr/bin/env bash
# Mixtral 8x7B on 64 GPUs, the mapping of the Megatron MoE model zoo. What is set already wins; the variables stand in launch_flags.sh.
NNODES=${NNODES:-8} PP=${PP:-4} VPP=${VPP:-8} EP=${EP:-8} MODEL=mixtral_8x7b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
