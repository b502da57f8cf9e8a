"""Measure sparse attention with its selected keys gathered or all others masked: one layer, forward and backward.

    python scripts/bench_sparse_keys.py [--lengths 4096 8192 16384 32768] [--heads 8] [--loss no yes] [--write]

The layer is latent attention with its indexer, in fp32. Every figure is of a process of its own, with one thread:
seconds of the processor (other work on the machine counts little), and by how much the largest memory of the process
grew. Both forms compute on the same weights and inputs; the largest difference of their outputs and input gradients is
shown. "by itself" is what --dsa-attention-form auto takes (arguments/sparse_attention.py). --loss yes: the indexer
learns from the chosen keys, as in training. --write records the table in scripts/bench_results/sparse_keys.md, as far
as it has come.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from arguments import parse_args
from arguments.container import Arguments
from arguments.sparse_attention import use_gathered_keys
from moe_trainer.layers.layer_factory import LOCAL
from moe_trainer.layers.mla import MultiLatentAttention
from moe_trainer.layers.rotary import make_rotary
from moe_trainer.parallel.sequence import SequenceShard
from moe_trainer.parallel.state import Group, ParallelState
from scripts.bench_common import provenance_line, write_result

TOPK, FORMS = 256, ("masked", "gathered")
MODEL = (
    "--num-layers 1 --hidden-size 256 --ffn-hidden-size 256 --num-attention-heads {heads} --multi-latent-attention "
    "--q-lora-rank 96 --kv-lora-rank 64 "
    "--qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm --normalization RMSNorm "
    "--disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --seq-length {length} "
    "--max-position-embeddings {length} "
    "--micro-batch-size 1 --global-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 "
    "--transformer-impl local --lr 1e-3 --train-iters 1 --eval-iters 0 "
    "--experimental-attention-variant dsa --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 32 --dsa-indexer-topk {topk} "
    "--dsa-attention-form {form}"
)


def make_arguments(heads: int, length: int, form: str, loss: bool) -> Arguments:
    words = MODEL.format(heads=heads, length=length, topk=TOPK, form=form).split()
    return parse_args(words + ("--dsa-indexer-loss-coeff 0.1 --dsa-indexer-use-sparse-loss".split() if loss else []), 1)


def one(heads: int, length: int, form: str, loss: bool, results: Path) -> None:
    """Measure one form and leave the seconds, the bytes, the output and the gradient of the input."""
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
    torch.save(
        {
            "forward": middle - start,
            "backward": end - middle,
            "bytes": (after - before) * 1024,
            "y": y.detach(),
            "grad": x.grad,
        },
        results,
    )


def compare(heads: int, length: int, loss: bool, folder: Path) -> str:
    """One row of the table."""
    found = {}
    for form in FORMS:
        path = folder / f"{form}.pt"
        words = [
            sys.executable,
            __file__,
            "--one",
            form,
            str(path),
            "--heads",
            str(heads),
            "--lengths",
            str(length),
            "--loss",
            "yes" if loss else "no",
        ]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found[form] = torch.load(path)
    masked, gathered = (found[form] for form in FORMS)
    apart = max(float((masked[name] - gathered[name]).abs().max() / masked[name].abs().max()) for name in ("y", "grad"))
    cells = [f"{length:,}", str(heads), "yes" if loss else "no"]
    cells += [f"{each['forward']:.2f} + {each['backward']:.2f}" for each in (masked, gathered)]
    cells.append(f"{(masked['forward'] + masked['backward']) / (gathered['forward'] + gathered['backward']):.2f}")
    cells += [f"{each['bytes'] / 2**20:.0f}" for each in (masked, gathered)]
    cells += [
        f"{apart:.0e}",
        "gathered" if use_gathered_keys(make_arguments(heads, length, "auto", loss)) else "masked",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=int, nargs="+", default=[8])
    parser.add_argument("--loss", nargs="+", choices=("no", "yes"), default=["no"])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("FORM", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one(options.heads[0], options.lengths[0], options.one[0], options.loss == ["yes"], Path(options.one[1]))
        return
    rows = [
        "| positions | heads | indexer learns | masked, s (forward + backward) | gathered, s | masked / gathered | "
        "masked, MiB | gathered, MiB "
        "| apart by | by itself |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print(*rows, sep="\n", flush=True)
    head = [
        "# Sparse attention, 256 chosen keys of so many positions",
        "",
        f"{provenance_line()}, one thread, fp32. See scripts/bench_sparse_keys.py.",
        "",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for loss, heads, length in itertools.product(options.loss, options.heads, options.lengths):
            rows.append(compare(heads, length, loss == "yes", Path(folder)))
            print(rows[-1], flush=True)
            if options.write:
                write_result("sparse_keys.md", "\n".join(head + rows))


if __name__ == "__main__":
    main()
