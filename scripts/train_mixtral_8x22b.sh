#!/usr/bin/env bash
# Mixtral 8x22B on 128 GPUs, the mapping of the Megatron MoE model zoo. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-16} TP=${TP:-2} PP=${PP:-8} VPP=${VPP:-7} EP=${EP:-8} MODEL=mixtral_8x22b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
