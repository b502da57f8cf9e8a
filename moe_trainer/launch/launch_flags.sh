# shellcheck shell=bash
# Sourced by launch.sh and sbatch_train.sh: turns the variables of the model zoo into the flags and the environment of a run.
#
#   flags_of_run EXTRA_FLAGS...   sets FLAGS (the command line of pretrain_moe.py) and EXPORTS (NAME=VALUE), both arrays
#   check_flags RANKS             exits with 2 if the flags are wrong, with 3 if the plan of a dry run does not fit its device
#
#   MODEL            a preset (model_zoo/), any spelling: DeepSeek-V3, mixtral_8x7b; or a YAML file. Variables that are not set have the
#                    value in the section `launch:` of its file, for a model of the public zoo those of the zoo's runtime.conf
#   VARIANT          the section launch_VARIANT: instead, for example MODEL=deepseek_v3 VARIANT=256k
#   TRAINING_PARAMS_PATH   a YAML file instead of the preset; its ${VARIABLES} are those of this list
#   TRAINING_PARAMS  flags, before the extra ones      TRAINING_SCRIPT_PATH   a program instead of pretrain_moe.py
#   TP PP EP CP ETP  parallel sizes     VPP or LAYERS_PER_VP, PP_FIRST PP_LAST, LAYOUT   layers of the pipeline (false: not set)
#   MBS GBS SEQ_LEN NUM_LAYERS TRAIN_ITERS      RECOMPUTE   full, or modules: "layernorm mlp moe_act"
#   PR               bf16 | fp8 | mxfp8
#   DISPATCHER       a value of --moe-token-dispatcher-type or --moe-flex-dispatcher-backend: alltoall, deepep, hybridep, ...
#                    Else MOE_TOKEN_DISPATCHER; else for the zoo's models deepep (launch.sh: the zoo's MOE_TOKEN_DISPATCHER). MOE_GROUPED_GEMM=true
#   A2A_OVERLAP=1 OPTIMIZER_OFFLOAD=1 PROFILE=torch|nsys
#   OUTPUT_PATH      directory of checkpoints, tensorboard and logs (runs/RUN_NAME, runs/MODEL)
#   DATA_PATH        "PREFIX" or "0.7 A 0.3 B"; mock, or unset and no flag of data among the extra ones: mock data
#   DATASET          a name for DATA_PATHS["DATASET:MODEL"] or DATA_PATHS[DATASET] of the cluster file, if DATA_PATH is not set
#   TOKENIZER_MODEL, TOKENIZER_TYPE (HuggingFaceTokenizer)
#   LOAD_PATH        weights to start from (PRETRAIN=1: ignored)   AUTO_RESUME=0   do not resume from checkpoints in OUTPUT_PATH
#   RUN_NAME COMMENT WANDB_PROJECT WANDB_MODE WANDB_API_KEY   with a key (or WANDB_MODE=offline) the run is logged to Weights & Biases
#   HARDWARE         the device that a dry run plans for: h200, b200, gb200, a100, ... or a YAML file. By default the one that the name
#                    of the calling script, RUN_NAME, COMMENT or CLUSTER contains; else that of the section, if its sizes are used; else h100
#   GB200_CLUSTER=1  4 GPUs per node, NVLINK_DOMAIN_SIZE=72, HARDWARE=gb200
#   ENVIRONMENT      array or blank-separated NAME=VALUE, for a cluster file. $SLURM_NODEID in a value is replaced on the node
#   DRY_RUN=1        also opens data, tokenizer, weights and output folder if any is given and the job has no container
#                    (CHECK_FILES=0: does not)
# Extra flags come last and override the others. A variable that is not set leaves the preset's value.

LAUNCH=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$LAUNCH/../.." && pwd) # a checkout, or the folder of installed packages
# The caller's environment overrides the cluster file, which overrides the section of the preset.
VARIABLES="ACCOUNT PARTITION RUN_TIME OUTPUT_PATH DATA_PATH DATASET TOKENIZER_MODEL TOKENIZER_TYPE LOAD_PATH CONTAINER_IMAGE CONTAINER_MOUNTS
GPUS_PER_NODE NNODES PYTHON MODULES SETUP HARDWARE SIGNAL_SECONDS MAX_REQUEUES MAX_STALLED REQUEUE SEGMENT COMMENT BIND BINDPCIE_PATH
GB200_CLUSTER NVLINK_DOMAIN_SIZE GRES RUN_NAME WANDB_PROJECT WANDB_MODE PROFILE PR DISPATCHER MOE_TOKEN_DISPATCHER MOE_GROUPED_GEMM PRETRAIN
A2A_OVERLAP OPTIMIZER_OFFLOAD TP PP EP CP ETP VPP LAYERS_PER_VP PP_FIRST PP_LAST LAYOUT MBS GBS SEQ_LEN NUM_LAYERS TRAIN_ITERS RECOMPUTE
TRAINING_PARAMS TRAINING_PARAMS_PATH TRAINING_SCRIPT_PATH"
NOTES=()
declare -A SECTION=() DEFAULTS=() # the values of the section; those that are in use
SECTION_FILE=

