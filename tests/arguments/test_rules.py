"""Every rule: a line that breaks it, and lines near by that do not. No rule may stay silent in all of them."""

import pytest

from arguments import rules
from arguments.container import OPTIONS
from arguments.machine import check_machine
from arguments.parse import understand
from arguments.rules.facts import gather
from tests.arguments.graph_lines import LIMITS
from tests.arguments.rule_lines import base_line, changed, findings, flags_of

SP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
DENSE = "--num-experts --moe-router-topk --moe-token-dispatcher-type"
STASH = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DELTA = "--experimental-attention-variant gdn"

# (added to the base line, flags left out of it, a flag that must be named); 8 ranks
BROKEN = (
    # parallel sizes
    ("--tensor-model-parallel-size 3", "", "--tensor-model-parallel-size"),
    ("--pipeline-model-parallel-size 0", "", "--pipeline-model-parallel-size"),
    ("--expert-tensor-parallel-size 3", "", "--expert-tensor-parallel-size"),
    ("--expert-model-parallel-size 8 --expert-tensor-parallel-size 2", "", "--expert-tensor-parallel-size"),
    ("--expert-model-parallel-size 2", DENSE, "--num-experts"),
    ("--expert-model-parallel-size 4 --num-experts 6", "--num-experts", "--num-experts"),
    ("--tensor-model-parallel-size 2 --tp-comm-overlap", "", "--tp-comm-overlap"),
    (f"{SP2} --group-query-attention --num-query-groups 3 --num-attention-heads 6 --kv-channels 64",
     "--num-attention-heads", "--num-query-groups"),
    (f"{SP2} --seq-length 1023", "--seq-length", "--sequence-parallel"),
    ("--tensor-model-parallel-size 2 --seq-length 1023", "--seq-length", "--num-experts"),
    ("--context-parallel-size 2 --seq-length 1022", "--seq-length", "--context-parallel-size"),
    ("--context-parallel-size 2 --cp-comm-type p2p a2a", "", "--cp-comm-type"),
    ("--context-parallel-size 2 --cp-comm-type ring", "", "--cp-comm-type"),
    ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "", "--hierarchical-context-parallel-sizes"),
    ("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 3", "", "--hierarchical-context-parallel-sizes"),
    ("--context-parallel-size 8 --hierarchical-context-parallel-sizes 2 2 2 --cp-comm-type a2a+p2p", "",
     "--hierarchical-context-parallel-sizes"),
    ("--context-parallel-size 4 --cp-comm-type a2a --num-attention-heads 6 --kv-channels 64", "--num-attention-heads",
     "--cp-comm-type"),
    ("--context-parallel-size 4 --cp-comm-type a2a --group-query-attention --num-query-groups 2", "", "--num-query-groups"),
    ("--context-parallel-size 4 --hierarchical-context-parallel-sizes 4 1 --cp-comm-type a2a+p2p "
     "--group-query-attention --num-query-groups 2", "", "--num-query-groups"),
    (f"{SP2} --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping --expert-tensor-parallel-size 1", "",
     "--use-tp-pp-dp-mapping"),
    ("--num-distributed-optimizer-instances 2 --tensor-parallel-num-weight-shards 2", "",
     "--num-distributed-optimizer-instances"),
    ("--num-distributed-optimizer-instances 3", "", "--num-distributed-optimizer-instances"),
    ("--num-distributed-optimizer-instances 2 --expert-model-parallel-size 8", "", "--num-distributed-optimizer-instances"),
    ("--fake-process-group --moe-token-dispatcher-type flex", "", "--fake-process-group"),
    # pipeline
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule 1f1b", "", "--pipeline-schedule"),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule interleaved", "", "--pipeline-schedule"),
    ("--pipeline-schedule zero-bubble --overlap-dispatch-backward-with-experts-wgrad", "", "--pipeline-schedule"),
    ("--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split", "", "--num-layers"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3", "",
     "--num-virtual-stages-per-pipeline-rank"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 0", "",
     "--num-virtual-stages-per-pipeline-rank"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "",
     "--num-layers-per-virtual-pipeline-stage"),
    ("--num-virtual-stages-per-pipeline-rank 2", "", "--pipeline-model-parallel-size"),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", "",
     "--no-overlap-p2p-communication"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttttL "
     "--num-virtual-stages-per-pipeline-rank 1", "", "--pipeline-model-parallel-layout"),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 0", "", "--decoder-first-pipeline-num-layers"),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1 "
     "--num-virtual-stages-per-pipeline-rank 3", "", "--decoder-last-pipeline-num-layers"),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4", "",
     "--num-layers"),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3", "", "--decoder-first-pipeline-num-layers"),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split", "",
     "--account-for-loss-in-pipeline-split"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttttL --account-for-loss-in-pipeline-split",
     "", "--account-for-loss-in-pipeline-split"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttxxL", "", "--pipeline-model-parallel-layout"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|tttL", "", "--num-layers"),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Etttt|ttttL --mtp-num-layers 1", "",
     "--mtp-num-layers"),
    ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 4",
     "--global-batch-size", "--global-batch-size"),
    ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
     "--microbatch-group-size-per-virtual-pipeline-stage 3", "", "--microbatch-group-size-per-virtual-pipeline-stage"),
    # sizes
    ("", "--num-layers", "--num-layers"),
    ("", "--seq-length", "--seq-length"),
    ("--max-position-embeddings 512", "--max-position-embeddings", "--max-position-embeddings"),
    ("--hidden-size -512", "--hidden-size", "--hidden-size"),
    ("--num-attention-heads 7", "--num-attention-heads", "--kv-channels"),
    ("--tensor-model-parallel-size 8 --num-attention-heads 4", "--num-attention-heads", "--num-attention-heads"),
    ("--group-query-attention --num-query-groups 3", "", "--num-query-groups"),
    ("--group-query-attention --num-query-groups 0", "", "--num-query-groups"),
    ("--moe-ffn-hidden-size 256", DENSE, "--moe-ffn-hidden-size"),
    (f"{SP2} --ffn-hidden-size 1025 --moe-layer-freq 2", "", "--ffn-hidden-size"),
    (f"{SP2} --moe-ffn-hidden-size 1025", "", "--moe-ffn-hidden-size"),
    ("--padded-vocab-size 999", "", "--padded-vocab-size"),
    ("--squared-relu", "", "--squared-relu"),
    # single numbers
    ("--num-experts -8", "--num-experts", "--num-experts"),
    ("--hidden-dropout 1.0", "", "--hidden-dropout"),
    ("--rotary-percent 1.5", "", "--rotary-percent"),
    ("--lr nan", "--lr", "--lr"),
    # router
    ("--moe-layer-freq [1]*7", "", "--moe-layer-freq"),
    ("--moe-layer-freq [2]*8", "", "--moe-layer-freq"),
    ("--moe-layer-freq 0", "", "--moe-layer-freq"),
    ("--moe-router-topk 9", "--moe-router-topk", "--num-experts"),
    ("--moe-router-topk 0", "--moe-router-topk", "--moe-router-topk"),
    ("--moe-router-topk 1", "--moe-router-topk", "--moe-router-pre-softmax"),
    ("--moe-router-enable-expert-bias", "", "--moe-router-score-function"),
    ("--moe-router-group-topk 2", "", "--moe-router-num-groups"),
    ("--moe-router-group-topk 2 --moe-router-num-groups 3", "", "--num-experts"),
    ("--moe-router-group-topk 5 --moe-router-num-groups 4", "", "--moe-router-group-topk"),
    ("--moe-router-group-topk 1 --moe-router-num-groups 8", "", "--moe-router-topk"),
    ("--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2", "", "--moe-aux-loss-coeff"),
    ("--moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 0 0", "",
     "--moe-router-load-balancing-type"),
    ("--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1e-2", "", "--moe-aux-loss-coeff"),
    ("--moe-router-load-balancing-type quantile_balancing --moe-router-fusion", "", "--moe-router-fusion"),
    ("--moe-router-load-balancing-type fair", "", "--moe-router-load-balancing-type"),
    # dispatcher and experts
    ("--moe-expert-capacity-factor 1.0 --moe-router-load-balancing-type sinkhorn", "", "--moe-expert-capacity-factor"),
    ("--moe-expert-capacity-factor -1.0 --moe-pad-expert-input-to-capacity", "", "--moe-pad-expert-input-to-capacity"),
    ("--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity --moe-token-dispatcher-type flex", "",
     "--moe-pad-expert-input-to-capacity"),
    ("--moe-enable-deepep", "", "--moe-enable-deepep"),
    ("--moe-enable-deepep --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "",
     "--moe-flex-dispatcher-backend"),
    ("--moe-flex-dispatcher-backend ncclep", "", "--moe-flex-dispatcher-backend"),
    ("--moe-dispatch-fwd-dtype mxfp8 --moe-token-dispatcher-type allgather", "", "--moe-dispatch-fwd-dtype"),
    ("--moe-combine-bwd-dtype mxfp8 --moe-token-dispatcher-type flex", "", "--moe-combine-bwd-dtype"),
    ("--moe-token-dispatcher-type flex --moe-deepep-num-sms 24 --moe-hybridep-num-sms 32", "", "--moe-deepep-num-sms"),
    ("--moe-shared-expert-intermediate-size 0", "", "--moe-shared-expert-intermediate-size"),
    ("--moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap --moe-token-dispatcher-type allgather", "",
     "--moe-shared-expert-overlap"),
    ("--moe-shared-expert-intermediate-size 512", "--disable-bias-linear", "--disable-bias-linear"),
    (SP2, "--disable-bias-linear", "--expert-tensor-parallel-size"),
    ("--moe-expert-rank-capacity-factor 2.0", "", "--moe-expert-rank-capacity-factor"),
    ("--moe-paged-stash", "", "--moe-paged-stash"),
    ("--moe-clone-hot-experts -1", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2", DENSE, "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --moe-token-dispatcher-type flex", "", "--moe-token-dispatcher-type"),
    ("--moe-clone-hot-experts 2 --fp8-format hybrid", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --fp4-format e2m1", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --overlap-moe-expert-parallel-comm", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --delay-wgrad-compute", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --use-torch-fsdp2", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --use-megatron-fsdp", "", "--moe-clone-hot-experts"),
    ("--moe-clone-hot-experts 2 --pipeline-schedule zero-bubble", "", "--moe-clone-hot-experts"),
    ("--moe-expert-rank-capacity-factor 0", "", "--moe-expert-rank-capacity-factor"),
    (STASH + " --fine-grained-activation-offloading --offload-modules moe_act", "", "--moe-paged-stash"),
    (STASH + " --cpu-offloading-num-layers 1", "", "--moe-paged-stash"),
    (STASH + " --moe-clone-hot-experts 2", "", "--moe-clone-hot-experts"),
    (STASH + " --moe-paged-stash-page-size 0", "", "--moe-paged-stash-page-size"),
    (STASH + " --moe-paged-stash-buffer-size-factor-cuda 0", "", "--moe-paged-stash-buffer-size-factor-cuda"),
    (STASH + " --moe-paged-stash-buffer-size-factor-cpu -1", "", "--moe-paged-stash-buffer-size-factor-cpu"),
    ("--moe-latent-size 128", DENSE, "--moe-latent-size"),
    ("--moe-latent-size 128 --moe-shared-expert-overlap", "", "--moe-shared-expert-overlap"),
    ("--moe-single-grouped-weight", "", "--moe-grouped-gemm"),
    ("--moe-router-padding-for-fp8", "", "--moe-router-padding-for-fp8"),
    ("--fp8-format e4m3 --moe-router-padding-for-quantization --moe-token-dispatcher-type allgather", "",
     "--moe-token-dispatcher-type"),
    # overlap
    ("--overlap-moe-expert-parallel-comm", "", "--expert-model-parallel-size"),
    ("--overlap-moe-expert-parallel-comm --expert-model-parallel-size 8 --moe-shared-expert-overlap "
     "--moe-shared-expert-intermediate-size 512", "", "--moe-shared-expert-overlap"),
    ("--overlap-moe-expert-parallel-comm --expert-model-parallel-size 8 --recompute-granularity selective "
     "--recompute-modules moe", "", "--recompute-modules"),
    ("--delay-wgrad-compute", "", "--delay-wgrad-compute"),
    ("--delay-wgrad-compute --overlap-moe-expert-parallel-comm --expert-model-parallel-size 8 --transformer-impl local", "",
     "--transformer-impl"),
    ("--ep-overlap-early-attn-memory-release", "", "--ep-overlap-early-attn-memory-release"),
    ("--overlap-dispatch-backward-with-experts-wgrad --overlap-moe-expert-parallel-comm --expert-model-parallel-size 8", "",
     "--overlap-dispatch-backward-with-experts-wgrad"),
    ("--overlap-param-gather --overlap-grad-reduce", "", "--use-distributed-optimizer"),
    ("--overlap-param-gather --use-distributed-optimizer", "", "--overlap-grad-reduce"),
    ("--overlap-param-gather-with-optimizer-step --use-distributed-optimizer", "",
     "--overlap-param-gather-with-optimizer-step"),
    # recompute and offload
    ("--recompute-granularity full --recompute-method uniform", "", "--recompute-num-layers"),
    ("--recompute-granularity full --recompute-num-layers 1", "", "--recompute-method"),
    ("--recompute-granularity selective --recompute-num-layers 1", "", "--recompute-num-layers"),
    ("--recompute-granularity selective --recompute-modules moe_act", "", "--moe-grouped-gemm"),
    ("--recompute-granularity selective --recompute-modules mla_up_proj", "", "--multi-latent-attention"),
    ("--recompute-granularity selective --recompute-modules embedding", "", "--recompute-modules"),
    (f"--moe-layer-recompute {FULL}", "", "--moe-layer-recompute"),
    (f"--distribute-saved-activations {FULL}", "", "--distribute-saved-activations"),
    ("--fine-grained-activation-offloading", "", "--offload-modules"),
    ("--fine-grained-activation-offloading --offload-modules attn_proj", "", "--offload-modules"),
    ("--fine-grained-activation-offloading --offload-modules moe_act --recompute-granularity selective "
     "--recompute-modules moe", "", "--recompute-modules"),
    ("--fine-grained-activation-offloading --offload-modules moe_act --transformer-impl local", "", "--transformer-impl"),
    ("--cpu-offloading-num-layers 64", "", "--cpu-offloading-num-layers"),
    ("--cpu-offloading-num-layers 1 --recompute-activations", "", "--cpu-offloading-num-layers"),
    ("--optimizer-cpu-offload", "", "--use-precision-aware-optimizer"),
    ("--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer --fp8-format e4m3 "
     "--fp8-recipe blockwise --fp8-param-gather", "", "--fp8-param-gather"),
    # precision
    ("--fp16", "", "--bf16"),
    ("--accumulate-allreduce-grads-in-fp32 --main-grads-dtype bf16 --use-precision-aware-optimizer", "",
     "--main-grads-dtype"),
    ("--fp8-format e4m3 --fp4-format e2m1", "", "--fp4-format"),
    ("--fp8-format e4m3 --fp8-amax-history-len 0", "", "--fp8-amax-history-len"),
    ("--fp8-format e4m3 --fp8-amax-history-len 1000000000000", "", "--fp8-amax-history-len"),
    ("--fp8-format e4m3 --fp8-margin -2000", "", "--fp8-margin"),
    ("--fine-grained-activation-offloading --offload-modules expert_fc1 --min-offloaded-tensor-size -3", "", "--min-offloaded-tensor-size"),
    ("--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-end-in-bf16 1000", "", "--num-layers-at-end-in-bf16"),
    ("--fp8-output-proj", "", "--fp8-format"),
    ("--fp8-output-proj --fp8-format e4m3 --fp8-recipe blockwise", "", "--fp8-recipe"),
    ("--fp8-param-gather --use-distributed-optimizer", "", "--fp8-format"),
    ("--fp8-param-gather --fp8-format e4m3", "", "--use-distributed-optimizer"),
    ("--reuse-grad-buf-for-mxfp8-param-ag", "", "--fp8-param-gather"),
    ("--exp-avg-dtype bf16", "", "--use-precision-aware-optimizer"),
    ("--use-precision-aware-optimizer --optimizer sgd", "", "--optimizer"),
    ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", "--bf16", "--min-loss-scale"),
    ("--fp16-lm-cross-entropy", "", "--fp16-lm-cross-entropy"),
    ("--deterministic-mode --cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "", "--cross-entropy-loss-fusion"),
    # optimizer
    ("", "--lr", "--lr"),
    ("--min-lr 1.0", "", "--min-lr"),
    ("--lr-warmup-init 1.0", "", "--lr-warmup-init"),
    ("--weight-decay-incr-style linear", "", "--start-weight-decay"),
    ("--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1", "", "--end-weight-decay"),
    ("--start-weight-decay 0.1", "", "--start-weight-decay"),
    ("--optimizer muon --use-distributed-optimizer --ckpt-format torch_dcp", "", "--ckpt-format"),
    ("--optimizer lion --use-torch-fsdp2", "", "--use-torch-fsdp2"),
    ("--use-torch-fsdp2 --use-precision-aware-optimizer --main-params-dtype fp16", "--use-distributed-optimizer", "--main-params-dtype"),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-precision-aware-optimizer --main-grads-dtype bf16", "", "--main-grads-dtype"),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy optim_grads --ddp-reduce-scatter-with-fp32-accumulation",
     "", "--ddp-reduce-scatter-with-fp32-accumulation"),
    ("--use-precision-aware-optimizer --optimizer-cpu-offload --offload-optimizer-states", "", "--optimizer-cpu-offload"),
    ("--use-megatron-fsdp --use-torch-fsdp2 --ckpt-format fsdp_dtensor", "", "--use-megatron-fsdp"),
    ("--use-megatron-fsdp", "", "--ckpt-format"),
    ("--use-torch-fsdp2 --expert-model-parallel-size 2", "", "--expert-model-parallel-size"),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", "",
     "--pipeline-schedule"),
    ("--ddp-average-in-collective --calculate-per-token-loss", "", "--ddp-average-in-collective"),
    # batches and length
    ("--global-batch-size 12", "--global-batch-size", "--global-batch-size"),
    ("--eval-global-batch-size 12", "", "--eval-global-batch-size"),
    ("--eval-micro-batch-size 4", "", "--eval-micro-batch-size"),
    ("--decrease-batch-size-if-needed --global-batch-size 4", "--global-batch-size", "--global-batch-size"),
    ("--step-batch-size-schedule 0:16", "", "--step-batch-size-schedule"),
    ("--step-batch-size-schedule 5:16", "--global-batch-size", "--step-batch-size-schedule"),
    ("--rampup-batch-size 8 3 100", "", "--rampup-batch-size"),
    ("--train-samples 1000", "", "--train-samples"),
    ("", "--train-iters", "--train-iters"),
    ("--lr-decay-samples 100", "", "--lr-decay-samples"),
    ("--train-samples 1000 --lr-decay-iters 5", "--train-iters", "--lr-decay-iters"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "", "--lr-warmup-fraction"),
    ("--lr-warmup-iters 10", "", "--lr-warmup-iters"),
    ("--lr-decay-style WSD", "", "--lr-wsd-decay-iters"),
    ("", "--eval-interval", "--eval-interval"),
    ("--log-interval 10 --log-memory-interval 15", "", "--log-memory-interval"),
    # data
    ("--data-path /d", "", "--mock-data"),
    ("--split 0,0,0", "", "--split"),
    ("--split 0,1,1", "", "--split"),
    ("--split 1,a", "", "--split"),
    ("--split 98,1,1 --train-data-path /d", "--mock-data", "--split"),
    ("--multiple-validation-sets --train-data-path /t --valid-data-path /a /b --validation-set-names a", "--mock-data",
     "--validation-set-names"),
    # numbers
    ("--distributed-timeout-seconds-after-init 0", "", "--distributed-timeout-seconds-after-init"),
    ("--num-layers 1000000000000", "--num-layers", "--num-layers"),
    ("--train-iters 99999999999999999999", "--train-iters", "--train-iters"),
    ("--seed 8589934592", "", "--seed"),
    ("--dump-step one DIR", "", "--dump-step"),
    ("--dump-step -1 DIR", "", "--dump-step"),
    ("--exit-signal-handler --exit-signal SIGKILL", "", "--exit-signal"),
    # attention
    ("--multi-latent-attention --group-query-attention", "", "--multi-latent-attention"),
    ("--multi-latent-attention --rope-type rope", "", "--no-rope-fusion"),
    ("--rope-type yarn", "", "--rope-type"),
    ("--mla-down-proj-fusion", "", "--mla-down-proj-fusion"),
    ("--mtp-num-layers 1 --position-embedding-type learned_absolute", "", "--mtp-num-layers"),
    ("--no-position-embedding --position-embedding-type learned_absolute", "", "--no-position-embedding"),
    ("--qk-clip --qk-clip-alpha 1.5", "", "--qk-clip-alpha"),
    (DELTA, "", "--linear-attention-freq"),
    (f"{DELTA} --linear-attention-freq 4 --linear-num-value-heads 24", "", "--linear-num-value-heads"),
    ("--no-rope-freq [0,1]", "", "--no-rope-freq"),
    # cuda graphs
    ("--external-cuda-graph --cuda-graph-impl local", "", "--external-cuda-graph"),
    ("--cuda-graph-modules kitchen", "", "--cuda-graph-modules"),
    ("--cuda-graph-impl transformer_engine --cuda-graph-modules moe", "", "--moe-pad-expert-input-to-capacity"),
    ("--cuda-graph-impl transformer_engine --cuda-graph-modules moe_preprocess", "", "--cuda-graph-modules"),
    ("--cuda-graph-impl full_iteration", "", "--no-check-for-nan-in-loss-and-grad"),
    ("--cuda-graph-impl full_iteration --cuda-graph-modules attn --no-check-for-nan-in-loss-and-grad", "",
     "--cuda-graph-modules"),
    (f"--cuda-graph-impl local {FULL}", "", "--recompute-granularity"),
    # checkpoints and old flags
    ("--save out", "", "--save-interval"),
    ("--save out --save-interval 0", "", "--save-interval"),
    ("--auto-resume", "", "--auto-resume"),
    ("--save out --save-interval 10 --save-retain-interval 25", "", "--save-retain-interval"),
    ("--ckpt-convert-format torch_dist --load x", "", "--ckpt-convert-save"),
    ("--use-distributed-optimizer --disable-gloo-process-groups --ckpt-format torch", "", "--disable-gloo-process-groups"),
    ("--moe-use-upcycling", "", "--save"),
    ("--moe-use-upcycling --save out --save-interval 5 --ffn-hidden-size 1024 --moe-ffn-hidden-size 300", "",
     "--moe-ffn-hidden-size"),
    ("--batch-size 4", "", "--batch-size"),
    ("--warmup 4", "", "--warmup"),
)  # fmt: skip

