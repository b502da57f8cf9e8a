# shellcheck shell=bash
# What a job of sbatch_train.sh does; sourced by the job file, which has set FLAGS, EXPORTS, SRUN_OPTIONS (arrays), ROOT, PYTHON,
# PROGRAM, LOGS, REQUEUE, MAX_REQUEUES, MAX_STALLED, MODULES and SETUP.
#
# Outcomes                                           exit code   and then
#   the run is complete                              0           the remaining tasks of an array are cancelled
#   a signal or the time limit, checkpoint saved     75          requeued; in an array the next task resumes
#   a signal before the ranks handle signals         138, 143    as 75: no iteration is lost
#   scancel                                          75          saved (SLURM allows KillWait seconds for it), not requeued
#   a result rejected twice (--rerun-mode)           16          ended; the log explains how to resume on other nodes, which shows
#                                                                whether the hardware caused it
#   a rank failed or was killed, flags are wrong     the rank's  ended; the last lines of the rank's log are printed
#   a node fails                                     -           SLURM requeues the job (--requeue) when it notices; until then
#                                                                srun waits for the lost ranks, whatever the others do
#   MAX_STALLED consecutive attempts without a       1           ended: it would be requeued forever
#     newer checkpoint, whatever ended them

# shellcheck source=moe_trainer/launch/launch_flags.sh
. "$ROOT/moe_trainer/launch/launch_flags.sh"
attempt=${SLURM_RESTART_COUNT:-0}
logs=${LOGS:?}/${SLURM_JOB_ID:?}-$attempt
mkdir -p "$logs"
ln -sfn "$logs" "$LOGS/latest"

# One line per attempt of this job, or per task of its array: the newest checkpoint at its start.
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
    local newest # the file may lack a newline at its end
    newest=$(cat "$folder/latest_checkpointed_iteration.txt" 2>/dev/null) || newest=none
    echo "$newest"
}

# Whether the newest checkpoint is still the one that the first of the last MAX_STALLED attempts found.
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
    echo "error: $MAX_STALLED consecutive attempts have saved no newer checkpoint (newest iteration: $(newest_checkpoint)): not requeued." \
        "Use a smaller --save-interval, or a larger SIGNAL_SECONDS if a save takes longer; MAX_STALLED=0 removes the limit." \
        "Logs: $LOGS/$SLURM_JOB_ID-*"
    cancel_the_rest
    exit 1
}

start_again() {
    if stalled; then
        end_stalled
    elif [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        echo "not requeued: the next task of the array resumes"
    elif [ "$REQUEUE" = 0 ]; then
        echo "not requeued (REQUEUE=0): submitting the same command resumes"
    elif [ "$attempt" -ge "$MAX_REQUEUES" ]; then
        echo "not requeued: this job was requeued $attempt times already (MAX_REQUEUES=$MAX_REQUEUES); submitting the same command resumes"
    else
        echo "requeued: attempt $((attempt + 1)) starts when nodes are free, at the earliest after SLURM's delay of about two minutes." \
            "(Messages of slurmstepd about a cancelled step or job are expected.)"
        # SLURM then signals all processes of the job: scontrol must live to report its success, and bash must not report the signal
        local signaled=
        trap 'signaled=1' TERM
        if (trap '' TERM && exec scontrol requeue "$SLURM_JOB_ID"); then
            [ -n "$signaled" ] || { sleep 60; } 2>/dev/null
        else
            echo "error: SLURM did not requeue it; submitting the same command resumes"
        fi
    fi
}

# Copy a rank's log, without the list of arguments, to the log of this job until srun has ended. Signals to the ranks must not end this.
follow() {
    trap '' TERM USR1
    # exec, because a shell would report a killed child
    exec sed -u '/^-* arguments -*$/,/^-* end of arguments -*$/d' < <(exec tail -q -F -n +1 -s 0.5 --pid="$step" "$1" 2>/dev/null)
}

if stalled; then end_stalled; fi
newest_checkpoint >>"$starts"

if [ -n "$MODULES" ]; then
    # shellcheck disable=SC2086 # several modules
    module load $MODULES
fi
[ -z "$SETUP" ] || eval "$SETUP"
[ "${#EXPORTS[@]}" = 0 ] || export "${EXPORTS[@]}" # without names it would print all
export RANKS_PER_NODE=${RANKS_PER_NODE:?}
print_environment >"$logs/environment.txt"

# With env, because the variables of a container image override exported ones.
command=(env "${EXPORTS[@]}" bash "$LAUNCH/rank.sh" "$PYTHON" -u "$PROGRAM" "${FLAGS[@]}")
ranks=$((SLURM_JOB_NUM_NODES * RANKS_PER_NODE))
report "$ranks ranks on $SLURM_JOB_NODELIST, newest checkpoint: $(newest_checkpoint)"
echo "logs of all ranks: $logs/rank-*.log; rank 0 and the last one, which logs the iterations, also below"
printf 'command:'
printf ' %q' "${command[@]}"
printf '\n'

# srun must not kill on the first bad exit, because ranks that exit with 75 do not exit at once. If a rank fails, the program ends the
# others, and --wait those that do not notice. scontrol may have changed the counts since the submission.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$ranks" \
    --kill-on-bad-exit=0 --wait=60 --output="$logs/rank-%t.log" ${SRUN_OPTIONS[@]+"${SRUN_OPTIONS[@]}"} "${command[@]}" 2> >(
        trap '' TERM USR1 # the exit code of a rank that has saved is an error for srun only
        exec sed -u '/Exited with exit code 75$/d' >&2
    ) &
step=$!
follow "$logs/rank-0.log" &
followers=("$!")
if [ "$ranks" -gt 1 ]; then
    follow "$logs/rank-$((ranks - 1)).log" &
    followers+=("$!")
fi
# SLURM signals the ranks; this shell only has to outlive them. (With --signal=B: or scancel --batch it signals this shell.)
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

# RUNNING: the ranks exited by themselves. COMPLETING: SLURM is ending the job, because of scancel (which must be final) or the time
# limit. SLURM itself requeues a preempted job.
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
            echo "ended by SLURM, which requeues the job after a preemption or a node failure, but not after scancel; submitting the same command resumes"
        else
            start_again
        fi
        ;;
    *)
        report "failed (exit code $code)"
        echo "last lines of the ranks that logged an error:"
        grep -lE '^pretrain_moe.py: |Error|error: ' "$logs"/rank-*.log | head -n 4 | while read -r log; do
            echo "--- $log"
            tail -n 20 "$log"
        done
        ;;
esac
if [ "$code" = 16 ]; then
    echo "a result was rejected twice on $SLURM_JOB_NODELIST. The same command on other nodes shows whether the hardware caused it:" \
        "SBATCH_OPTIONS+=(--exclude=$SLURM_JOB_NODELIST) in the cluster file"
fi
exit "$code"