fail() {
    echo "error: $*" >&2
    exit 2
}

# Read the section of MODEL and the cluster file.
read_variables() {
    local name file
    local -A typed=()
    for name in $VARIABLES; do
        [ -z "${!name:-}" ] || typed[$name]=${!name}
    done
    if [ -n "${TRAINING_PARAMS_PATH:-}" ]; then
        MODEL=${MODEL:-$(basename "$TRAINING_PARAMS_PATH" .yaml)}
    fi
    read_section
    if [ -n "${CLUSTER:-}" ]; then
        file=$(cluster_file) || exit 2
        # shellcheck source=/dev/null
        . "$file"
    fi
    for name in "${!typed[@]}"; do printf -v "$name" %s "${typed[$name]}"; done
    for name in "${!DEFAULTS[@]}"; do
        [ "${!name:-}" = "${DEFAULTS[$name]}" ] || unset "DEFAULTS[$name]"
    done
    for name in VPP LAYERS_PER_VP PP_FIRST PP_LAST LAYOUT SEGMENT LOAD_PATH; do
        [ "${!name:-}" != false ] || printf -v "$name" %s ""
    done
    check_positive TP PP EP CP ETP VPP LAYERS_PER_VP PP_FIRST PP_LAST MBS GBS SEQ_LEN MAX_POSITIONS NUM_LAYERS TRAIN_ITERS NNODES GPUS_PER_NODE
    # a section's device is that of its sizes
    for name in NNODES TP PP EP CP; do
        [ "${!name:-}" = "${SECTION[$name]:-}" ] || drop_defaults HARDWARE
    done
    if [ "${DRY_RUN:-0}" = 1 ] && { [ -z "${HARDWARE:-}" ] || [ -n "${DEFAULTS[HARDWARE]:-}" ]; }; then hardware_of_name; fi
    [ "${GB200_CLUSTER:-0}" != 1 ] || drop_defaults HARDWARE
    if [ "${GB200_CLUSTER:-0}" = 1 ]; then
        HARDWARE=${HARDWARE:-gb200} NVLINK_DOMAIN_SIZE=${NVLINK_DOMAIN_SIZE:-72} GPUS_PER_NODE=${GPUS_PER_NODE:-4}
    fi
    data_of_cluster
    for name in MEGATRON_PATH MCORE_RELEASE_VERSION; do
        [ -z "${!name:-}" ] || NOTES+=("$name=${!name} has no effect: the program that trains is this checkout's")
    done
}

# HARDWARE from a name that contains it: of the script that calls the launcher (the zoo's run_gb300_235b.sh), the run or the cluster.
hardware_of_name() {
    local name names=() words parent=$PPID
    while words=() && mapfile -d '' -t words <"/proc/$parent/cmdline" && [[ ${words[0]:-} == *sh && ${words[1]:-} == *.sh ]]; do
        names+=("${words[1]##*/}")
        parent=$(sed -n 's/^PPid:\t//p' "/proc/$parent/status")
    done 2>/dev/null
    for name in ${names[@]+"${names[@]}"} "${RUN_NAME:-}" "${COMMENT:-}" "${CLUSTER:-}"; do
        [[ ${name,,} =~ (^|[^a-z0-9])(a100|h100|h200|h800|b200|b300|gb200|gb300)([^a-z0-9]|$) ]] || continue
        drop_defaults HARDWARE
        HARDWARE=${BASH_REMATCH[2]}
        NOTES+=("HARDWARE=$HARDWARE, which $name names")
        return
    done
}

# Print the path of CLUSTER: a file, or the name of one in the folders of the zoo.
cluster_file() {
    local folder
    if [ -f "$CLUSTER" ]; then
        echo "$CLUSTER"
        return
    fi
    for folder in "${WORKSPACE:-$PWD}" "$PWD" "$ROOT"; do
        for file in "$folder/cluster_configs/benchmarking/$CLUSTER.conf" "$folder/cluster_configs/$CLUSTER.conf"; do
            [ ! -f "$file" ] || { echo "$file" && return; }
        done
    done
    fail "CLUSTER=$CLUSTER: there is no such file, and no $CLUSTER.conf in cluster_configs/benchmarking or cluster_configs, here or in $ROOT"
}

