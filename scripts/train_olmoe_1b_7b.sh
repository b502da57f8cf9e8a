#!/usr/bin/env bash
# OLMoE-1B-7B on 16 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-2} EP=${EP:-8} MODEL=olmoe_1b_7b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
