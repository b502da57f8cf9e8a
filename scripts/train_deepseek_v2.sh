#!/usr/bin/env bash
# DeepSeek-V2 on 256 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-32} PP=${PP:-8} EP=${EP:-32} RECOMPUTE=${RECOMPUTE:-mla_up_proj layernorm mlp moe_act} MODEL=deepseek_v2 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
