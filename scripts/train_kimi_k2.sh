#!/usr/bin/env bash
# Kimi-K2 on 1,024 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-128} PP=${PP:-16} EP=${EP:-64} GBS=${GBS:-8192} RECOMPUTE=${RECOMPUTE:-full} PR=${PR:-fp8} MODEL=kimi_k2 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" "$@"
