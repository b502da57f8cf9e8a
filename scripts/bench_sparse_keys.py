"""Measure sparse attention with its selected keys gathered or all others masked: one layer, forward and backward.

    python scripts/bench_sparse_keys.py [--lengths 4096 8192 16384 32768] [--heads 8] [--loss no yes] [--write]

The layer is latent attention with its indexer, in fp32. Every figure is of a separate process, with one thread:
seconds of the processor (other work on the machine counts little), and by how much the largest memory of the process
grew. Both forms compute on the same weights and inputs; the largest difference of their outputs and input gradients is
shown. "by itself" is what --dsa-attention-form auto takes (arguments/sparse_attention.py). --loss yes: the indexer
learns from the selected keys, as in training. --write records the table after every row.
"""

import argparse
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from arguments import parse_args
from arguments.container import Arguments
from arguments.sparse_attention import use_gathered_keys
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.layers.mla import MultiLatentAttention
from moe_trainer.layers.rotary import make_rotary
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group, ParallelState
from scripts.bench_common import Report, make_parser, provenance_line

TOPK, FORMS = 256, ("masked", "gathered")
MODEL = (
    "--num-layers 1 --hidden-size 256 --ffn-hidden-size 256 --num-attention-heads {heads} --multi-latent-attention "
    "--q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --seq-length {length} --max-position-embeddings {length} --micro-batch-size 1 "
    "--global-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --transformer-impl local "
    "--lr 1e-3 --train-iters 1 --eval-iters 0 --experimental-attention-variant dsa --dsa-indexer-n-heads 2 "
    "--dsa-indexer-head-dim 32 --dsa-indexer-topk {topk} --dsa-attention-form {form}"
)
INDEXER_LOSS = "--dsa-indexer-loss-coeff 0.1 --dsa-indexer-use-sparse-loss"


def make_arguments(heads: int, length: int, form: str, loss: str) -> Arguments:
    flags = MODEL.format(heads=heads, length=length, topk=TOPK, form=form)
    return parse_args(f"{flags} {INDEXER_LOSS if loss == 'yes' else ''}".split(), 1)


def measure(heads: int, length: int, form: str, loss: str, results: str) -> None:
    """Save the seconds and bytes of one form, its output and the gradient of its input."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = make_arguments(heads, length, form, loss).model
    layer = MultiLatentAttention(model, ParallelState.single(), name="layer", layer_number=1, factory=LOCAL)
    with torch.no_grad():
        for param in layer.parameters():
            param.normal_(std=param.shape[-1] ** -0.5) if param.dim() == 2 else param.fill_(1.0)
    x, grad = (torch.randn(length, 1, model.hidden_size) for _ in range(2))
    rope = make_rotary(model, SequenceShard(Group.single("cp"))).tables(length, torch.device("cpu"))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    y = layer(x.requires_grad_(), rope, None)
    middle = time.process_time()
    y.backward(grad)
    end, after = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = (after - before) * 1024
    figures = {"forward": middle - start, "backward": end - middle, "bytes": size, "y": y.detach(), "grad": x.grad}
    torch.save(figures, results)


def compare(heads: int, length: int, loss: str, folder: str) -> list[object]:
    """Return one row of the table."""
    figures = []
    for form in FORMS:
        path = f"{folder}/{form}.pt"
        flags = f"--heads {heads} --lengths {length} --loss {loss} --one {form}".split()
        command = [sys.executable, __file__, *flags, path]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        figures.append(torch.load(path))
    masked, gathered = figures
    difference = max(
        float((masked[key] - gathered[key]).abs().max() / masked[key].abs().max()) for key in ("y", "grad")
    )
    masked_s, gathered_s = (form["forward"] + form["backward"] for form in figures)
    return [
        f"{length:,}",
        heads,
        loss,
        *(f"{form['forward']:.2f} + {form['backward']:.2f}" for form in figures),
        f"{masked_s / gathered_s:.2f}",
        *(f"{form['bytes'] / 2**20:.0f}" for form in figures),
        f"{difference:.0e}",
        "gathered" if use_gathered_keys(make_arguments(heads, length, "auto", loss)) else "masked",
    ]


def main() -> None:
    """Run the command line."""
    parser = make_parser(__doc__, "sparse_keys.md")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=int, nargs="+", default=[8])
    parser.add_argument("--loss", nargs="+", choices=("no", "yes"), default=["no"])
    parser.add_argument("--one", nargs=2, metavar=("FORM", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        form, results = options.one
        measure(options.heads[0], options.lengths[0], form, options.loss[0], results)
        return
    title = f"# Sparse attention, {TOPK} selected keys per query"
    report = Report(title, "", f"{provenance_line()}, one thread, fp32. Method: scripts/bench_sparse_keys.py.")
    times = "masked, s (forward + backward)", "gathered, s", "masked / gathered"
    memory = "masked, MiB", "gathered, MiB"
    report.start_table("positions", "heads", "indexer learns", *times, *memory, "apart by", "by itself")
    with tempfile.TemporaryDirectory() as folder:
        for loss, heads, length in itertools.product(options.loss, options.heads, options.lengths):
            report.add_row(*compare(heads, length, loss, folder))
            if options.write:
                report.write("sparse_keys.md")


if __name__ == "__main__":
    main()
