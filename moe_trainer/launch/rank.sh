#!/usr/bin/env bash
# Bind one rank, started by srun or torchrun, to its part of the node, then exec COMMAND, so that signals reach it.
#
#   bash rank.sh COMMAND...      BIND=none: no binding     BINDPCIE_PATH=FILE: this program binds instead
#                                SYSFS=FOLDER: instead of /sys
set -euo pipefail
sysfs=${SYSFS:-/sys}
local_rank=${LOCAL_RANK:-${SLURM_LOCALID:-0}}
ranks=${LOCAL_WORLD_SIZE:-${RANKS_PER_NODE:-1}}

# Print the NUMA node of this rank's GPU; without a GPU, distribute the ranks evenly over the NUMA nodes.
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

# The node is known only here: replace $SLURM_NODEID in variables and arguments.
node=${SLURM_NODEID:-${GROUP_RANK:-0}}
# shellcheck disable=SC2016 # the name, not its value
on_node() {
    local text=${1//'${SLURM_NODEID}'/$node}
    printf '%s' "${text//'$SLURM_NODEID'/$node}"
}
while read -r name; do
    case ${!name} in *SLURM_NODEID*) export "$name=$(on_node "${!name}")" ;; esac
done < <(compgen -e)
arguments=()
for argument; do
    case $argument in *SLURM_NODEID*) argument=$(on_node "$argument") ;; esac
    arguments+=("$argument")
done
# Compiled kernels are cached on the node: in a home directory on the network all ranks would write one cache.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/triton_cache_$(id -u)_$node}

# With NSYS_OUTPUT (set by PROFILE=nsys) the ranks of --profile-ranks run under nsys.
profiler=()
if [ -n "${NSYS_OUTPUT:-}" ]; then
    rank=${RANK:-${SLURM_PROCID:-0}} listed=0
    for argument in "${arguments[@]}"; do
        case $argument in
            --profile-ranks) listed=1 profiler=() ;;
            --*) listed=0 ;;
            "$rank") [ "$listed" = 0 ] || profiler=(nsys) ;;
        esac
    done
    if [ "${#profiler[@]}" != 0 ]; then
        command -v nsys >/dev/null || { echo "error: PROFILE=nsys: there is no nsys on $(hostname); PROFILE=torch needs none" >&2 && exit 2; }
        mkdir -p "$(dirname "$NSYS_OUTPUT")"
        # shellcheck disable=SC2054 # one option
        profiler=(nsys profile --sample=none --cpuctxsw=none --trace=cuda,nvtx --capture-range=cudaProfilerApi --capture-range-end=stop
            --cuda-graph-trace=node --force-overwrite=true --export=sqlite --output="$NSYS_OUTPUT-rank$rank")
    fi
fi

cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores / ranks > 8 ? 8 : cores / ranks > 0 ? cores / ranks : 1))}
bind=()
if [ -n "${BINDPCIE_PATH:-}" ]; then
    bind=("$BINDPCIE_PATH")
elif [ "${BIND:-auto}" != none ] && command -v numactl >/dev/null && node=$(numa_node); then
    bind=(numactl --cpunodebind="$node" --membind="$node")
    # binding fails if the NUMA node is not allocated to this job
    "${bind[@]}" true 2>/dev/null || bind=()
fi
echo "rank ${RANK:-${SLURM_PROCID:-0}} on $(hostname), local rank $local_rank: ${bind[*]:-no binding}, OMP_NUM_THREADS=$OMP_NUM_THREADS" >&2
exec ${profiler[@]+"${profiler[@]}"} ${bind[@]+"${bind[@]}"} "${arguments[@]}"
