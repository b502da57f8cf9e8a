#!/usr/bin/env bash
# DeepSeek-V2-Lite on 8 GPUs, the mapping of the Megatron MoE model zoo. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-1} EP=${EP:-8} MODEL=deepseek_v2_lite exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
