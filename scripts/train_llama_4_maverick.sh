#!/usr/bin/env bash
# Llama 4 Maverick on 256 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-32} TP=${TP:-4} PP=${PP:-4} EP=${EP:-64} MODEL=llama_4_maverick exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
