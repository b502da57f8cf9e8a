#!/usr/bin/env bash
# DeepSeek-V3 in fp8 on 1,024 GPUs, the mapping of its published H100 run. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-128} TP=${TP:-2} PP=${PP:-8} EP=${EP:-64} PR=${PR:-fp8} DISPATCHER=${DISPATCHER:-deepep} A2A_OVERLAP=${A2A_OVERLAP:-1} RECOMPUTE=${RECOMPUTE:-mla_up_proj layernorm mlp moe_act} MODEL=deepseek_v3 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
