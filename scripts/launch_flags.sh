# shellcheck shell=bash
# Sourced by launch.sh and sbatch_train.sh: from the model zoo's variables to the flags and the environment of a run.
#
#   flags_of_run EXTRA_FLAGS...   sets FLAGS (the command line of pretrain_moe.py) and EXPORTS (NAME=VALUE), both arrays
#   check_flags RANKS             ends the script with 2 where the flags are wrong, with 3 where a dry run's plan does not fit its device
#
#   MODEL            a preset (model_zoo/), any spelling: DeepSeek-V3, mixtral_8x7b; or a YAML file
#   TP PP EP CP ETP  parallel sizes     VPP or LAYERS_PER_VP, PP_FIRST PP_LAST, LAYOUT   layers of the pipeline
#   MBS GBS SEQ_LEN NUM_LAYERS TRAIN_ITERS      RECOMPUTE   full, or modules: "layernorm mlp moe_act"
#   PR               bf16 | fp8 | mxfp8          DISPATCHER   alltoall | deepep | hybridep
#   A2A_OVERLAP=1 OPTIMIZER_OFFLOAD=1 PROFILE=torch|nsys
#   OUTPUT_PATH      checkpoints, tensorboard and logs go here   DATA_PATH ("PREFIX" or "0.7 A 0.3 B"; unset, and no flag
#                    of data among the extra ones: mock data)   TOKENIZER_MODEL, TOKENIZER_TYPE (HuggingFaceTokenizer)
#   LOAD_PATH        weights to start from (PRETRAIN=1: ignored)   AUTO_RESUME=0   start anew whatever is under OUTPUT_PATH
#   HARDWARE         what a dry run plans for: h100 (the default), h200, b200, gb200, a100, ... or a YAML file
#   ENVIRONMENT      array or blank-separated NAME=VALUE, for a cluster file
# Extra flags come last and win. A variable that is not set leaves the preset's value.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# What a cluster file may set and the caller's environment overrides.
CLUSTER_NAMES="ACCOUNT PARTITION RUN_TIME OUTPUT_PATH DATA_PATH TOKENIZER_MODEL LOAD_PATH CONTAINER_IMAGE CONTAINER_MOUNTS GPUS_PER_NODE
NNODES PYTHON MODULES SETUP HARDWARE SIGNAL_SECONDS MAX_REQUEUES MAX_STALLED REQUEUE SEGMENT COMMENT BIND BINDPCIE_PATH GB200_CLUSTER"

fail() {
    echo "error: $*" >&2
    exit 2
}

read_cluster() {
    [ -n "${CLUSTER:-}" ] || return 0
    [ -f "$CLUSTER" ] || fail "CLUSTER=$CLUSTER: there is no such file"
    local name
    local -A typed=()
    for name in $CLUSTER_NAMES; do
        [ -z "${!name+set}" ] || typed[$name]=${!name}
    done
    # shellcheck source=/dev/null
    . "$CLUSTER"
    for name in "${!typed[@]}"; do printf -v "$name" %s "${typed[$name]}"; done
}

# What the head of the script that is run says of it.
help_asked() {
    case ${1:-} in
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
            sed -n '/^#   MODEL /,/^# Extra/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
    esac
}

# A variable that counts something.
positive() {
    local name
    for name; do
        [[ ${!name:-1} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name}: a whole number above 0 is needed"
    done
}

find_run_python() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
    elif [ -x "${MOE_TRAINER_VENV:-$ROOT/.venv}/bin/python" ]; then
        echo "${MOE_TRAINER_VENV:-$ROOT/.venv}/bin/python"
    else
        echo python3
    fi
}

# add VARIABLE FLAG: the flag with the variable's value, where it is set
add() {
    [ -z "${!1:-}" ] || FLAGS+=("$2" "${!1}")
}

one_of() {
    local name=$1 choice
    shift
    for choice in "$@"; do [ "${!name}" != "$choice" ] || return 0; done
    fail "$name=${!name}: one of $* is needed"
}

# Do the extra flags say which layers go where?
names_stages() {
    local flag
    for flag; do
        case $flag in
            --pipeline-model-parallel-layout* | --decoder-first-* | --decoder-last-* | --num-layers-per-virtual-* | --num-virtual-stages-* | \
                --account-for-*) return 0 ;;
        esac
    done
    return 1
}

