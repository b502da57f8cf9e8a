"""Measure building the sample index of a large corpus: time and peak memory of one build, and of mapping it again.

    python scripts/bench_index.py [--documents 10000000] [--mean-length 600] [--seq-length 4096]
        [--epochs 1] [--blend 10]

The token file is sparse (only the index is real data), so the corpus needs no disk; the caches are written to a
temporary folder.
"""

import os
import resource
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.data.blend import build_blend_index, normalize
from moe_trainer.data.dataset import DatasetConfig, GPTDataset
from moe_trainer.data.indexed import IndexedDataset, write_indexed_dataset
from scripts.bench_common import make_parser


def write_sparse_corpus(prefix: str, documents: int, mean_length: int) -> int:
    """Write a real index over a .bin of the right size without content. Returns the number of tokens."""
    lengths = np.random.default_rng(0).integers(1, 2 * mean_length, documents, dtype=np.int32)
    with write_indexed_dataset(prefix, np.uint16) as builder:
        builder.add_raw(b"", lengths.tolist(), range(1, documents + 1))
    tokens = int(lengths.sum(dtype=np.int64))
    os.truncate(prefix + ".bin", 2 * tokens)
    return tokens


def timed(label: str, action):
    """Print time and memory of an action. Returns its result."""
    start, start_cpu = time.perf_counter(), time.process_time()
    result = action()
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{label:<60} {wall:8.2f} s wall {cpu:8.2f} s CPU   peak {peak:.2f} GiB so far")
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--mean-length", type=int, default=600)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--blend", type=int, default=10, help="datasets of a blend of 10 million samples")
    args = parser.parse_args()
    tokenizer = SimpleNamespace(unique_identifiers=OrderedDict())
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/corpus"
        tokens = write_sparse_corpus(prefix, args.documents, args.mean_length)
        samples = (args.epochs * tokens - 1) // args.seq_length
        size = f"{args.documents} documents, {tokens} tokens, {args.epochs} epochs"
        print(f"{size}, {samples} samples of {args.seq_length}")
        config = DatasetConfig(args.seq_length, 1234, tokenizer, cache_path=f"{folder}/cache")

        def dataset():
            return GPTDataset(IndexedDataset(prefix), prefix, 0, args.documents, samples, "train", config)

        first = timed("open the file, count tokens, plan epochs", dataset)
        timed("build document, sample, shuffle index; write the cache", first.write_cache)
        second = timed("open again", dataset)
        timed("map the cache", second.load)
        timed("1,000 samples, pages not yet in memory", lambda: [second.tokens(i) for i in range(1000)])
        timed("the same 1,000 samples again", lambda: [second.tokens(i) for i in range(1000)])
    weights = normalize(np.random.default_rng(0).random(args.blend) + 0.05)
    timed(f"blend of {args.blend} datasets, 10 million samples", lambda: build_blend_index(weights, 10_000_000))


if __name__ == "__main__":
    main()