# Print the canonical spelling of MODEL, as the files of model_zoo/ are named.
model_key() {
    local key=${MODEL##*/}
    key=${key%.yaml} key=${key,,}
    echo "${key//[-.]/_}"
}

# Set variables that have no value from the section `launch:` (or launch_VARIANT:) of the recipe file, else of the preset called MODEL.
# A section is complete: VARIANT's replaces the other.
read_section() {
    local name=launch${VARIANT:+_$VARIANT} file variable value
    [ -n "${MODEL:-}" ] || return 0
    [[ ${VARIANT:-x} =~ ^[A-Za-z0-9_]+$ ]] || # it becomes a pattern
        fail "VARIANT=$VARIANT: only letters, digits and underscores are in the name of a section$(variants_of_preset)"
    for file in "${TRAINING_PARAMS_PATH:-$MODEL}" "$ROOT/model_zoo/$(model_key).yaml"; do
        [ ! -f "$file" ] || ! grep -q "^$name *:" "$file" || break
        file=
    done
    [ -n "$file" ] || [ -z "${VARIANT:-}" ] ||
        fail "VARIANT=$VARIANT: neither ${TRAINING_PARAMS_PATH:-$MODEL} nor a preset of this name has a section $name$(variants_of_preset)"
    [ -n "$file" ] || return 0
    SECTION_FILE=$file
    while IFS="=" read -r variable value; do
        [ "$variable" != "?" ] || fail "$file: in $name: only lines of the form NAME: VALUE are read, not: $value"
        [ -z "${SECTION[$variable]+x}" ] || fail "$file: $variable is in $name twice"
        [[ " ${VARIABLES//$'\n'/ } " == *" $variable "* ]] ||
            fail "$file: $variable in $name: is no variable of the launchers (--help lists them)"
        SECTION[$variable]=$value
        if [ -z "${!variable:-}" ]; then
            printf -v "$variable" %s "$value"
            DEFAULTS[$variable]=$value
        fi
    done < <(section_lines "$name" "$file")
}

# Print a section of a YAML file, one NAME=VALUE per line.
section_lines() {
    awk -v section="$1" '
        { sub(/\r$/, "") }
        /^ *(#.*)?$/ { next }
        /^[^ -]/ {
            inside = $0 ~ "^" section " *:"
            if (inside && $0 !~ /: *(#.*)?$/) print "?=" $0
            next
        }
        inside && /^ +[A-Za-z_][A-Za-z_0-9]* *: *[^ ]/ {
            value = $0; sub(/^[^:]*: */, "", value)
            key = $0; sub(/ *:.*/, "", key); gsub(/ /, "", key)
            if (value ~ /^"[^"]*" *(#.*)?$|^\047[^\047]*\047 *(#.*)?$/) {
                quote = substr(value, 1, 1); value = substr(value, 2); value = substr(value, 1, index(value, quote) - 1)
            } else {
                sub(/ +#.*/, "", value); sub(/ +$/, "", value)
            }
            print key "=" value
            next
        }
        inside { print "?=" $0 }' "$2"
}

# Print which variants the preset has, for a message.
variants_of_preset() {
    local names
    names=$(sed -n 's/^launch_\([A-Za-z0-9_]*\) *:.*/\1/p' "$ROOT/model_zoo/$(model_key).yaml" 2>/dev/null | tr '\n' ' ')
    [ -z "$names" ] || echo "; there are: ${names% }"
}

# DATA_PATH from the cluster file's DATA_PATHS, by DATASET and MODEL.
data_of_cluster() {
    [ -z "${DATA_PATH:-}" ] && [ -n "${DATASET:-}" ] || return 0
    # shellcheck disable=SC2153 # a cluster file's table
    if declare -p DATA_PATHS 2>/dev/null | grep -q '^declare -A'; then
        DATA_PATH=${DATA_PATHS["$DATASET:$MODEL"]:-${DATA_PATHS["$DATASET"]:-}}
    fi
    [ -n "${DATA_PATH:-}" ] || [ -n "${DEFAULTS[DATASET]:-}" ] ||
        fail "DATASET=$DATASET: neither DATA_PATH nor DATA_PATHS[$DATASET:$MODEL] of a cluster file (CLUSTER=FILE) says where it is"
}

# With --help: print the comment at the top of the running script, and the variables.
print_help_if_asked() {
    case ${1:-} in
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" | sed "s|bash scripts/launch.sh|${MOE_TRAINER_LAUNCHER:-&}|"
            sed -n '/^#   MODEL /,/^# Extra/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
    esac
}

# Check that the values of variables are positive integers.
check_positive() {
    local name
    for name; do
        [[ ${!name:-1} =~ ^[1-9][0-9]{0,14}$ ]] || fail "$name=${!name}: a positive integer is needed"
    done
}

find_run_python() {
    if [ -n "${PYTHON:-}" ]; then
        echo "$PYTHON"
    elif [ -n "${MOE_TRAINER_PYTHON:-}" ]; then # that of `moe-trainer launch`
        echo "$MOE_TRAINER_PYTHON"
    elif [ -x "${MOE_TRAINER_VENV:-$ROOT/.venv}/bin/python" ]; then
        echo "${MOE_TRAINER_VENV:-$ROOT/.venv}/bin/python"
    else
        echo python3
    fi
}

# add VARIABLE FLAG: add the flag with the value of the variable, if it is set
add() {
    [ -z "${!1:-}" ] || FLAGS+=("$2" "${!1}")
}

one_of() {
    local name=$1 choice
    shift
    for choice in "$@"; do [ "${!name}" != "$choice" ] || return 0; done
    fail "$name=${!name}: one of $* is needed"
}

# given PATTERN WORDS...: is a flag of this pattern (a|b*) among the words?
given() {
    local word pattern=$1
    shift
    for word; do
        # shellcheck disable=SC2053 # a pattern
        [[ ${word%%=*} != @($pattern) ]] || return 0
    done
    return 1
}

# Print a layout if the layers do not divide evenly, or if overlap needs chunks and none are set.
own_layout() {
    local options=(--pp "$PP")
    [ -z "${VPP:-}" ] || options+=(--vpp "$VPP")
    [ "${A2A_OVERLAP:-0}" != 1 ] || options+=(--overlap)
    "$(find_run_python)" "$LAUNCH/pipeline_layout.py" "${options[@]}" -- --preset "$RECIPE" ${NUM_LAYERS:+--num-layers "$NUM_LAYERS"} "$@"
}

# Drop the section's VPP, PP_FIRST and PP_LAST unless PP and NUM_LAYERS are the section's too.
fit_default_stages() {
    local layers=${NUM_LAYERS:-} inner
    if [ "${PP:-}" != "${SECTION[PP]:-}" ] || [ "$layers" != "${DEFAULTS[NUM_LAYERS]:-}" ]; then drop_defaults VPP PP_FIRST PP_LAST; fi
    [ "${VPP:-}" != 1 ] || drop_defaults VPP # one chunk; or as many as overlap needs
    if [ -n "$layers" ] && [ -n "${DEFAULTS[PP_FIRST]:-}${DEFAULTS[PP_LAST]:-}" ]; then
        inner=$((PP > 2 ? PP - 2 : 1))
        # (the zoo's own numbers for Kimi-K2 do not work out: its last stage, of one layer, would have four chunks)
        if [ $((layers % PP)) = 0 ] || [ -n "${LAYERS_PER_VP:-}" ] || [ "${A2A_OVERLAP:-0}" = 1 ] ||
            [ $((PP_FIRST % ${VPP:-1} + PP_LAST % ${VPP:-1} + (layers - PP_FIRST - PP_LAST) % (inner * ${VPP:-1}))) != 0 ]; then
            drop_defaults PP_FIRST PP_LAST
        fi
    fi
    # a section's NUM_LAYERS, as the zoo's, may count embedding and loss, so it is not a value of --num-layers
    drop_defaults NUM_LAYERS
}

drop_defaults() {
    local name
    for name; do
        [ -z "${DEFAULTS[$name]:-}" ] || { printf -v "$name" %s "" && unset "DEFAULTS[$name]"; }
    done
}

# Add the flags that distribute layers over stages. A layout overrides the variables.
stage_flags() {
    local words=(${RECIPE_FLAGS[@]+"${RECIPE_FLAGS[@]}"} "$@") name layout=
    if [ -n "${LAYOUT:-}" ] || given --pipeline-model-parallel-layout "${words[@]}"; then
        for name in VPP LAYERS_PER_VP PP_FIRST PP_LAST; do
            [ -z "${!name:-}" ] || [ -n "${DEFAULTS[$name]:-}" ] ||
                NOTES+=("$name=${!name} has no effect: --pipeline-model-parallel-layout determines what every stage holds")
        done
        drop_defaults VPP PP_FIRST PP_LAST
        add LAYOUT --pipeline-model-parallel-layout
        return
    fi
    add PP_FIRST --decoder-first-pipeline-num-layers
    add PP_LAST --decoder-last-pipeline-num-layers
    if given '--num-layers-per-virtual-pipeline-stage|--num-virtual-stages-per-pipeline-rank' "${words[@]}"; then
        return
    elif [ "${LAYERS_PER_VP:-false}" != false ]; then
        FLAGS+=(--num-layers-per-virtual-pipeline-stage "$LAYERS_PER_VP")
        return
    elif [ "${PP:-1}" -gt 1 ] && [ -z "${PP_FIRST:-}${PP_LAST:-}" ] && ! given '--decoder-first-*|--decoder-last-*|--account-for-*' "${words[@]}"; then
        layout=$(own_layout "$@") || exit 2
    fi
    if [ -n "$layout" ]; then
        FLAGS+=(--pipeline-model-parallel-layout "$layout")
    elif [ "${VPP:-1}" -gt 1 ]; then
        FLAGS+=(--num-virtual-stages-per-pipeline-rank "$VPP")
    fi
}

# Whether SEQ_LEN is the section's, and the recipe has that length anyway (or asks for it by ${SEQ_LEN}).
has_section_length() {
    local length
    length=$(recipe_value --seq-length)
    [ -n "${DEFAULTS[SEQ_LEN]:-}" ] && { [ "$length" = 0 ] || [ "$length" = "$SEQ_LEN" ]; }
}

mapping_flags() {
    add TP --tensor-model-parallel-size
    [ "${TP:-1}" -le 1 ] || FLAGS+=(--sequence-parallel)
    add PP --pipeline-model-parallel-size
    add EP --expert-model-parallel-size
    add CP --context-parallel-size
    # without ETP the zoo's default, 1; Megatron's own would be TP
    if [ -n "${ETP:-}" ] || [ "${TP:-1}" -gt 1 ]; then FLAGS+=(--expert-tensor-parallel-size "${ETP:-1}"); fi
    stage_flags "$@"
    add NUM_LAYERS --num-layers
    add MBS --micro-batch-size
    add GBS --global-batch-size
    if [ -n "${SEQ_LEN:-}" ] && ! has_section_length; then
        FLAGS+=(--seq-length "$SEQ_LEN")
        # as many positions as the recipe has, or more
        local positions
        positions=$(recipe_value --max-position-embeddings)
        case $positions in *[!0-9]*) positions=0 ;; esac
        if [ "${MAX_POSITIONS:-$SEQ_LEN}" -gt "$positions" ]; then
            FLAGS+=(--max-position-embeddings "${MAX_POSITIONS:-$SEQ_LEN}")
        fi
    fi
    add TRAIN_ITERS --train-iters
    case ${RECOMPUTE:-} in
        '') ;;
        full) FLAGS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
        *)
            local modules
            read -ra modules <<<"${RECOMPUTE//$'\n'/ }"
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
            FLAGS+=(--bf16 --fp8-recipe mxfp8 --fp8-format e4m3 "${states[@]}" --moe-router-padding-for-quantization)
            [ "${OPTIMIZER_OFFLOAD:-0}" = 1 ] ||
                FLAGS+=(--fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --overlap-grad-reduce --overlap-param-gather)
            ;;
    esac
}