SOUND = (
    ("", ""),
    ("--num-experts 0", "--num-experts"),
    ("--tp-comm-overlap", ""),
    ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", ""),
    ("--attention-backend local", ""),
    ("--moe-layer-freq '([0]*2+[1]*6)'", ""),
    ("--moe-layer-freq 2", ""),
    ("--batch-size 4 --global-batch-size 64", "--micro-batch-size --global-batch-size"),
    ("--checkpoint-activations", ""),
    ("--num-virtual-stages-per-pipeline-rank 1", ""),
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2 "
     "--num-layers-per-virtual-pipeline-stage 1", ""),
    ("--moe-router-topk 1 --moe-router-score-function sigmoid", "--moe-router-topk"),
    ("--moe-router-num-groups 3", ""),
    ("--moe-token-dispatcher-type flex --moe-deepep-num-sms 24", ""),
    ("--eval-iters 0", "--eval-interval"),
    ("--train-samples 1000 --lr-warmup-samples 100", "--train-iters"),
    ("--lr-warmup-fraction 0.1", ""),
    ("--rampup-batch-size 8 8 100 --global-batch-size 32", "--global-batch-size"),
    ("--decrease-batch-size-if-needed --global-batch-size 20", "--global-batch-size"),
    ("--weight-decay-incr-style cosine --start-weight-decay 0.0 --end-weight-decay 0.1", ""),
    ("--optimizer muon --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce", ""),
    ("--split 99,1", "--mock-data"),
    ("--load x --use-checkpoint-args", "--num-layers --hidden-size --num-attention-heads --max-position-embeddings"),
)  # fmt: skip


