#!/usr/bin/env bash
# DeepSeek-V3-Proxy on 64 GPUs, the mapping of the Megatron MoE model zoo. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-8} PP=${PP:-4} EP=${EP:-16} MODEL=deepseek_v3_proxy exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
