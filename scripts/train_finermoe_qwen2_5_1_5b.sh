#!/usr/bin/env bash
# FineRMoE 32-2-1-2 on Qwen2.5-1.5B on 32 GPUs. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=finermoe_qwen2_5_1_5b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
