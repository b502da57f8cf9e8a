#!/usr/bin/env bash
# Qwen2-57B-A14B on 64 GPUs, the mapping of the Megatron MoE model zoo. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} TP=${TP:-2} PP=${PP:-4} VPP=${VPP:-7} EP=${EP:-4} MODEL=qwen2_57b_a14b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
