"""A Hugging Face folder of any size, and the memory that a conversion takes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[3]
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


def make_folder(folder: Path, gigabytes: float, vocab_size: int) -> None:
    """Write a Hugging Face folder of about `gigabytes`, some layers at a time."""
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


def measure_peak(argv: list[str]) -> int:
    """Run a conversion. Returns the largest resident set of any of its processes in bytes.

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
    process = subprocess.run([sys.executable, "-c", code, ROOT, *argv], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {process.stderr}")
    return int(process.stdout.rsplit("peak ", 1)[1]) * 1024
