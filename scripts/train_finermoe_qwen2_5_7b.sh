#!/usr/bin/env bash
# FineRMoE 32-2-1-2 on Qwen2.5-7B on 64 GPUs, MoE layers recomputed as by its authors. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} EP=${EP:-8} RECOMPUTE=${RECOMPUTE:-moe} MODEL=finermoe_qwen2_5_7b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
