#!/usr/bin/env bash
# Ling-3.0-flash on 128 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-16} TP=${TP:-2} ETP=${ETP:-1} EP=${EP:-64} MODEL=ling_3_0_flash exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
