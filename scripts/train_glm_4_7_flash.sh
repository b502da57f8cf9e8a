#!/usr/bin/env bash
# GLM-4.7-Flash on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=glm_4_7_flash exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
