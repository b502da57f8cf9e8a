#!/usr/bin/env bash
# Hunyuan-A13B on 64 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} TP=${TP:-2} PP=${PP:-2} EP=${EP:-16} MODEL=hunyuan_a13b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
