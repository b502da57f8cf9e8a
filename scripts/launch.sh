#!/usr/bin/env bash
# Train with torchrun on this node, or on several nodes: `moe-trainer launch` from a checkout (moe_trainer/launch/launch.sh).
exec bash "$(dirname "${BASH_SOURCE[0]}")/../moe_trainer/launch/launch.sh" "$@"
