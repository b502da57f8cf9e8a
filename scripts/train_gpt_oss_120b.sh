#!/usr/bin/env bash
# gpt-oss-120b on 128 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-16} PP=${PP:-4} EP=${EP:-8} MODEL=gpt_oss_120b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
