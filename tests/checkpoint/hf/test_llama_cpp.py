"""llama.cpp on exported folders: its converter reads them, and its engine gives the log-probabilities and greedy tokens of this program.

The engine is the package xllamacpp. The converter is a script of llama.cpp's source, which the source package of
llama-cpp-python contains (docs/consumers.md).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint.hf.models import MODELS, VOCAB, load_ours, make, run_convert
from commands import environment

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
if importlib.util.find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed (MOE_TRAINER_TEST_WITH=xllamacpp)", allow_module_level=True)
SOURCE = Path(os.environ.get("MOE_TRAINER_LLAMA_CPP", ""))
if not (SOURCE / "convert_hf_to_gguf.py").is_file():
    pytest.skip("no convert_hf_to_gguf.py of llama.cpp (MOE_TRAINER_LLAMA_CPP=FOLDER)", allow_module_level=True)

# the converter knows the tokenizers of published models by a hash of what they make of a text
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "f32"]
runpy.run_path(sys.path[0] + "/convert_hf_to_gguf.py", run_name="__main__")
"""
GENERATE = """
import json, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.port = sys.argv[1], 64, 1, False, 0
params.cpuparams.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
for name, value in json.loads(sys.argv[5]).items():
    setattr(params, name, value)
server = xllamacpp.Server(params)
asked = dict(max_tokens=6, temperature=0.0, ignore_eos=True, cache_prompt=False, logprobs=int(sys.argv[3]))
found = [server.handle_completions({"prompt": prompt, **asked}) for prompt in json.load(open(sys.argv[2]))]
json.dump([completion["choices"][0]["logprobs"]["content"] for completion in found], open(sys.argv[4], "w"))
"""


def write_tokenizer(folder):
    """Write one of bytes, with one merge: llama.cpp demands some."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 1]
    names = [*alphabet, alphabet[0] + alphabet[1]]
    model = tokenizers.models.BPE({name: number for number, name in enumerate(names)}, [(names[0], names[1])])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[0], "bos_token": names[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def call(script, *words):
    argv = [sys.executable, "-c", script, *map(str, words)]
    env = environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def exported(name, folder, **changes):
    """Return our model of random weights, and write its export `hf`."""
    make(name, **changes).save_pretrained(folder / "theirs")
    assert run_convert(folder / "theirs", folder / "ck") == 0
    assert run_convert(folder / "ck", folder / "hf", "--to", "hf", "--model-type", name) == 0
    write_tokenizer(folder / "hf")
    return load_ours(folder / "ck").eval()


def largest_difference(ours, folder, **settings):
    """Give the engine `settings`. Return the largest difference of log-probabilities along the engine's greedy texts, and whether ours are the same."""
    call(CONVERT, SOURCE, folder / "hf", folder / "model.gguf")
    prompts = torch.randint(VOCAB, (3, 6), generator=torch.Generator().manual_seed(3)).tolist()
    (folder / "prompts.json").write_text(json.dumps(prompts))
    files = (folder / "model.gguf", folder / "prompts.json", VOCAB, folder / "found.json")
    call(GENERATE, *files, json.dumps(settings))
    worst, same = 0.0, True
    for prompt, content in zip(prompts, json.loads((folder / "found.json").read_text()), strict=True):
        tokens = torch.tensor([prompt + [step["id"] for step in content]])
        with torch.no_grad():
            logits = ours(tokens, torch.arange(tokens.shape[1])[None])[0, len(prompt) - 1 : -1, :VOCAB]
        same = same and torch.equal(logits.argmax(-1), tokens[0, len(prompt) :])
        for step, expected in zip(content, torch.log_softmax(logits.float(), -1).tolist(), strict=True):
            assert len(step["top_logprobs"]) == VOCAB
            worst = max(worst, *(abs(expected[each["id"]] - each["logprob"]) for each in step["top_logprobs"]))
    return worst, same


def gpt_oss(swiglu_limit=7.0, **yarn):
    """Return the changes that make the toy's clamp and YaRN those that the engine computes, except `yarn`."""
    rope = {**MODELS["gpt_oss"][1]["rope_parameters"], "beta_fast": 32.0, "truncate": True, **yarn}
    return {"swiglu_limit": swiglu_limit, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("mixtral", {}, {}),
        ("qwen3_moe", {"mlp_only_layers": []}, {}),
        ("gpt_oss", gpt_oss(), {}),
        ("gpt_oss", gpt_oss(beta_fast=2.0), {"yarn_beta_fast": 2.0}),
    ],
)
def test_engine_gives_our_log_probabilities_and_greedy_tokens(name, changes, settings, tmp_path):
    worst, same = largest_difference(exported(name, tmp_path, **changes), tmp_path, **settings)
    assert worst < 1e-4 and same


@pytest.mark.parametrize("changes", [{"truncate": False}, {"beta_fast": 2.0}, {"swiglu_limit": 0.7}])
def test_engine_computes_gpt_oss_with_fixed_settings(changes, tmp_path):
    """An engine that reads one of these needs a line fewer in docs/consumers.md."""
    worst, _ = largest_difference(exported("gpt_oss", tmp_path, **gpt_oss(**changes)), tmp_path)
    assert worst > 5e-3
