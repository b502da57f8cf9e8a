#!/usr/bin/env bash
# Mixtral 8x22B on 128 GPUs, the mapping of the Megatron MoE model zoo. What is set already wins; the variables stand in launch_flags.sh.
NNODES=${NNODES:-16} TP=${TP:-2} PP=${PP:-8} VPP=${VPP:-7} EP=${EP:-8} MODEL=mixtral_8x22b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
