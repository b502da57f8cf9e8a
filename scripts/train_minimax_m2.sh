#!/usr/bin/env bash
# MiniMax-M2 on 128 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-16} TP=${TP:-2} PP=${PP:-2} EP=${EP:-32} MODEL=minimax_m2 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
