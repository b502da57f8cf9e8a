#!/usr/bin/env bash
# Trinity-Mini on 16 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-2} EP=${EP:-16} MODEL=trinity_mini exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