dispatcher_flags() {
    local named='--moe-token-dispatcher-type|--moe-flex-dispatcher-backend|--moe-enable-deepep'
    if [ -z "${DISPATCHER:-}" ] && [ -n "${MOE_TOKEN_DISPATCHER:-}" ]; then
        if [ -z "${DEFAULTS[MOE_TOKEN_DISPATCHER]:-}" ]; then
            DISPATCHER=$MOE_TOKEN_DISPATCHER
        elif [ $((${EP:-1} * ${TP:-1})) -gt 1 ] && ! given "$named" "$@"; then
            DISPATCHER=${ZOO_DISPATCHER:-$MOE_TOKEN_DISPATCHER}
            DEFAULTS[DISPATCHER]=$DISPATCHER
        fi
    fi
    unset 'DEFAULTS[MOE_TOKEN_DISPATCHER]'
    [ -n "${DISPATCHER:-}" ] || return 0
    [ "$DISPATCHER" != flex ] || DISPATCHER=deepep
    local declared words
    declared=$("$(find_run_python)" -c 'import sys
sys.path.insert(0, sys.argv[1])
from arguments.mechanisms.dispatchers import SELECTABLE
for each in SELECTABLE: print(each.key, *each.words)' "$ROOT") || fail "DISPATCHER=$DISPATCHER: the list of dispatchers cannot be read"
    # shellcheck disable=SC2046 # one word for each
    one_of DISPATCHER $(cut -d " " -f 1 <<<"$declared")
    read -ra words < <(grep "^$DISPATCHER " <<<"$declared")
    FLAGS+=("${words[@]:1}")
    [ "$DISPATCHER" != hybridep ] || FLAGS+=(--moe-hybridep-num-sms 32)
}

expert_flags() {
    [ -z "${MOE_GROUPED_GEMM:-}" ] || one_of MOE_GROUPED_GEMM true false
    case ${MOE_GROUPED_GEMM:-} in
        true) FLAGS+=(--moe-grouped-gemm) ;;
        false) [ "$(recipe_value --moe-grouped-gemm)" != true ] || NOTES+=("MOE_GROUPED_GEMM=false has no effect: $RECIPE sets --moe-grouped-gemm") ;;
    esac
}

