#!/usr/bin/env bash
# Install, then train, evaluate and save a Mixture-of-Experts model, in a few minutes on two CPU cores.
#
#   bash scripts/quickstart.sh                 text: the sources of this Python installation
#   TEXT=my.txt bash scripts/quickstart.sh     text of your own (.txt or .jsonl)
#   RUN=folder  bash scripts/quickstart.sh     where everything goes (default: runs/quickstart)
#   extra flags go to pretrain_moe.py          bash scripts/quickstart.sh --train-iters 1000
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
        exit 0
        ;;
esac
# Relative paths are relative to the directory of the caller.
case ${TEXT:-} in '' | /*) ;; *) TEXT=$PWD/$TEXT ;; esac
case ${RUN:-} in '' | /*) ;; *) RUN=$PWD/$RUN ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
. scripts/environment.sh
run=${RUN:-runs/quickstart}
vocab_size=4096
split=90,5,5

echo "[1/5] environment"
make_environment base
mkdir -p "$run"
started=$SECONDS

echo "[2/5] text and tokenizer"
# Index caches are found by name, so those of another text must be removed.
rm -rf "$run/data"
"$PYTHON_BIN" scripts/quickstart_text.py "$run/data" --vocab-size "$vocab_size" ${TEXT:+--text "$TEXT"}

echo "[3/5] tokens"
if ! "$PYTHON_BIN" scripts/preprocess_data.py --input "$run/data/text.jsonl" --output-prefix "$run/data/text" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/data/tokenizer.model" --workers 2 --append-eod \
    >"$run/preprocess.log" 2>&1; then
    tail -n 20 "$run/preprocess.log" >&2
    fail "preprocessing failed; see $run/preprocess.log"
fi
unigram=$("$PYTHON_BIN" scripts/unigram_loss.py --data-path "$run/data/text_text_document" --split "$split" \
    --vocab-size "$vocab_size")
echo "a model that knows only how frequent each token is would reach $unigram nats per token on the validation text"

# One rank per GPU (as many as divide the batch), else two ranks on the CPU.
gpus=$("$PYTHON_BIN" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
cores=$("$PYTHON_BIN" -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')
ranks=2
for n in 8 4 2 1; do
    if [ "$gpus" -ge "$n" ]; then
        ranks=$n
        break
    fi
done
threads=$((cores / ranks > 0 ? cores / ranks : 1))

# The training command, in a file that can be read, changed and run again.
cat >"$run/train.sh" <<EOF
#!/usr/bin/env bash
# Written by scripts/quickstart.sh; extra flags are appended and win.
set -euo pipefail
cd "$PWD"
# Threads per rank.
export OMP_NUM_THREADS=$threads
exec "$PYTHON_BIN" scripts/torchrun.py --standalone --nproc-per-node $ranks pretrain_moe.py \\
    --preset mixtral_tiny \\
    --data-path "$run/data/text_text_document" --split $split \\
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/data/tokenizer.model" \\
    --micro-batch-size $((16 / ranks)) --moe-per-layer-logging \\
    --save "$run/checkpoints" "\$@"
EOF

device=CPU
[ "$gpus" -eq 0 ] || device=GPU
echo "[4/5] training mixtral_tiny on $ranks $device ranks"
echo "  environment: $(sed -n 's/^export //p' "$run/train.sh" | tr '\n' ' ')"
# An earlier run is moved, not deleted: it may have been trained further.
if [ -e "$run/checkpoints" ] || [ -e "$run/tensorboard" ]; then
    number=1
    while [ -e "$run/earlier-$number" ]; do number=$((number + 1)); done
    mkdir "$run/earlier-$number"
    for folder in checkpoints tensorboard; do
        [ ! -e "$run/$folder" ] || mv "$run/$folder" "$run/earlier-$number/"
    done
    echo "  the earlier run was moved to $run/earlier-$number"
fi
# The log's iteration lines, shortened; sed's \1 to \4 are iteration, iterations, milliseconds, loss.
shown='  iteration \1 of \2 | \3 ms | loss \4'
set +e
# Not in the file: a run with another --save would write its curves among these.
bash "$run/train.sh" --tensorboard-dir "$run/tensorboard" "$@" 2>&1 | tee "$run/train.log" |
    sed -u -nE -e 's/^ \[.* iteration +([0-9]+)\/ +([0-9]+) .*\(ms\): ([0-9.]+) .*lm loss: ([0-9.E+-]+) .*/'"$shown"'/p' \
        -e 's/^ (validation loss at iteration .*) lm loss PPL.*/  \1/p'
status=${PIPESTATUS[0]}
set -e
if [ "$status" != 0 ]; then
    # The output of the run, without torchrun's traceback.
    sed '/^[EW][0-9]* .*torch.distributed/,$d' "$run/train.log" | tail -n 20 >&2
    fail "training failed; the full output is in $run/train.log"
fi

echo "[5/5] result"
"$PYTHON_BIN" - "$run/checkpoints/metrics.jsonl" "$unigram" "$#" <<'EOF'
import json, sys

records = [json.loads(line) for line in open(sys.argv[1])]
losses = [record["lm loss"] for record in records if record.get("validation") == "validation"]
unigram, own_flags = float(sys.argv[2]), sys.argv[3] != "0"
if not losses:
    sys.exit(0 if own_flags else "error: the run has recorded no validation")
print(f"validation loss {losses[-1]:.3f} nats per token; the unigram model's is {unigram:.3f}")
if losses[-1] > unigram - 0.5 and not own_flags:
    sys.exit("error: the model has not learned clearly more than the unigram model")
EOF
cat <<EOF
done in $((SECONDS - started)) seconds after the environment

  $run/checkpoints      model, optimizer, metrics.jsonl (one JSON object per logged iteration) and dashboard.html
  $run/train.log        everything the run printed
  $run/train.sh         the command, to change and run again

next:
  train on (warms up again) bash $run/train.sh --load $run/checkpoints --train-iters 300 --override-opt_param-scheduler
  look at curves            $run/checkpoints/dashboard.html in a browser, or $PYTHON_BIN -m tensorboard.main --logdir $run/tensorboard
  a large model, no GPU     $PYTHON_BIN pretrain_moe.py --preset deepseek_v3 --mock-data --validate-only --world-size 8
EOF
