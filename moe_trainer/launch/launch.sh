#!/usr/bin/env bash
# Train with torchrun on this node, or on several nodes where this script is started once on each.
#
#   MODEL=mixtral_tiny EP=2 GPUS_PER_NODE=2 bash scripts/launch.sh --train-iters 100
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 MODEL=Mixtral-8x7B PP=2 EP=8 bash scripts/launch.sh     and NODE_RANK=1 on the other
#   DRY_RUN=1 ...    print the command, validate and plan it; start nothing (exit code 2: wrong flags, 3: does not fit)
#
# launch_flags.sh describes the other variables. SIGTERM and SIGUSR1 reach the ranks, which save; this script then exits with
# code 75, and the same command resumes from there. OUTPUT_PATH/logs contains a log per rank and the environment.
set -euo pipefail
# shellcheck source=moe_trainer/launch/launch_flags.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch_flags.sh"

print_help_if_asked "$@"
read_variables
flags_of_run "$@"
nodes=${NNODES:-1}
gpus=${GPUS_PER_NODE:-8}
python=$(find_run_python)
command -v "$python" >/dev/null || fail "PYTHON=$python: there is no such program"
rendezvous=(--standalone)
if [ "$nodes" -gt 1 ]; then
    if [ "${DRY_RUN:-0}" = 1 ]; then
        NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-node0}
    elif [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; then
        whose=${DEFAULTS[NNODES]:+", the launch value in ${SECTION_FILE##*/},"}
        fail "NNODES=$nodes$whose needs NODE_RANK and MASTER_ADDR on every node; NNODES=1 trains on this one"
    fi
    [[ $NODE_RANK =~ ^[0-9]{1,9}$ ]] && [ "$NODE_RANK" -lt "$nodes" ] || # else the nodes would wait for another
        fail "NODE_RANK=$NODE_RANK: a number from 0 to $((nodes - 1)) is needed, since there are NNODES=$nodes nodes"
    rendezvous=(--nnodes "$nodes" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
fi
logs=$OUTPUT_PATH/logs/node${NODE_RANK:-0}
# The console shows the first rank and the last one, which logs the iterations; every rank has its log files.
tee=0:3
[ "$gpus" = 1 ] || tee=0:3,$((gpus - 1)):3
command=("$python" "$LAUNCH/torchrun.py" "${rendezvous[@]}" --nproc-per-node "$gpus" --log-dir "$logs" --redirects 3 --tee "$tee"
    --no-python bash "$LAUNCH/rank.sh" "$python" -u "$PROGRAM" "${FLAGS[@]}")

printf 'environment:'
[ "${#EXPORTS[@]}" = 0 ] || printf ' %q' "${EXPORTS[@]}"
printf '\ncommand:'
printf ' %q' "${command[@]}"
printf '\n'
check_flags $((nodes * gpus))
[ "${DRY_RUN:-0}" != 1 ] || exit 0

mkdir -p "$logs" || fail "OUTPUT_PATH=$OUTPUT_PATH: the folder of the logs cannot be made"
[ "${#EXPORTS[@]}" = 0 ] || export "${EXPORTS[@]}" # without names it would print all
# shellcheck disable=SC2016 # torchrun's variable
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '
print_environment >"$logs/environment.txt"
"${command[@]}" &
torchrun=$!
# Signal the ranks, not torchrun, which would give them 30 seconds and then kill them during a save.
# Without ranks (or pkill) nothing can be saved, and torchrun is terminated.
trap 'pkill -USR1 -P "$torchrun" || kill -TERM "$torchrun"' USR1 TERM
trap 'kill -INT "$torchrun"' INT
code=0
while :; do
    wait "$torchrun" && code=0 || code=$?
    kill -0 "$torchrun" 2>/dev/null || break # else a trap ended the wait
done
[ "$code" != 75 ] || echo "saved; the same command resumes from there (exit code 75)"
exit "$code"