# Whether the words or the recipe file name the data.
names_data() {
    given '--data-path|--train-data-path|--data-args-path|--per-split-data-args-path|--mock-data' ${RECIPE_FLAGS[@]+"${RECIPE_FLAGS[@]}"} "$@"
}

# Log to Weights & Biases if WANDB_API_KEY or WANDB_MODE is set.
decide_wandb() {
    local mode=${WANDB_MODE:-disabled}
    [ -z "${WANDB_API_KEY:-}" ] || mode=${WANDB_MODE:-online}
    if [ "$mode" != disabled ]; then
        WANDB_PROJECT=${WANDB_PROJECT:-moe-trainer}
        EXPORTS+=("WANDB_MODE=$mode")
        return
    fi
    [ -z "${WANDB_PROJECT:-}" ] || NOTES+=("WANDB_PROJECT=$WANDB_PROJECT has no effect: WANDB_API_KEY is not set (nor WANDB_MODE=offline)")
    WANDB_PROJECT=
}

wandb_flags() {
    local name
    [ -n "$WANDB_PROJECT" ] || return 0
    name=$(basename "$MODEL" .yaml)-TP${TP:-1}PP${PP:-1}EP${EP:-1}CP${CP:-1}VPP${VPP:-1}-MBS${MBS:-}GBS${GBS:-}${COMMENT:+-$COMMENT}
    FLAGS+=(--wandb-project "$WANDB_PROJECT")
    given --wandb-exp-name ${RECIPE_FLAGS[@]+"${RECIPE_FLAGS[@]}"} || FLAGS+=(--wandb-exp-name "$name")
}

