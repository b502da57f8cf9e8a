#!/usr/bin/env bash
# DeepSeek-V3.2's sparse stage on 2,048 GPUs; the mapping is ours. Variables of the environment win; launch_flags.sh describes them.
NNODES=${NNODES:-256} TP=${TP:-8} PP=${PP:-8} EP=${EP:-32} CP=${CP:-4} RECOMPUTE=${RECOMPUTE:-full} MODEL=deepseek_v3_2 exec bash "$(dirname "$0")/${LAUNCHER:-sbatch_train.sh}" --cp-comm-type allgather "$@"
