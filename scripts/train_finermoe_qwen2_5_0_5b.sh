#!/usr/bin/env bash
# FineRMoE 32-2-1-2 on Qwen2.5-0.5B on 8 GPUs. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-1} EP=${EP:-8} MODEL=finermoe_qwen2_5_0_5b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
