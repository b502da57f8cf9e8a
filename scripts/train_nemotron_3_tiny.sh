#!/usr/bin/env bash
# nemotron_3_tiny on two ranks of this machine, GPUs or cores. Variables of the environment win; launch_flags.sh describes them.
GPUS_PER_NODE=${GPUS_PER_NODE:-2} EP=${EP:-2} MODEL=nemotron_3_tiny exec bash "$(dirname "$0")/${LAUNCHER:-launch.sh}" "$@"