def name_of(line) -> str:
    return f"{line[0]} | -{line[1]}"


@pytest.mark.parametrize("line", BROKEN, ids=name_of)
def test_broken_lines_name_the_flag(line):
    added, removed, flag = line
    _, violations = findings(changed(added, removed), 8)
    assert flag in flags_of(violations), "; ".join(map(str, violations))
    for violation in violations:
        assert violation.flags[0] in violation.message or violation.kind != "rule" or "ranks" in violation.message


@pytest.mark.parametrize("line", SOUND, ids=name_of)
def test_sound_lines_pass(line):
    _, violations = findings(changed(*line), 8)
    assert not violations


def test_every_rule_speaks_somewhere():
    """A rule that no broken line breaks is dead, or untested."""
    silent = {rule for area in rules.AREAS for rule in area.CHECKS}
    for added, removed, _ in (*BROKEN, *LIMITS):
        settings, _ = understand(changed(added, removed), 8)
        facts = gather(settings, 8)
        silent -= {rule for rule in silent if list(rule(settings, facts))}
    assert not silent, sorted(rule.__name__ for rule in silent)


def test_every_function_of_an_area_is_listed():
    """A rule that is written but not listed would never run."""
    for area in rules.AREAS:
        listed = {*area.RESOLVE, *area.CHECKS}
        written = [
            item
            for name, item in vars(area).items()
            if callable(item) and getattr(item, "__module__", "") == area.__name__ and not name.startswith("_")
        ]
        rule_like = [item for item in written if item.__code__.co_varnames[:2] in (("s", "f"), ("s", "_f"))]
        assert set(rule_like) == listed, area.__name__


