#!/usr/bin/env bash
# gpt-oss-20b on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=gpt_oss_20b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
