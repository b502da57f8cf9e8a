#!/usr/bin/env bash
# Fine-tune Qwen3-30B-A3B on conversations with low-rank adapters (LoRA), on 8 H100 of one node.
#
#   bash scripts/examples/fine_tuning.sh MODEL CHECKPOINT_PATH CHATS.jsonl [FLAGS...]
#
# MODEL is the folder of the model from Hugging Face, with its tokenizer. CHATS.jsonl has one conversation per line. Samples are packed to
# 8,192 tokens, and only replies count. Without the flags --lora-* all weights are trained. Afterwards:
#   python scripts/convert.py CHECKPOINT_PATH ADAPTER --to peft
# Run it in the checkout; installed, replace "pretrain_moe.py" by "-m moe_trainer train". Flags at the end win.
set -euo pipefail

MODEL=${1:?the model from Hugging Face is needed: see the head of this file}
CHECKPOINT_PATH=${2:?the folder of checkpoints is needed}
CHATS=${3:?the file of conversations is needed}
shift 3

export CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export NCCL_NVLS_ENABLE=0

DISTRIBUTED_ARGS=(
    --standalone
    --nproc-per-node 8
)

MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --max-position-embeddings 40960
    --position-embedding-type rope
    --rotary-base 1000000
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.02
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --make-vocab-size-divisible-by 1187
)

MOE_ARGS=(
    --num-experts 128
    --moe-router-topk 8
    --moe-ffn-hidden-size 768
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)

TRAINING_ARGS=(
    --bf16
    --lora-dim 16
    --lora-alpha 32
    --seq-length 4096
    --max-seqlen-per-dp-cp-rank 8192
    --micro-batch-size 1
    --global-batch-size 64
    --calculate-per-token-loss
    --train-iters 500
    --lr 2e-4
    --min-lr 2e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.03
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
)

PERFORMANCE_ARGS=(
    --moe-permute-fusion
    --moe-router-fusion
)

DATA_ARGS=(
    --sft
    --sft-tokenizer-prompt-format assistant
    --tokenizer-type SFTTokenizer
    --tokenizer-model "$MODEL"
    --data-path "$CHATS"
    --split '98,2,0'
)

CHECKPOINT_ARGS=(
    # The weights only, from iteration 0, as long as CHECKPOINT_PATH holds no checkpoint.
    --load "$MODEL"
    --finetune
    --save "$CHECKPOINT_PATH"
    --auto-resume
    --save-interval 100
)

LOGGING_ARGS=(
    --log-interval 1
    --log-throughput
    --eval-interval 100
    --eval-iters 8
    --tensorboard-dir "$CHECKPOINT_PATH/tensorboard"
)

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_moe.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${PERFORMANCE_ARGS[@]}" "${DATA_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