def test_all_violations_at_once():
    line = changed(
        "--moe-router-topk 9 --moe-router-enable-expert-bias --global-batch-size 12 --save out --split 1,2,3,4",
        "--moe-router-topk --global-batch-size",
    )
    _, violations = findings(line, 8)
    assert {
        "--moe-router-topk",
        "--moe-router-enable-expert-bias",
        "--global-batch-size",
        "--save",
        "--split",
    } <= flags_of(violations)
    assert len(violations) == 5


def test_unknown_ranks_leave_their_rules_out():
    line = changed("--tensor-model-parallel-size 3 --num-attention-heads 6 --kv-channels 64 --seq-length 1023", "--num-attention-heads --seq-length")
    settings, violations = findings(line, None)
    assert not violations
    assert sum("--world-size" in note for note in settings.notes) == 1
    assert findings(line, 8)[1]


def test_messages_are_short_and_whole():
    for added, removed, _ in BROKEN:
        for violation in findings(changed(added, removed), 8)[1]:
            if violation.kind == "rule":
                assert violation.message.endswith("."), violation
                assert len(violation.message) < 420, violation


def _values(option) -> tuple[str, ...]:
    if option.takes == 0:
        return ("",)
    return tuple(map(str, option.choices[:2] if option.choices else ("-1", "0", "7", "nan")))


