#!/usr/bin/env bash
# deepseek_v4_tiny on two ranks of this machine, GPUs or cores. Variables of the environment win; launch_flags.sh describes them.
GPUS_PER_NODE=${GPUS_PER_NODE:-2} EP=${EP:-2} MODEL=deepseek_v4_tiny exec bash "$(dirname "$0")/${LAUNCHER:-launch.sh}" "$@"