# A layout where the layers do not divide, or where overlap needs chunks and none are asked for.
own_layout() {
    local options=(--pp "$PP")
    [ -z "${VPP:-}" ] || options+=(--vpp "$VPP")
    [ "${A2A_OVERLAP:-0}" != 1 ] || options+=(--overlap)
    "$(find_run_python)" "$ROOT/scripts/pipeline_layout.py" "${options[@]}" -- --preset "$MODEL" ${NUM_LAYERS:+--num-layers "$NUM_LAYERS"} "$@"
}

mapping_flags() {
    add TP --tensor-model-parallel-size
    [ "${TP:-1}" -le 1 ] || FLAGS+=(--sequence-parallel)
    add PP --pipeline-model-parallel-size
    add EP --expert-model-parallel-size
    add CP --context-parallel-size
    # without ETP the zoo's default, 1; Megatron's own would be TP
    if [ -n "${ETP:-}" ] || [ "${TP:-1}" -gt 1 ]; then FLAGS+=(--expert-tensor-parallel-size "${ETP:-1}"); fi
    add PP_FIRST --decoder-first-pipeline-num-layers
    add PP_LAST --decoder-last-pipeline-num-layers
    add LAYOUT --pipeline-model-parallel-layout
    local layout=
    if [ "${PP:-1}" -gt 1 ] && [ -z "${LAYERS_PER_VP:-}${PP_FIRST:-}${PP_LAST:-}${LAYOUT:-}" ] && ! names_stages "$@"; then
        layout=$(own_layout "$@") || exit 2
    fi
    if [ -n "$layout" ]; then
        FLAGS+=(--pipeline-model-parallel-layout "$layout")
    elif [ -n "${LAYERS_PER_VP:-}" ]; then
        FLAGS+=(--num-layers-per-virtual-pipeline-stage "$LAYERS_PER_VP")
    elif [ "${VPP:-1}" -gt 1 ]; then
        FLAGS+=(--num-virtual-stages-per-pipeline-rank "$VPP")
    fi
    add NUM_LAYERS --num-layers
    add MBS --micro-batch-size
    add GBS --global-batch-size
    if [ -n "${SEQ_LEN:-}" ]; then FLAGS+=(--seq-length "$SEQ_LEN" --max-position-embeddings "${MAX_POSITIONS:-$SEQ_LEN}"); fi
    add TRAIN_ITERS --train-iters
    case ${RECOMPUTE:-} in
        '') ;;
        full) FLAGS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
        *)
            local modules
            read -ra modules <<<"$RECOMPUTE"
            FLAGS+=(--recompute-granularity selective --recompute-modules "${modules[@]}")
            ;;
    esac
}

precision_flags() {
    local states=(--use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype bf16
        --exp-avg-sq-dtype bf16)
    one_of PR bf16 fp8 mxfp8
    case $PR in
        bf16) FLAGS+=(--bf16) ;;
        fp8)
            FLAGS+=(--bf16 --fp8-recipe blockwise --fp8-format e4m3 "${states[@]}" --moe-router-padding-for-quantization)
            [ "${OPTIMIZER_OFFLOAD:-0}" = 1 ] || FLAGS+=(--fp8-param-gather)
            ;;
        mxfp8)
            FLAGS+=(--bf16 --fp8-recipe mxfp8 --fp8-format e4m3 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag
                --overlap-grad-reduce --overlap-param-gather "${states[@]}" --moe-router-padding-for-quantization)
            ;;
    esac
}

dispatcher_flags() {
    one_of DISPATCHER alltoall deepep hybridep
    case $DISPATCHER in
        alltoall) FLAGS+=(--moe-token-dispatcher-type alltoall) ;;
        deepep) FLAGS+=(--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep) ;;
        hybridep) FLAGS+=(--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 32) ;;
    esac
}

# Do the extra flags say where the data is?
names_data() {
    local flag
    for flag; do
        case $flag in --data-path* | --train-data-path* | --data-args-path* | --per-split-data-args-path* | --mock-data*) return 0 ;; esac
    done
    return 1
}

