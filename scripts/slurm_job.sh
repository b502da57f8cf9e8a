# shellcheck shell=bash
# What a job of sbatch_train.sh does; sourced by the job file, which has set FLAGS, EXPORTS, SRUN_OPTIONS (arrays), ROOT, PYTHON,
# LOGS, REQUEUE, MAX_REQUEUES, MODULES and SETUP.
#
# Outcomes                                           exit code   and then
#   the run is done                                  0           what is left of an array is cancelled
#   a signal or the clock, checkpoint saved          75          requeued; in an array the next task goes on
#   a signal before the ranks listened               138, 143    as 75: nothing but a start is lost
#   scancel                                          75          saved (SLURM allows KillWait seconds for it), not requeued
#   a rank failed or was killed, flags are wrong     the rank's  ended; the rank's last words are shown
#   a node is lost                                   -           SLURM requeues the job itself (--requeue)

attempt=${SLURM_RESTART_COUNT:-0}
logs=${LOGS:?}/${SLURM_JOB_ID:?}-$attempt
mkdir -p "$logs"
ln -sfn "$logs" "$LOGS/latest"

if [ -n "$MODULES" ]; then
    # shellcheck disable=SC2086 # several modules
    module load $MODULES
fi
[ -z "$SETUP" ] || eval "$SETUP"
export "${EXPORTS[@]}"
export RANKS_PER_NODE=${RANKS_PER_NODE:?}
# One run on Weights & Biases, however often the job starts.
export WANDB_RUN_ID=${WANDB_RUN_ID:-$(printf %s "$LOGS" | cksum | cut -d' ' -f1)} WANDB_RESUME=${WANDB_RESUME:-allow}
env | sort | grep -vE '(KEY|TOKEN|SECRET|PASSWORD)[A-Za-z_]*=' >"$logs/environment.txt"

command=(bash "$ROOT/scripts/rank.sh" "$PYTHON" -u "$ROOT/pretrain_moe.py" "${FLAGS[@]}")
echo "job $SLURM_JOB_ID, attempt $attempt, nodes $SLURM_JOB_NODELIST, logs of the ranks in $logs"
printf 'command:'
printf ' %q' "${command[@]}"
printf '\n'

# No kill on the first bad exit: ranks that leave with 75 do not leave in one instant. The program ends the other ranks of one that
# failed; those that cannot see it are ended by --wait.
srun --kill-on-bad-exit=0 --wait=60 --output="$logs/rank-%t.log" ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"} "${command[@]}" &
step=$!
# SLURM signals the ranks itself; this shell only has to outlive them. (With --signal=B: or scancel --batch it is this shell that hears.)
trap 'kill -USR1 "$step" 2>/dev/null || true' USR1
trap : TERM
code=0
while :; do
    wait "$step" && code=0 || code=$?
    kill -0 "$step" 2>/dev/null || break
done

# RUNNING: the ranks have left by themselves. COMPLETING: SLURM is ending the job, because of scancel (which must be final) or of its
# time limit; a preempted job that is to run again SLURM requeues itself.
state=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\) Reason=\([A-Za-z]*\).*/\1 \2/p')
echo "attempt $attempt: exit code $code, job ${state% *}"
case $code in
    0)
        [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" || true
        ;;
    75 | 138 | 143)
        if [ "${state% *}" != RUNNING ] && [ "${state#* }" != TimeLimit ]; then
            echo "ended by SLURM, which after a node failure or a preemption starts the job again itself; submitting the same command goes on too"
        elif [ -n "${SLURM_ARRAY_JOB_ID:-}" ] || [ "$REQUEUE" = 0 ]; then
            echo "not requeued (an array's next task, or the next submission, goes on)"
        elif [ "$attempt" -ge "$MAX_REQUEUES" ]; then
            echo "requeued $attempt times already (MAX_REQUEUES=$MAX_REQUEUES): not again"
        elif scontrol requeue "$SLURM_JOB_ID"; then
            echo "requeued"
            sleep 60 # SLURM ends this shell
        fi
        ;;
    *)
        echo "the last words of the ranks that said why:"
        grep -lE '^pretrain_moe.py: |Error|error: ' "$logs"/rank-*.log | head -n 4 | while read -r log; do
            echo "--- $log"
            tail -n 20 "$log"
        done
        ;;
esac
exit "$code"
