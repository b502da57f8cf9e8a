#!/usr/bin/env bash
# DeepSeek-V3 with 262,144 tokens on 256 GPUs in bf16; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-32} SEQ_LEN=${SEQ_LEN:-262144} TP=${TP:-4} CP=${CP:-8} PP=${PP:-8} EP=${EP:-16} GBS=${GBS:-128} PR=${PR:-bf16} DISPATCHER=${DISPATCHER:-deepep} OPTIMIZER_OFFLOAD=${OPTIMIZER_OFFLOAD:-1} RECOMPUTE=${RECOMPUTE:-mla_up_proj layernorm mlp moe} MODEL=deepseek_v3 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" --mlp-chunks-for-training 4 "$@"
