#!/usr/bin/env bash
# GLM-5's sparse stage on 512 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-64} TP=${TP:-8} PP=${PP:-8} EP=${EP:-32} RECOMPUTE=${RECOMPUTE:-full} MODEL=glm_5 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
