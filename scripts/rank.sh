#!/usr/bin/env bash
# One rank, started by srun or torchrun: bind it to its part of the node, then become COMMAND (exec: signals must reach it).
#
#   bash rank.sh COMMAND...      BIND=none: no binding     BINDPCIE_PATH=FILE: leave the binding to this program
#                                SYSFS=FOLDER: another place than /sys
set -euo pipefail
sysfs=${SYSFS:-/sys}
local_rank=${LOCAL_RANK:-${SLURM_LOCALID:-0}}
ranks=${LOCAL_WORLD_SIZE:-${RANKS_PER_NODE:-1}}

# The NUMA node of this rank's GPU; without one, an equal share of the NUMA nodes.
numa_node() {
    local count bus node=-1
    count=$(find "$sysfs/devices/system/node" -maxdepth 1 -name 'node[0-9]*' 2>/dev/null | wc -l)
    [ "$count" -gt 1 ] || return 1
    if command -v nvidia-smi >/dev/null &&
        bus=$(nvidia-smi --id="$local_rank" --query-gpu=pci.bus_id --format=csv,noheader 2>/dev/null); then
        bus=${bus,,}
        node=$(cat "$sysfs/bus/pci/devices/${bus#0000}/numa_node" 2>/dev/null) || node=-1
    fi
    [ "$node" -ge 0 ] || node=$((local_rank * count / ranks))
    echo "$node"
}

cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / ranks > 8 ? 8 : cores / ranks > 0 ? cores / ranks : 1))}
bind=()
if [ -n "${BINDPCIE_PATH:-}" ]; then
    bind=("$BINDPCIE_PATH")
elif [ "${BIND:-auto}" != none ] && command -v numactl >/dev/null && node=$(numa_node); then
    bind=(numactl --cpunodebind="$node" --membind="$node")
    # a node outside this job's share of the machine cannot be bound to
    "${bind[@]}" true 2>/dev/null || bind=()
fi
echo "rank ${RANK:-${SLURM_PROCID:-0}} on $(hostname), local rank $local_rank: ${bind[*]:-no binding}, OMP_NUM_THREADS=$OMP_NUM_THREADS" >&2
exec ${bind[@]+"${bind[@]}"} "$@"
