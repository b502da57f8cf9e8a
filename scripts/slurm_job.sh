# shellcheck shell=bash
# What a job of sbatch_train.sh does; sourced by the job file, which has set FLAGS, EXPORTS, SRUN_OPTIONS (arrays), ROOT, PYTHON,
# PROGRAM, LOGS, REQUEUE, MAX_REQUEUES, MAX_STALLED, MODULES and SETUP.
#
# Outcomes                                           exit code   and then
#   the run is done                                  0           what is left of an array is cancelled
#   a signal or the clock, checkpoint saved          75          requeued; in an array the next task resumes
#   a signal before the ranks listened               138, 143    as 75: nothing but a start is lost
#   scancel                                          75          saved (SLURM allows KillWait seconds for it), not requeued
#   a wrong result that came again (--rerun-mode)    16          ended; the log explains how to resume on other nodes, which shows
#                                                                whether a machine is to blame
#   a rank failed or was killed, flags are wrong     the rank's  ended; the rank's last words are shown
#   a node is lost                                   -           SLURM requeues the job itself (--requeue) when it misses the node;
#                                                                until then srun waits for the lost ranks, whatever the others say
#   MAX_STALLED attempts running without a newer     1           ended: starting again would never end
#     checkpoint, whatever ended them

# shellcheck source=scripts/launch_flags.sh
. "$ROOT/scripts/launch_flags.sh"
attempt=${SLURM_RESTART_COUNT:-0}
logs=${LOGS:?}/${SLURM_JOB_ID:?}-$attempt
mkdir -p "$logs"
ln -sfn "$logs" "$LOGS/latest"

# The newest checkpoint when the attempts of this job, or the tasks of its array, began: a line each.
starts=$LOGS/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}.starts
[ "$attempt" != 0 ] || [ "${SLURM_ARRAY_TASK_ID:-1}" != 1 ] || rm -f "$starts"

newest_checkpoint() {
    local index folder=
    for index in "${!FLAGS[@]}"; do
        case ${FLAGS[index]} in
            --save) folder=${FLAGS[index + 1]} ;;
            --save=*) folder=${FLAGS[index]#--save=} ;;
        esac
    done
    local newest # the file's line need not end
    newest=$(cat "$folder/latest_checkpointed_iteration.txt" 2>/dev/null) || newest=none
    echo "$newest"
}

# Is the newest checkpoint still the one that the first of the last MAX_STALLED attempts found?
stalled() {
    [ "$MAX_STALLED" -gt 0 ] && [ -f "$starts" ] && [ "$(wc -l <"$starts")" -ge "$MAX_STALLED" ] &&
        [ "$(tail -n "$MAX_STALLED" "$starts" | head -n 1)" = "$(newest_checkpoint)" ]
}

report() {
    echo "$(date '+%F %T') job $SLURM_JOB_ID, attempt $attempt: $*"
}

cancel_the_rest() {
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" || true
}

end_stalled() {
    echo "error: $MAX_STALLED attempts running have left no newer checkpoint (newest iteration: $(newest_checkpoint)): not started again." \
        "A smaller --save-interval, or a larger SIGNAL_SECONDS where a save takes longer, makes attempts count; MAX_STALLED=0 lifts the limit." \
        "The logs are $LOGS/$SLURM_JOB_ID-*"
    cancel_the_rest
    exit 1
}

