#!/usr/bin/env bash
# DeepSeekMoE-16B on 32 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-4} EP=${EP:-8} MODEL=deepseek_moe_16b exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
