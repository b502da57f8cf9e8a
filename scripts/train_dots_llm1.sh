#!/usr/bin/env bash
# dots.llm1 on 128 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-16} TP=${TP:-2} PP=${PP:-2} EP=${EP:-32} MODEL=dots_llm1 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