start_again() {
    if stalled; then
        end_stalled
    elif [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        echo "not requeued: the array's next task resumes"
    elif [ "$REQUEUE" = 0 ]; then
        echo "not requeued (REQUEUE=0): submitting the same command resumes"
    elif [ "$attempt" -ge "$MAX_REQUEUES" ]; then
        echo "requeued $attempt times already (MAX_REQUEUES=$MAX_REQUEUES): not again; submitting the same command resumes"
    else
        echo "requeued: attempt $((attempt + 1)) starts when nodes are free, and not within SLURM's pause of about two minutes." \
            "(Lines of slurmstepd on a cancelled step or job belong to that; nothing is wrong.)"
        # SLURM ends this shell; bash need not report that
        if scontrol requeue "$SLURM_JOB_ID"; then { sleep 60; } 2>/dev/null; else echo "error: SLURM did not requeue it; submitting the same command resumes"; fi
    fi
}

# Copy a rank's log to this job's, but for the list of arguments, until srun has ended. What ends the ranks must not end this first.
follow() {
    trap '' TERM USR1
    # (exec: no shell that would report a killed child)
    exec sed -u '/^-* arguments -*$/,/^-* end of arguments -*$/d' < <(exec tail -q -F -n +1 -s 0.5 --pid="$step" "$1" 2>/dev/null)
}

if stalled; then end_stalled; fi
newest_checkpoint >>"$starts"

if [ -n "$MODULES" ]; then
    # shellcheck disable=SC2086 # several modules
    module load $MODULES
fi
[ -z "$SETUP" ] || eval "$SETUP"
export "${EXPORTS[@]}"
export RANKS_PER_NODE=${RANKS_PER_NODE:?}
print_environment >"$logs/environment.txt"

# env: in a container the image's own values would win over exported ones.
command=(env "${EXPORTS[@]}" bash "$ROOT/scripts/rank.sh" "$PYTHON" -u "$PROGRAM" "${FLAGS[@]}")
ranks=$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))
report "$ranks ranks on $SLURM_JOB_NODELIST, newest checkpoint: $(newest_checkpoint)"
echo "logs of all ranks: $logs/rank-*.log; rank 0 and the last one, which logs the iterations, also below"
printf 'command:'
printf ' %q' "${command[@]}"
printf '\n'

# No kill on the first bad exit: ranks that leave with 75 do not leave in one instant. The program ends the other ranks of one that
# failed; those that cannot see it are ended by --wait. The counts are those of this attempt: scontrol may have changed them.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$ranks" \
    --kill-on-bad-exit=0 --wait=60 --output="$logs/rank-%t.log" ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"} "${command[@]}" 2> >(
        trap '' TERM USR1 # what is an error to srun is none here: the code of a rank that has saved
        exec sed -u '/Exited with exit code 75$/d' >&2
    ) &
step=$!
follow "$logs/rank-0.log" &
followers=("$!")
if [ "$ranks" -gt 1 ]; then
    follow "$logs/rank-$((ranks - 1)).log" &
    followers+=("$!")
fi
# SLURM signals the ranks itself; this shell only has to outlive them. (With --signal=B: or scancel --batch it is this shell that hears.)
trap 'kill -USR1 "$step" 2>/dev/null || true' USR1
trap : TERM
code=0
while :; do
    wait "$step" && code=0 || code=$?
    kill -0 "$step" 2>/dev/null || break
done
for follower in "${followers[@]}"; do
    while kill -0 "$follower" 2>/dev/null; do wait "$follower" || true; done
done 2>/dev/null

# RUNNING: the ranks have left by themselves. COMPLETING: SLURM is ending the job, because of scancel (which must be final) or of its
# time limit; a preempted job that is to run again SLURM requeues itself.
state=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\) Reason=\([A-Za-z]*\).*/\1 \2/p')
case $code in
    0)
        report "done (exit code 0), newest checkpoint: $(newest_checkpoint)"
        cancel_the_rest
        ;;
    75 | 138 | 143)
        if [ "$code" = 75 ]; then
            report "interrupted, and saved (exit code 75), newest checkpoint: $(newest_checkpoint)"
        else
            report "interrupted before the ranks could save (exit code $code), newest checkpoint: $(newest_checkpoint)"
        fi
        if [ "${state% *}" != RUNNING ] && [ "${state#* }" != TimeLimit ]; then
            echo "ended by SLURM: after a preemption or a node failure it starts the job again itself, after scancel it does not; submitting the same command resumes"
        else
            start_again
        fi
        ;;
    *)
        report "failed (exit code $code)"
        echo "the last words of the ranks that said why:"
        grep -lE '^pretrain_moe.py: |Error|error: ' "$logs"/rank-*.log | head -n 4 | while read -r log; do
            echo "--- $log"
            tail -n 20 "$log"
        done
        ;;
esac
if [ "$code" = 16 ]; then
    echo "a result was rejected twice on $SLURM_JOB_NODELIST. The same command on other nodes settles whether a machine is to blame:" \
        "SBATCH_OPTIONS+=(--exclude=$SLURM_JOB_NODELIST) in the cluster file"
fi
exit "$code"
