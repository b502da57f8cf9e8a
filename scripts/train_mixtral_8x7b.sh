#!/usr/bin/env bash
# Mixtral 8x7B on 64 GPUs, the mapping of the Megatron MoE model zoo. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} PP=${PP:-4} VPP=${VPP:-8} EP=${EP:-8} MODEL=mixtral_8x7b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
