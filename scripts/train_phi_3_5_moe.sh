#!/usr/bin/env bash
# Phi-3.5-MoE on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=phi_3_5_moe exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
