"""Training from a Hugging Face folder: losses and gradient norms equal a plain AdamW loop over transformers' model."""

import pytest
import torch
from checkpoint.hf.models import MODELS, SEQ, make, train
from commands import read_metrics, run

import arguments
from moe_trainer.checkpoint.resolve import read_saved_args
from moe_trainer.data.build import batch_format, build_datasets
from moe_trainer.data.loader import make_batch
from moe_trainer.data.tokenizer import build_tokenizer

pytest.importorskip("transformers")

LR, DECAY, BETAS, EPSILON = 1e-3, 0.1, (0.9, 0.95), 1e-5
FLAGS = (
    f"--seq-length {SEQ} --micro-batch-size 2 --lr {LR} --lr-decay-style constant "
    f"--weight-decay {DECAY} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPSILON} --clip-grad 1 --mock-data --eval-iters 0 --log-interval 1 "
    "--moe-router-load-balancing-type none --moe-router-bias-update-rate 0 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--no-rope-fusion --use-checkpoint-args --finetune"
).split()

PARALLEL = "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
LONG = ("qwen3", "olmoe")


def read_batches(argv, steps, size):
    """The tokens and labels of every step, [size, SEQ] each."""
    args = arguments.parse_args(argv, world_size=1, checkpoint=read_saved_args(argv[-1]))
    tokenizer = build_tokenizer(args.data)
    train, fmt = build_datasets(args.data, args.training, tokenizer).train, batch_format(args.data, tokenizer)
    for step in range(steps):
        batch = make_batch(train, range(step * size, step * size + size), fmt)
        yield batch.tokens_BS, batch.labels_BS


def largest_error(name, mapping, folder, steps, size):
    """Train both models, compare every step, and return the largest relative difference of a loss."""
    theirs = make(name)
    theirs.save_pretrained(folder / "hf")
    sizes = f"--global-batch-size {size} --train-iters {steps}".split()
    argv = [*FLAGS, *sizes, "--load", str(folder / "hf")]
    parallel = mapping.split() if "num_experts_per_tok" in MODELS[name][1] else mapping.split()[:3]
    finished = run(
        [*argv[:-2], *parallel, *argv[-2:], "--metrics-file", "metrics.jsonl"], folder, world_size=2 if mapping else 1
    )
    assert finished.returncode == 0, finished.stderr
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "lm loss" in record]
    assert len(records) == steps
    vectors = {key for key, param in theirs.named_parameters() if param.dim() == 1 or key.endswith(("bias", "A_log"))}
    groups = [
        {
            "params": [param for key, param in theirs.named_parameters() if (key in vectors) == alone],
            "weight_decay": decay,
        }
        for alone, decay in ((False, DECAY), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, LR, BETAS, EPSILON)
    errors = []
    for record, (tokens, labels) in zip(records, read_batches(argv, steps, size), strict=True):
        loss = torch.nn.functional.cross_entropy(train(theirs)(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        for param in theirs.parameters():
            if param.grad is None:  # an expert without a token; stacks of experts have zeros there
                param.grad = torch.zeros_like(param)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert record["lm loss"] == pytest.approx(loss.item(), rel=1e-5), record["iteration"]
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-3), record["iteration"]
        errors.append(abs(record["lm loss"] / loss.item() - 1))
    return max(errors)


# one dense family and one with experts: two microbatches, and moments of AdamW that several steps have changed
@pytest.mark.parametrize("mapping", ["", PARALLEL], ids=["one process", "TP2 SP EP2"])
@pytest.mark.parametrize("name", LONG)
def test_five_steps_equal_transformers_with_adamw(name, mapping, tmp_path, record_property):
    error = largest_error(name, mapping, tmp_path, steps=5, size=4)
    if mapping:
        record_property("loss", error)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LONG])
def test_two_steps_equal_transformers_with_adamw(name, tmp_path, record_property):
    record_property("loss", largest_error(name, PARALLEL, tmp_path, steps=2, size=2))
