#!/usr/bin/env bash
# Submit a training job to SLURM, with the variables of the Megatron MoE model zoo:
#
#   MODEL=DeepSeek-V3 TP=2 PP=8 EP=64 NNODES=128 PR=fp8 DISPATCHER=deepep A2A_OVERLAP=1 bash scripts/sbatch_train.sh --extra flags
#   DRY_RUN=1 ...     print, validate and plan the job; submit nothing (exit code 2: wrong flags, 3: does not fit)
#
#   CLUSTER=FILE      (or NAME: cluster_configs/benchmarking/NAME.conf) bash file with the settings of a cluster: ACCOUNT PARTITION
#                     RUN_TIME GPUS_PER_NODE OUTPUT_PATH CONTAINER_IMAGE CONTAINER_MOUNTS MODULES SETUP (commands) PYTHON, and the
#                     arrays SBATCH_OPTIONS SRUN_OPTIONS ENVIRONMENT; variables of the environment override them
#   RUN_TIME=4:00:00  ACCOUNT= PARTITION= COMMENT= SEGMENT= GPUS_PER_NODE=8 (GB200_CLUSTER=1: 4)
#   SIGNAL_SECONDS=120  before the time limit the run saves and is requeued (REQUEUE=0: not requeued; MAX_REQUEUES=100)
#   MAX_STALLED=2     the job ends after so many consecutive attempts without a newer checkpoint (0: never)
#   ARRAY=N           N consecutive tasks, each resuming from the one before, instead of requeueing
#   DEPENDENCY=afterok:123   is passed to sbatch unchanged
# launch_flags.sh describes the other variables, slurm_job.sh the outcomes of a job.
set -euo pipefail
# shellcheck source=moe_trainer/launch/launch_flags.sh
. "$(dirname "${BASH_SOURCE[0]}")/../moe_trainer/launch/launch_flags.sh"

print_help_if_asked "$@"
read_variables
# shellcheck disable=SC2034 # what the zoo's launcher for SLURM takes, whatever its table of models contains
ZOO_DISPATCHER=deepep
flags_of_run "$@"
nodes=${NNODES:-1}
gpus=${GPUS_PER_NODE:-8}
python=$(find_run_python)
name=moe-${RUN_NAME:-$(basename "$MODEL" .yaml)}

options=(--job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus" --time="${RUN_TIME:-4:00:00}"
    --output="$OUTPUT_PATH/logs/slurm-%j.log" --open-mode=append --requeue --signal="USR1@${SIGNAL_SECONDS:-120}")
[ "${GRES:-gpu}" = none ] || options+=(--gpus-per-node="$gpus" --exclusive)
[ -z "${ACCOUNT:-}" ] || options+=(--account="$ACCOUNT")
[ -z "${PARTITION:-}" ] || options+=(--partition="$PARTITION")
[ -z "${COMMENT:-}" ] || options+=(--comment="$COMMENT")
[ -z "${SEGMENT:-}" ] || options+=(--segment="$SEGMENT")
[ -z "${ARRAY:-}" ] || options+=(--array="1-$ARRAY%1")
[ -z "${DEPENDENCY:-}" ] || options+=(--dependency="$DEPENDENCY")
options+=(${SBATCH_OPTIONS[@]+"${SBATCH_OPTIONS[@]}"})

srun_options=()
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    [ -n "${PYTHON:-}" ] || python=python
    mounts=$ROOT:$ROOT,$OUTPUT_PATH:$OUTPUT_PATH${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    srun_options+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$ROOT" --no-container-mount-home)
fi
# shellcheck disable=SC2153 # of the cluster file
srun_options+=(${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"})

# Print an array as text that bash can read.
print_array() {
    local name=$1
    shift
    printf '%s=(' "$name"
    [ $# = 0 ] || printf ' %q' "$@"
    printf ' )\n'
}

job_file() {
    local option
    echo '#!/usr/bin/env bash'
    for option in "${options[@]}"; do
        case $option in
            *[!A-Za-z0-9_.,:/=@%+-]*) # sbatch, unlike bash, ends a word at an escaped blank
                option=${option//\\/\\\\}
                option=\"${option//\"/\\\"}\"
                ;;
        esac
        echo "#SBATCH $option"
    done
    echo "# written by scripts/sbatch_train.sh"
    echo 'set -uo pipefail'
    printf 'ROOT=%q PYTHON=%q PROGRAM=%q LOGS=%q RANKS_PER_NODE=%q\n' "$ROOT" "$python" "$PROGRAM" "$OUTPUT_PATH/logs" "$gpus"
    printf 'REQUEUE=%q MAX_REQUEUES=%q MAX_STALLED=%q\n' "${REQUEUE:-1}" "${MAX_REQUEUES:-100}" "${MAX_STALLED:-2}"
    printf 'MODULES=%q SETUP=%q\n' "${MODULES:-}" "${SETUP:-}"
    printf 'export BIND=%q BINDPCIE_PATH=%q\n' "${BIND:-auto}" "${BINDPCIE_PATH:-}"
    print_array EXPORTS "${EXPORTS[@]}"
    print_array SRUN_OPTIONS ${srun_options[@]+"${srun_options[@]}"}
    print_array FLAGS "${FLAGS[@]}"
    # shellcheck disable=SC2016 # for the job to expand
    echo '. "$ROOT/scripts/slurm_job.sh"'
}

if [ "${DRY_RUN:-0}" = 1 ]; then
    job_file
    printf '\ncommand: srun'
    printf ' %q' ${srun_options[@]+"${srun_options[@]}"} env "${EXPORTS[@]}" bash "$LAUNCH/rank.sh" "$python" -u "$PROGRAM" "${FLAGS[@]}"
    printf '\n\n'
    check_flags $((nodes * gpus))
    exit 0
fi
command -v sbatch >/dev/null || fail "there is no sbatch here: this script submits to SLURM. scripts/launch.sh trains on this machine, DRY_RUN=1 shows the job"
check_flags $((nodes * gpus))
mkdir -p "$OUTPUT_PATH/logs"
job=$(mktemp "$OUTPUT_PATH/logs/job-XXXXXX")
job_file >"$job"
id=$(sbatch --parsable "$job") || {
    rm -f "$job"
    fail "sbatch rejected the job (see its message above); DRY_RUN=1 prints the job"
}
mv "$job" "$OUTPUT_PATH/logs/job-${id%%;*}.sh"
echo "submitted job ${id%%;*}: $OUTPUT_PATH/logs/job-${id%%;*}.sh"
