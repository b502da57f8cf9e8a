#!/usr/bin/env bash
# Qwen3-235B with 262,144 tokens on 256 GPUs in bf16; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-32} SEQ_LEN=${SEQ_LEN:-262144} TP=${TP:-8} CP=${CP:-16} PP=${PP:-1} EP=${EP:-64} GBS=${GBS:-32} PR=${PR:-bf16} DISPATCHER=${DISPATCHER:-deepep} A2A_OVERLAP=${A2A_OVERLAP:-1} OPTIMIZER_OFFLOAD=${OPTIMIZER_OFFLOAD:-1} MODEL=qwen3_235b_a22b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
