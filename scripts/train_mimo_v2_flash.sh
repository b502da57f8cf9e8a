#!/usr/bin/env bash
# MiMo-V2-Flash on 256 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-32} TP=${TP:-4} PP=${PP:-4} EP=${EP:-32} MODEL=mimo_v2_flash exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
