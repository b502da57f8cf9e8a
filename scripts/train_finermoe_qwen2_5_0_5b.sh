#!/usr/bin/env bash
# FineRMoE 32-2-1-2 on Qwen2.5-0.5B on 8 GPUs. What is set already wins; the variables stand in launch_flags.sh.
NNODES=${NNODES:-1} EP=${EP:-8} MODEL=finermoe_qwen2_5_0_5b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
