#!/usr/bin/env bash
# Mistral Small 4 on 64 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} PP=${PP:-4} EP=${EP:-16} MODEL=mistral_small_4 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