def test_no_value_makes_the_rules_fail():
    base = base_line()
    for option in OPTIONS.values():
        count = option.takes if isinstance(option.takes, int) else 1
        for value in _values(option):
            settings, _ = understand([*base, option.spellings[-1], *[value] * count], None if value == "7" else 8)
            check_machine(settings, {}, 9)
            rules.derived(settings, 8)


def test_resolving_twice_changes_nothing():
    for added, removed in SOUND:
        settings, _ = understand(changed(added, removed), 8)
        before = dict(settings.values)
        rules.resolve(settings, 8)
        assert settings.values == before, added


OFFLOAD = "--fine-grained-activation-offloading --transformer-impl transformer_engine --offload-modules"


@pytest.mark.parametrize(("added", "removed", "told"), [
    (f"{SELECTIVE} moe shared_experts core_attn", DENSE, ["--recompute-modules moe: ", "--recompute-modules shared_experts: "]),
    (f"{OFFLOAD} expert_fc1 moe_act attn_norm", DENSE, ["--offload-modules expert_fc1: ", "--offload-modules moe_act: "]),
    (f"{SELECTIVE} shared_experts moe", "", ["--recompute-modules shared_experts: "]),
    (f"{SELECTIVE} shared_experts --moe-shared-expert-intermediate-size 64", "", []),
    (f"{SELECTIVE} mlp", "", ["--recompute-modules mlp: "]),
    (f"{SELECTIVE} mlp --moe-layer-freq 2", "", []),
    (f"{SELECTIVE} mlp", DENSE, []),
    (f"{OFFLOAD} expert_fc1 moe_act", "", []),
])
def test_parts_that_no_layer_has(added, removed, told):
    settings, _ = understand(changed(added, removed), 8)
    notes = [note for note in settings.notes if "no layer of this model has" in note]
    assert [note.split(": ")[0] + ": " for note in notes] == told


