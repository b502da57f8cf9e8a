#!/usr/bin/env python3
"""Measure scripts/convert.py on a synthetic model: rate and peak memory, both directions, and after a kill -9.

    python scripts/bench_convert.py FOLDER [--gigabytes 20] [--workers 1] [--to ours]

FOLDER needs space for three times the model (twice with --to ours, that direction alone); what is written there is
removed at the end. The model is a Qwen3-MoE in bf16 with random weights. Source of the recorded run:
scripts/bench_results/convert.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

HIDDEN, EXPERTS, WIDTH, HEADS, HEAD, GROUPS = 2048, 64, 768, 16, 128, 4
_LAYER = EXPERTS * 3 * HIDDEN * WIDTH + EXPERTS * HIDDEN + 2 * HIDDEN * HEAD * (HEADS + GROUPS) + 2 * HIDDEN + 2 * HEAD
_PER_FILE = 4  # layers


def make_folder(folder: Path, gigabytes: float, vocabulary: int = 65536) -> int:
    """Write a Hugging Face folder of about so many 10^9 bytes, layer by layer. Returns: its bytes."""
    import torch
    from safetensors.torch import save_file

    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocabulary * HIDDEN) / _LAYER))
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": HIDDEN,
        "head_dim": HEAD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    noise = (
        torch.randn(1 << 24).mul_(0.02).to(torch.bfloat16)
    )  # a random part of it replaces a random tensor: drawing 20 GB takes longer than all else

    def draw(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        repeats = -(-count // (len(noise) - 4096)) + 1
        start = int(torch.randint(4096, ()))
        return (
            noise.repeat(repeats)[start : start + count].view(shape).clone()
            if repeats > 2
            else noise[start : start + count].view(shape).clone()
        )

    table, files = {}, -(-layers // _PER_FILE) + 1
    for number in range(files):
        tensors = {}
        if number == 0:
            tensors = {
                "model.embed_tokens.weight": draw(vocabulary, HIDDEN),
                "model.norm.weight": draw(HIDDEN),
                "lm_head.weight": draw(vocabulary, HIDDEN),
            }
        for layer in range((number - 1) * _PER_FILE, min(number * _PER_FILE, layers)) if number else ():
            name = f"model.layers.{layer}"
            tensors |= {
                f"{name}.{leaf}.weight": draw(*shape)
                for leaf, shape in (
                    ("input_layernorm", (HIDDEN,)),
                    ("post_attention_layernorm", (HIDDEN,)),
                    ("self_attn.q_norm", (HEAD,)),
                    ("self_attn.k_norm", (HEAD,)),
                    ("self_attn.q_proj", (HEADS * HEAD, HIDDEN)),
                    ("self_attn.k_proj", (GROUPS * HEAD, HIDDEN)),
                    ("self_attn.v_proj", (GROUPS * HEAD, HIDDEN)),
                    ("self_attn.o_proj", (HIDDEN, HEADS * HEAD)),
                    ("mlp.gate", (EXPERTS, HIDDEN)),
                )
            }
            for expert in range(EXPERTS):
                tensors |= {
                    f"{name}.mlp.experts.{expert}.{leaf}.weight": draw(*shape)
                    for leaf, shape in (
                        ("gate_proj", (WIDTH, HIDDEN)),
                        ("up_proj", (WIDTH, HIDDEN)),
                        ("down_proj", (HIDDEN, WIDTH)),
                    )
                }
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        save_file(tensors, folder / file)
        table |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure_peak(words: list[str]) -> tuple[float, int]:
    """Run a conversion as a command. Returns: seconds, and the largest resident set of any of its processes in bytes.

    Raises: RuntimeError when it fails.
    """
    # VmHWM: getrusage's peak of a process includes what its parent had
    code = (
        "import re, resource, sys; sys.path.insert(0, sys.argv.pop(1)); from scripts.convert import main; code = "
        "main(sys.argv[1:]); "
        "own = int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); "
        "print('peak', max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)); sys.exit(code)"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(_ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return time.monotonic() - begun, int(done.stdout.rsplit("peak ", 1)[1]) * 1024


def resume_after_kill(words: list[str], staging: Path, files: int) -> tuple[int, float, int]:
    """Kill a conversion when half of its files are written, and run it again.

    Returns: (files that were written, seconds and peak memory of the second run).
    """
    process = subprocess.Popen(
        [sys.executable, str(_ROOT / "scripts" / "convert.py"), *words], stdout=subprocess.DEVNULL
    )
    while process.poll() is None and len(list(staging.glob(".*.done"))) < files // 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(list(staging.glob(".*.done"))), *measure_peak(words)


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--workers", default="1")
    parser.add_argument("--to", choices=("ours",), help="one direction only")
    options = parser.parse_args(words)
    base, tail = options.folder / "convert_bench", ["--workers", options.workers, "--max-shard-size", "1"]
    try:
        size = make_folder(base / "hf", options.gigabytes)
        print(
            f"| {size / 1e9:.1f} GB in bf16, {options.workers} worker(s) | seconds | MB/s | peak resident memory of a "
            "process |\n|---|---|---|---|",
            flush=True,
        )
        directions = (("Hugging Face to ours", "hf", "ours"), ("ours to Hugging Face", "ours", "back"))
        for name, source, target in directions[:1] if options.to else directions:
            words = [str(base / source), str(base / target), *tail]
            seconds, peak = measure_peak(words)
            print(f"| {name} | {seconds:.0f} | {size / seconds / 1e6:.0f} | {peak / 1e9:.2f} GB |", flush=True)
        shutil.rmtree(base / target)
        staging = base / (f"{target}/release.converting" if options.to else f"{target}.converting")
        there, seconds, peak = resume_after_kill(words, staging, int(size / 1e9))
        print(
            f"| the same, killed by kill -9 with {there} files written; the second run | {seconds:.0f} | | "
            f"{peak / 1e9:.2f} GB |",
            flush=True,
        )
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
