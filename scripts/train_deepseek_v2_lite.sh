#!/usr/bin/env bash
# DeepSeek-V2-Lite on 8 GPUs, the mapping of the Megatron MoE model zoo. What is set already wins; the variables stand in launch_flags.sh.
NNODES=${NNODES:-1} EP=${EP:-8} MODEL=deepseek_v2_lite exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
