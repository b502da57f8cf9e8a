#!/usr/bin/env python3
"""Measure scripts/convert.py on a synthetic model: rate and peak memory, both directions, and after a kill -9.

    python scripts/bench_convert.py FOLDER [--gigabytes 20] [--workers 1] [--to ours]

FOLDER needs space for three times the model (twice with --to ours, that direction alone); what is written there is
removed at the end. The model is a Qwen3-MoE in bf16 with random weights. Source of the recorded run:
scripts/bench_results/convert.md.
"""

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments.paths import local_path
from scripts.bench_common import Report, make_parser

HIDDEN, EXPERTS, FFN, HEADS, HEAD_DIM, GROUPS = 2048, 64, 768, 16, 128, 4
LAYERS_PER_FILE = 4
EXPERT = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_norm": (HEAD_DIM,),
    "self_attn.k_norm": (HEAD_DIM,),
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (GROUPS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (GROUPS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate": (EXPERTS, HIDDEN),
    **{f"mlp.experts.{expert}.{name}": shape for expert in range(EXPERTS) for name, shape in EXPERT.items()},
}


def make_folder(folder: Path, gigabytes: float, vocab_size: int = 65536) -> int:
    """Write a Hugging Face folder of about `gigabytes`, some layers at a time. Returns its size in bytes."""
    import torch
    from safetensors.torch import save_file

    layer_size = sum(map(math.prod, LAYER.values()))
    num_layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocab_size * HIDDEN) / layer_size))
    folder.mkdir(parents=True)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": num_layers,
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": FFN,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    # a random part of it replaces a random tensor: drawing 20 GB takes longer than all else
    sizes = [math.prod(shape) for shape in LAYER.values()] + [vocab_size * HIDDEN]
    noise = torch.randn(max(sizes) + 4096).mul_(0.02).to(torch.bfloat16)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        start = int(torch.randint(4096, ()))
        return noise[start : start + math.prod(shape)].view(shape).clone()

    files = [
        {
            "model.embed_tokens.weight": (vocab_size, HIDDEN),
            "model.norm.weight": (HIDDEN,),
            "lm_head.weight": (vocab_size, HIDDEN),
        }
    ]
    for first in range(0, num_layers, LAYERS_PER_FILE):
        layers = range(first, min(first + LAYERS_PER_FILE, num_layers))
        files.append({f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in LAYER.items()})
    weight_map = {}
    for number, shapes in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({key: draw(shape) for key, shape in shapes.items()}, folder / name)
        weight_map |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure_peak(argv: list[str]) -> tuple[float, int]:
    """Run a conversion. Returns the seconds, and the largest resident set of any of its processes in bytes.

    Raises:
        RuntimeError: if it fails.
    """
    # VmHWM: getrusage's peak of a process includes what its parent had
    code = """
import re, resource, sys
sys.path.insert(0, sys.argv.pop(1))
from moe_trainer.commands.convert import main
code = main(sys.argv[1:])
own = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print("peak", max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""
    start = time.monotonic()
    process = subprocess.run([sys.executable, "-c", code, ROOT, *argv], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {process.stderr}")
    return time.monotonic() - start, int(process.stdout.rsplit("peak ", 1)[1]) * 1024


def resume_after_kill(argv: list[str], staging: Path, num_files: int) -> tuple[int, float, int]:
    """Kill a conversion when half of its files are written, and run it again.

    Returns:
        The number of files that were written, and seconds and peak memory of the second run.
    """
    process = subprocess.Popen([sys.executable, ROOT / "scripts/convert.py", *argv], stdout=subprocess.DEVNULL)
    while process.poll() is None and len(list(staging.glob(".*.done"))) < num_files // 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(list(staging.glob(".*.done"))), *measure_peak(argv)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=local_path)
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--workers", default="1")
    parser.add_argument("--to", choices=("ours",), help="one direction only")
    options = parser.parse_args()
    base = options.folder / "convert_bench"
    try:
        size = make_folder(base / "hf", options.gigabytes)
        report = Report("# Conversion of a synthetic model")
        model = f"{size / 1e9:.1f} GB in bf16, {options.workers} worker(s)"
        report.start_table(model, "seconds", "MB/s", "peak resident memory of a process")
        directions = (("Hugging Face to ours", "hf", "ours"), ("ours to Hugging Face", "ours", "back"))
        for name, source, target in directions[:1] if options.to else directions:
            argv = [str(base / source), str(base / target), "--workers", options.workers, "--max-shard-size", "1"]
            seconds, peak = measure_peak(argv)
            report.add_row(name, f"{seconds:.0f}", f"{size / seconds / 1e6:.0f}", f"{peak / 1e9:.2f} GB")
        shutil.rmtree(base / target)
        staging = base / (f"{target}/release.converting" if options.to else f"{target}.converting")
        num_written, seconds, peak = resume_after_kill(argv, staging, int(size / 1e9))
        name = f"the same, killed by kill -9 with {num_written} files written; the second run"
        report.add_row(name, f"{seconds:.0f}", "", f"{peak / 1e9:.2f} GB")
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