place_output() {
    OUTPUT_PATH=${OUTPUT_PATH:-$PWD/runs/${RUN_NAME:-${MODEL##*/}}}
    case $OUTPUT_PATH in /*) ;; *) OUTPUT_PATH=$PWD/$OUTPUT_PATH ;; esac
}

output_flags() {
    FLAGS+=(--save "$OUTPUT_PATH/checkpoints" --tensorboard-dir "$OUTPUT_PATH/tensorboard")
    [ "${AUTO_RESUME:-1}" = 0 ] || FLAGS+=(--auto-resume)
    [ -z "${LOAD_PATH:-}" ] || FLAGS+=(--load "$LOAD_PATH" --finetune)
    if [ -n "${DATA_PATH:-}" ]; then
        local parts
        read -ra parts <<<"${DATA_PATH//$'\n'/ }"
        FLAGS+=(--data-path "${parts[@]}")
    elif ! names_data "$@"; then
        FLAGS+=(--mock-data)
        [ "$MOCK" = 1 ] || NOTES+=("neither DATA_PATH nor a flag names data, so this run trains on mock data")
    fi
    [ -z "${TOKENIZER_MODEL:-}" ] || FLAGS+=(--tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}" --tokenizer-model "$TOKENIZER_MODEL")
    case ${PROFILE:-0} in
        0) ;;
        1 | nsys)
            FLAGS+=(--profile --nvtx-ranges --profile-step-start 23 --profile-step-end 25 --profile-ranks 0)
            EXPORTS+=("NSYS_OUTPUT=$OUTPUT_PATH/nsys/$(basename "$MODEL" .yaml)-$(date +%Y%m%d-%H%M%S)") # rank.sh runs these ranks under nsys
            ;;
        torch) FLAGS+=(--profile --use-pytorch-profiler --profile-step-start 23 --profile-step-end 25 --profile-ranks 0) ;;
        *) fail "PROFILE=$PROFILE: one of 0 1 nsys torch is needed" ;;
    esac
}

# Print the flags of a preset or recipe file, one "--flag: value" per line, from both tables (--flag in MODEL_ARGS, a name with
# underscores in ARGS).
recipe_lines() {
    [ -f "$1" ] || return 0
    awk '
        /^[^ #]/ { inside = /^["\047]?(MODEL_ARGS|ARGS)["\047]? *:/; next }
        inside && match($0, /^ +["\047]?[A-Za-z_-][A-Za-z0-9_-]*["\047]? *:/) {
            key = substr($0, 1, RLENGTH - 1); value = substr($0, RLENGTH + 1)
            gsub(/[ "\047]/, "", key); sub(/^--/, "", key); gsub(/_/, "-", key)
            sub(/^ +/, "", value)
            print "--" key ": " value
        }' "$1"
}

# recipe_value FLAG: print its value in the preset or recipe file, 0 if it has none
recipe_value() {
    local value
    value=$(recipe_lines "$RECIPE_FILE" | sed -n "s/^$1: *\([^ #]*\).*/\1/p" | tail -n 1)
    case $value in '$'*) value=0 ;; esac
    echo "${value:-0}"
}

# Set RECIPE, RECIPE_FILE (the preset's file, or RECIPE) and an empty RECIPE_FLAGS.
find_recipe() {
    RECIPE=${TRAINING_PARAMS_PATH:-$MODEL} RECIPE_FLAGS=()
    RECIPE_FILE=$RECIPE
    case $RECIPE in
        */* | *.yaml | *.yml) ;;
        *)
            RECIPE_FILE=$ROOT/model_zoo/$(model_key).yaml
            return
            ;;
    esac
    [ -f "$RECIPE" ] || fail "the recipe $RECIPE: there is no such file"
    case $RECIPE in /*) ;; *) RECIPE=$PWD/$RECIPE ;; esac
    RECIPE_FILE=$RECIPE
    [ "$SECTION_FILE" != "${TRAINING_PARAMS_PATH:-$MODEL}" ] || return 0
    # the file decides: of the preset's section it gets those that it asks for by ${NAME}
    local name asked
    asked=" $(recipe_variables | tr '\n' ' ')"
    [[ $asked != *" LAYERS_PER_VP "* ]] || asked+="PP VPP PP_FIRST PP_LAST "
    for name in "${!DEFAULTS[@]}"; do
        case $name in NNODES | NUM_LAYERS | PRETRAIN | DATASET) continue ;; esac
        [[ $asked == *" $name "* ]] || drop_defaults "$name"
    done
}

# Print the names of the variables in the recipe file.
recipe_variables() {
    # shellcheck disable=SC2016 # the file's text, in which nothing is expanded here
    sed '/^ *#/d' "$RECIPE" | { grep -aoE '\$\{?[A-Za-z_][A-Za-z0-9_]*' || true; } | tr -d '${' | sort -u
}

# Print the names of the environment variables that the recipe file sets; nothing for a preset.
recipe_environment() {
    case $RECIPE in */*) ;; *) return 0 ;; esac
    awk '
        /^[^ #]/ { inside = /^["\047]?ENV_VARS["\047]? *:/; next }
        inside && match($0, /^ +["\047]?[A-Za-z_][A-Za-z0-9_]*["\047]? *:/) {
            key = substr($0, 1, RLENGTH - 1); gsub(/[ "\047]/, "", key); print key
        }' "$RECIPE"
}

# Export the launcher's variables that a recipe file uses, and set RECIPE_FLAGS to the flags that it then sets.
export_recipe_variables() {
    case $RECIPE in */*) ;; *) return 0 ;; esac
    local name flag value
    local -A known=([WORKSPACE]=1 [WANDB_PROJECT]=1)
    for name in $VARIABLES; do known[$name]=1; done
    while read -r name; do
        [ "$name" != LAYERS_PER_VP ] || [ -n "${LAYERS_PER_VP:-}" ] || LAYERS_PER_VP=$(layers_per_chunk) || exit 2
        [ "$name" != WORKSPACE ] || WORKSPACE=${WORKSPACE:-$PWD}
        [ -n "${known[$name]:-}" ] || continue
        export "$name=${!name:-}"
        EXPORTS+=("$name=${!name:-}")
    done < <(recipe_variables)
    # shellcheck disable=SC2016
    while IFS=: read -r flag value; do
        value=${value%%#*} value=${value//[[:space:]]/}
        case $value in
            '${'*'}') name=${value:2:-1} && [ -z "${known[$name]:-}" ] || value=${!name:-} ;;
        esac
        [ -z "$value" ] || [ "$value" = false ] || RECIPE_FLAGS+=("$flag")
    done < <(recipe_lines "$RECIPE")
}

# Print LAYERS_PER_VP for VPP, for a recipe file that needs it.
layers_per_chunk() {
    local layers=${NUM_LAYERS:-${SECTION[NUM_LAYERS]:-}}
    layers=${layers:-$(recipe_value --num-layers)}
    # check first: bash executes commands in the brackets of an arithmetic expression
    case $layers in '' | *[!0-9]*) fail "the recipe $RECIPE: --num-layers $layers is not an integer" ;; esac
    if [ "${VPP:-1}" -gt 1 ]; then echo $((layers / ${PP:-1} / VPP)); else echo false; fi
}

flags_of_run() {
    [ -n "${MODEL:-}" ] || fail "MODEL is not set; MODEL=DeepSeek-V3 for example, or the path of a YAML file"
    local words name MOCK=0
    words=${TRAINING_PARAMS:-}
    read -ra words <<<"${words//$'\n'/ }"
    set -- ${words[@]+"${words[@]}"} "$@"
    PROGRAM=${TRAINING_SCRIPT_PATH:-$ROOT/pretrain_moe.py}
    [ -f "$PROGRAM" ] || [ -n "${CONTAINER_IMAGE:-}" ] || fail "TRAINING_SCRIPT_PATH=$PROGRAM: there is no such file"
    # "mock", as in the zoo's line for Kimi-K2, and a run from scratch
    [ "${DATA_PATH:-}" != mock ] || DATA_PATH='' MOCK=1
    [ "${TOKENIZER_MODEL:-}" != mock ] || TOKENIZER_MODEL=
    if [ "${PRETRAIN:-0}" = 1 ] && [ -n "${LOAD_PATH:-}" ] && [ -z "${DEFAULTS[PRETRAIN]:-}" ]; then
        NOTES+=("LOAD_PATH=$LOAD_PATH has no effect: PRETRAIN=1 trains from scratch")
        LOAD_PATH=
    fi
    NAMES_FILES=0
    if [ -n "${DATA_PATH:-}${TOKENIZER_MODEL:-}${LOAD_PATH:-}" ] ||
        given '--data-path|--train-data-path|--data-args-path|--per-split-data-args-path|--tokenizer-model|--load' "$@"; then NAMES_FILES=1; fi
    EXPORTS=()
    find_recipe
    place_output
    fit_default_stages
    decide_wandb
    export_recipe_variables
    FLAGS=(--preset "$RECIPE")
    mapping_flags "$@"
    [ -z "${PR:-}" ] || precision_flags
    dispatcher_flags "$@"
    expert_flags
    [ "${OPTIMIZER_OFFLOAD:-0}" != 1 ] || FLAGS+=(--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer)
    local name pair set_by_file
    if [ "${A2A_OVERLAP:-0}" = 1 ]; then
        FLAGS+=(--overlap-moe-expert-parallel-comm --delay-wgrad-compute)
        EXPORTS+=(CUDA_DEVICE_MAX_CONNECTIONS=32 NVTE_FWD_LAYERNORM_SM_MARGIN=24 NVTE_BWD_LAYERNORM_SM_MARGIN=24)
    fi
    set_by_file=" $(recipe_environment | tr '\n' ' ')"
    while read -r pair; do
        name=${pair%%=*}
        case $name in
            '' | '#'*) continue ;;
            CUDA_DEVICE_MAX_CONNECTIONS) [ "${A2A_OVERLAP:-0}" != 1 ] || continue ;;
        esac
        [[ -z ${!name:-} && $set_by_file == *" $name "* ]] || EXPORTS+=("$pair")
    done <"$LAUNCH/launch_environment.txt"
    [ -z "${NVLINK_DOMAIN_SIZE:-}" ] || EXPORTS+=("NVLINK_DOMAIN_SIZE=$NVLINK_DOMAIN_SIZE")
    output_flags "$@"
    wandb_flags
    local own=(${ENVIRONMENT[@]+"${ENVIRONMENT[@]}"})
    [ "${#own[@]}" != 1 ] || read -ra own <<<"${own[0]//$'\n'/ }"
    for pair in ${own[@]+"${own[@]}"}; do
        case $pair in [A-Za-z_]*=*) EXPORTS+=("$pair") ;; *) fail "ENVIRONMENT: $pair is not NAME=VALUE" ;; esac
    done
    # variables that the caller has exported override those of this file
    local index
    for index in "${!EXPORTS[@]}"; do
        pair=${EXPORTS[$index]%%=*}
        [ -z "${!pair:-}" ] || EXPORTS[index]="$pair=${!pair}"
    done
    FLAGS+=("$@")
    say_defaults
}

say_defaults() {
    local name text=
    for name in $VARIABLES; do
        case $name in SEQ_LEN) ! has_section_length || continue ;; PRETRAIN | DATASET | MOE_GROUPED_GEMM) continue ;; esac
        [ -n "${DEFAULTS[$name]:-}" ] || continue
        case ${!name} in *' '*) text+=" $name=\"${!name}\"" ;; *) text+=" $name=${!name}" ;; esac
    done
    [ -z "$text" ] || NOTES+=("launch values of ${SECTION_FILE##*/}${VARIANT:+, variant $VARIANT}:$text")
}

# Validate the command line for this many ranks before the job is queued; with DRY_RUN=1 plan it too.
check_flags() {
    local world_size=$1 python output
    python=$(find_run_python)
    [ "${#NOTES[@]}" = 0 ] || printf 'note: %s\n' "${NOTES[@]}"
    if [ "${VALIDATE:-1}" = 0 ]; then return; fi
    if [ "${DRY_RUN:-0}" != 1 ]; then
        output=$("$python" "$ROOT/pretrain_moe.py" "${FLAGS[@]}" --validate-only --world-size "$world_size" 2>&1) ||
            fail "these flags are rejected (VALIDATE=0 skips this check):"$'\n'"$output"
        return
    fi
    local files=()
    # paths in a container are not those of this machine; a plan without files need not fit the disk of this machine
    if [ -z "${CONTAINER_IMAGE:-}" ] && [ "${CHECK_FILES:-1}" = 1 ] && [ "$NAMES_FILES" = 1 ]; then files=(--check-files); fi
    "$python" "$ROOT/pretrain_moe.py" "${FLAGS[@]}" --validate-only ${files[@]+"${files[@]}"} --world-size "$world_size" || exit 2
    local code=0 report='' word previous=''
    for word in "${FLAGS[@]}"; do # the caller may have given --report
        case $previous in --report) report=$word ;; esac
        case $word in --report=*) report=${word#*=} ;; esac
        previous=$word
    done
    local own_report=
    [ -n "$report" ] || { own_report=$(mktemp) && report=$own_report; }
    "$python" "$ROOT/pretrain_moe.py" "${FLAGS[@]}" --dry-run --world-size "$world_size" --report "$report" ${HARDWARE:+--hardware "$HARDWARE"} || code=$?
    [ "$code" != 3 ] || "$python" "$LAUNCH/launch_fixes.py" "$report" "${GPUS_PER_NODE:-8}" >&2
    [ -z "$own_report" ] || rm -f "$own_report"
    [ "$code" = 0 ] || exit $((code == 3 ? 3 : 2))
}

# Print the environment, one variable per line, without those that may be secret.
print_environment() {
    env | sort | grep -vE '(KEY|TOKEN|SECRET|PASSWORD)[A-Za-z_]*='
}