output_flags() {
    OUTPUT_PATH=${OUTPUT_PATH:-$PWD/runs/${MODEL##*/}}
    case $OUTPUT_PATH in /*) ;; *) OUTPUT_PATH=$PWD/$OUTPUT_PATH ;; esac
    FLAGS+=(--save "$OUTPUT_PATH/checkpoints" --tensorboard-dir "$OUTPUT_PATH/tensorboard")
    [ "${AUTO_RESUME:-1}" = 0 ] || FLAGS+=(--auto-resume)
    [ "${PRETRAIN:-0}" = 1 ] || [ -z "${LOAD_PATH:-}" ] || FLAGS+=(--load "$LOAD_PATH" --finetune)
    if [ -n "${DATA_PATH:-}" ]; then
        local parts
        read -ra parts <<<"$DATA_PATH"
        FLAGS+=(--data-path "${parts[@]}")
    elif ! names_data "$@"; then
        FLAGS+=(--mock-data)
        NO_DATA="note: neither DATA_PATH nor a flag names data, so this run trains on mock data"
    fi
    [ -z "${TOKENIZER_MODEL:-}" ] || FLAGS+=(--tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}" --tokenizer-model "$TOKENIZER_MODEL")
    case ${PROFILE:-0} in
        0) ;;
        1 | nsys) FLAGS+=(--profile --profile-step-start 23 --profile-step-end 25 --profile-ranks 0) ;;
        torch) FLAGS+=(--profile --use-pytorch-profiler --profile-step-start 23 --profile-step-end 25 --profile-ranks 0) ;;
        *) fail "PROFILE=$PROFILE: one of 0 1 nsys torch is needed" ;;
    esac
}

flags_of_run() {
    [ -n "${MODEL:-}" ] || fail "MODEL is not set; MODEL=DeepSeek-V3 for example, or the path of a YAML file"
    FLAGS=(--preset "$MODEL")
    EXPORTS=()
    mapping_flags "$@"
    [ -z "${PR:-}" ] || precision_flags
    [ -z "${DISPATCHER:-}" ] || dispatcher_flags
    [ "${OPTIMIZER_OFFLOAD:-0}" != 1 ] || FLAGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
    if [ "${A2A_OVERLAP:-0}" = 1 ]; then
        FLAGS+=(--overlap-moe-expert-parallel-comm --delay-wgrad-compute)
        EXPORTS+=(CUDA_DEVICE_MAX_CONNECTIONS=32 NVTE_FWD_LAYERNORM_SM_MARGIN=24 NVTE_BWD_LAYERNORM_SM_MARGIN=24)
    else
        EXPORTS+=(CUDA_DEVICE_MAX_CONNECTIONS=1)
    fi
    EXPORTS+=(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True NVTE_ALLOW_NONDETERMINISTIC_ALGO=1)
    local pair own=(${ENVIRONMENT[@]+"${ENVIRONMENT[@]}"})
    [ "${#own[@]}" != 1 ] || read -ra own <<<"${own[0]}"
    for pair in ${own[@]+"${own[@]}"}; do
        case $pair in [A-Za-z_]*=*) EXPORTS+=("$pair") ;; *) fail "ENVIRONMENT: $pair is not NAME=VALUE" ;; esac
    done
    # what the caller has exported wins over what this file would set
    local index
    for index in "${!EXPORTS[@]}"; do
        pair=${EXPORTS[$index]%%=*}
        [ -z "${!pair:-}" ] || EXPORTS[index]="$pair=${!pair}"
    done
    NO_DATA=
    output_flags "$@"
    FLAGS+=("$@")
}

# Judge the command line for this many ranks before anything waits in a queue; with DRY_RUN=1 plan it too.
check_flags() {
    local world_size=$1 python verdict
    python=$(find_run_python)
    [ -z "$NO_DATA" ] || echo "$NO_DATA"
    if [ "${VALIDATE:-1}" = 0 ]; then return; fi
    if [ "${DRY_RUN:-0}" != 1 ]; then
        verdict=$("$python" "$ROOT/pretrain_moe.py" "${FLAGS[@]}" --validate-only --world-size "$world_size" 2>&1) ||
            fail "these flags would not run (VALIDATE=0 submits them nevertheless):"$'\n'"$verdict"
        return
    fi
    # of some 600 values those that somebody has chosen
    "$python" "$ROOT/pretrain_moe.py" "${FLAGS[@]}" --validate-only --world-size "$world_size" | { grep -v '  (default)$' || true; } || exit 2
    local plan
    plan=$("$python" "$ROOT/pretrain_moe.py" "${FLAGS[@]}" --dry-run --world-size "$world_size" ${HARDWARE:+--hardware "$HARDWARE"}) || exit 2
    printf '%s\n' "$plan"
    case $plan in
        *$'\n'"does not fit"*)
            echo "error: this run DOES NOT FIT the memory of its devices:$(grep '^does not fit' <<<"$plan" | cut -d: -f2-)" >&2
            echo "       more of TP, PP, EP or RECOMPUTE helps; HARDWARE=NAME plans for other devices" >&2
            exit 3
            ;;
    esac
}

# The environment, a variable a line, without what may be secret.
print_environment() {
    env | sort | grep -vE '(KEY|TOKEN|SECRET|PASSWORD)[A-Za-z_]*='
}
