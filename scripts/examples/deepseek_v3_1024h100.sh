#!/usr/bin/env bash
# Train DeepSeek-V3 on 1,024 H100: 128 nodes of 8 GPUs, in blockwise fp8.
#
#   sbatch scripts/examples/deepseek_v3_1024h100.sh CHECKPOINT_PATH TOKENIZER_PATH DATA_PATH [FLAGS...]
#
# Mapping, formats and recomputation are those of table 11 of arXiv 2603.07685, which reports 368 TFLOP/s a GPU with forced balance
# and mock data.
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
#SBATCH --job-name=deepseek-v3
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@120
set -euo pipefail

CHECKPOINT_PATH=${1:?the folder of checkpoints is needed: see the head of this file}
TOKENIZER_PATH=${2:?the folder of the tokenizer is needed}
DATA_PATH=${3:?the prefix of the token files is needed}
shift 3

# Kernels of the exchange run next to those of attention and experts.
export CUDA_DEVICE_MAX_CONNECTIONS=32
export NVTE_FWD_LAYERNORM_SM_MARGIN=24
export NVTE_BWD_LAYERNORM_SM_MARGIN=24
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0

MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --max-position-embeddings 163840
    --position-embedding-type rope
    --rotary-base 10000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.02
    --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.1
    --multi-latent-attention
    --qk-layernorm
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --kv-channels 128
    --rotary-scaling-factor 40
    --mscale 1.0
    --mscale-all-dim 1.0
    --make-vocab-size-divisible-by 3232
)

MOE_ARGS=(
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-shared-expert-intermediate-size 2048
    --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3
    --moe-router-num-groups 8
    --moe-router-group-topk 4
    --moe-router-topk-scaling-factor 2.5
    --moe-router-dtype fp32
    --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4
    --moe-grouped-gemm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 8
    # 32 chunks, four a stage: E is the embedding, t a layer, m the layer of multi-token prediction, L the loss.
    --pipeline-model-parallel-layout 'Et|(tt|)*30mL'
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend deepep
    --overlap-moe-expert-parallel-comm
    --delay-wgrad-compute
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

TRAINING_ARGS=(
    --bf16
    --seq-length 4096
    --micro-batch-size 1
    --global-batch-size 8192
    --lr 2.2e-4
    --min-lr 2.2e-5
    --lr-warmup-init 0.0
    --train-samples 585937500
)

PERFORMANCE_ARGS=(
    --moe-permute-fusion
    --moe-router-fusion
    --fp8-format e4m3
    --fp8-recipe blockwise
    --fp8-param-gather
    --use-precision-aware-optimizer
    --main-grads-dtype fp32
    --main-params-dtype fp32
    --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16
    --moe-router-padding-for-quantization
    --recompute-granularity selective
    --recompute-modules mla_up_proj mlp moe_act layernorm
)

# To measure speed without data: --mock-data --tokenizer-type NullTokenizer --vocab-size 129280.
DATA_ARGS=(
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER_PATH"
    --data-path "$DATA_PATH"
    --split '99,1,0'
)

CHECKPOINT_ARGS=(
    --save "$CHECKPOINT_PATH"
    # The same line again continues from the newest checkpoint.
    --auto-resume
    --save-interval 500
    # SLURM's signal before the time limit (or yours): save, then end with exit code 75.
    --exit-signal-handler
    --exit-signal SIGUSR1
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --eval-interval 500
    --eval-iters 32
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

srun python -u pretrain_moe.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${PERFORMANCE_ARGS[@]}" "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
