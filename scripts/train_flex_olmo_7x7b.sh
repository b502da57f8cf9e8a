#!/usr/bin/env bash
# FlexOlmo-7x7B on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} TP=${TP:-8} PP=${PP:-4} EP=${EP:-1} MODEL=flex_olmo_7x7b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
