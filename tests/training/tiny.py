"""A tiny model's flags: enough of everything to train in milliseconds, on data that needs no file."""

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 32 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
    "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 "
    "--lr-decay-style cosine --min-lr 1e-4 --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-interval 1000 --eval-iters 0"
).split()
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 120".split()