TRITON = "--triton-kernels"


@pytest.mark.parametrize(("added", "removed", "told"), [
    (f"{TRITON} permute router grouped-gemm rope", DENSE, {"permute", "router", "grouped-gemm"}),
    (f"{TRITON} all", DENSE, set()),
    (f"{TRITON} permute router grouped-gemm activation --moe-grouped-gemm", "", set()),
    (f"{TRITON} grouped-gemm", "--moe-grouped-gemm", {"grouped-gemm"}),
    (f"{TRITON} grouped-gemm quantize --moe-grouped-gemm --fp8-format e4m3", "", {"grouped-gemm"}),
    (f"{TRITON} grouped-gemm --moe-grouped-gemm --fp8-format e4m3 --first-last-layers-bf16", "", set()),
    (f"{TRITON} quantize", "", {"quantize"}),
    (f"{TRITON} quantize --fp4-format e2m1", "", set()),
    (f"{TRITON} router --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0", "", {"router"}),
    (f"{TRITON} router --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0 --moe-z-loss-coeff 1e-3", "", set()),
    (f"{TRITON} permute --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --expert-model-parallel-size 2",
     "--moe-token-dispatcher-type", {"permute"}),
    (f"{TRITON} permute --moe-token-dispatcher-type flex --expert-model-parallel-size 2", "--moe-token-dispatcher-type", set()),
    (f"{TRITON} norm --normalization LayerNorm", "--normalization", {"norm"}),
    (f"{TRITON} norm --normalization RMSNorm", "--normalization", set()),
    (f"{TRITON} norm --normalization LayerNorm --qk-l2-norm", "--normalization", set()),
])
def test_kernels_that_nothing_runs_on(added, removed, told):
    settings, _ = understand(changed(added, removed), 8)
    assert {flag for flag, _ in settings.idle if flag.startswith(TRITON)} == {f"{TRITON} {name}" for name in told}


