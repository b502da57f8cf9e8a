#!/usr/bin/env bash
# Granite-3.1-3B-A800M on 8 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-1} EP=${EP:-8} MODEL=granite_3_1_3b_a800m exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
