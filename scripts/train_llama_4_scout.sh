#!/usr/bin/env bash
# Llama 4 Scout on 128 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-16} TP=${TP:-4} PP=${PP:-4} EP=${EP:-16} MODEL=llama_4_scout exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