def test_notes_tell_kinder_outcomes():
    for added, removed, word in (
        ("--tp-comm-overlap", "", "--tp-comm-overlap"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "", "--cross-entropy-fusion-impl"),
        ("--checkpoint-activations", "", "--checkpoint-activations"),
        ("--batch-size 2", "--micro-batch-size", "--micro-batch-size 2"),
        ("--sequence-parallel", "", "--sequence-parallel"),
        ("--data-path /d", "--mock-data", "969, 30, 1"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-shared-expert-overlap "
         "--moe-shared-expert-intermediate-size 64 --expert-model-parallel-size 2", "--moe-token-dispatcher-type", "one call of HybridEP"),
        ("--overlap-dispatch-backward-with-experts-wgrad --moe-token-dispatcher-type allgather --expert-model-parallel-size 2",
         "--moe-token-dispatcher-type", "gathers in one call"),
        ("--overlap-dispatch-backward-with-experts-wgrad --expert-model-parallel-size 1", "", "there is no exchange"),
        ("--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 64 --expert-model-parallel-size 1", "",
         "there is no exchange to compute beside"),
        ("--moe-token-dispatcher-type flex --moe-router-padding-for-quantization --fp8-format e4m3 --expert-model-parallel-size 2",
         "--moe-token-dispatcher-type", "no further tokens fill"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-permute-fusion --expert-model-parallel-size 2",
         "--moe-token-dispatcher-type", "HybridEP sorts tokens itself"),
        (f"{SELECTIVE} moe_act --moe-grouped-gemm", "", "this program's own experts never keep"),
        ("--fp8-format e4m3 --first-last-layers-bf16 --num-layers-at-start-in-bf16 4 --num-layers-at-end-in-bf16 4", "", "quantises none of them"),
    ):
        settings, _ = understand(changed(added, removed), 8)
        assert sum(word in note for note in settings.notes) == 1, (added, settings.notes)
