#!/usr/bin/env bash
# Train DeepSeek-V3 on 256 GB200: 64 trays of 4 GPUs, in MXFP8.
#
#   sbatch scripts/examples/deepseek_v3_256gb200.sh CHECKPOINT_PATH TOKENIZER_PATH DATA_PATH [FLAGS...]
#
# Mapping, formats, recomputation and graphs are those of table 11 of arXiv 2603.07685, which reports 1,048 TFLOP/s a GPU with forced
# balance and mock data. Blocks of 16 trays (--segment) keep the 64 ranks of an expert group inside one NVLink domain.
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
#SBATCH --job-name=deepseek-v3
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=4:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@120
#SBATCH --segment=16
set -euo pipefail

CHECKPOINT_PATH=${1:?the folder of checkpoints is needed: see the head of this file}
TOKENIZER_PATH=${2:?the folder of the tokenizer is needed}
DATA_PATH=${3:?the prefix of the token files is needed}
shift 3

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0
# Captured graphs and expandable segments.
export NCCL_GRAPH_REGISTER=0
# One NVLink domain holds 72 GPUs.
export NVLINK_DOMAIN_SIZE=72

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
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    # 16 chunks, four a stage: E is the embedding, t a layer, m the layer of multi-token prediction, L the loss.
    --pipeline-model-parallel-layout 'Et*4|(tttt|)*14tmL'
    --expert-model-parallel-size 64
    --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend hybridep
    --moe-hybridep-num-sms 32
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
    --fp8-recipe mxfp8
    --fp8-param-gather
    --reuse-grad-buf-for-mxfp8-param-ag
    --use-precision-aware-optimizer
    --main-grads-dtype fp32
    --main-params-dtype fp32
    --exp-avg-dtype bf16
    --exp-avg-sq-dtype bf16
    --moe-router-padding-for-quantization
    --recompute-granularity selective
    --recompute-modules mlp
    --offload-optimizer-states
    --cuda-graph-impl transformer_engine
    --cuda-graph-scope attn moe_router moe_preprocess
    --te-rng-tracker
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
