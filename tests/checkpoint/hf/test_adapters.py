"""Adapters of a checkpoint: merged into a Hugging Face folder, and as an adapter that PEFT loads, with equal logits."""

import pytest
import torch
from checkpoint.hf.models import batch, compute_logits, flags_for, make, run_convert
from safetensors.torch import load_file

from arguments.lora import is_adapter
from moe_trainer.checkpoint.manager import load, save
from moe_trainer.checkpoint.options import CheckpointState, LoadOptions, SaveOptions
from moe_trainer.model.build import build_chunks
from moe_trainer.parallel.params import get_param_info
from moe_trainer.parallel.state import ParallelState

transformers = pytest.importorskip("transformers")
LORA = "--lora-dim 3 --lora-alpha 6".split()


def adapted(name, folder, *flags):
    """A model of transformers, and ours with its weights and random adapters, saved: (theirs, ours, checkpoint)."""
    theirs = make(name)
    theirs.save_pretrained(folder / "hf")
    args, ps = flags_for(folder / "hf", *LORA, *flags), ParallelState.single()
    (ours,) = build_chunks(args, ps, theirs.config.get_text_config().vocab_size)
    load(folder / "hf", [ours], None, ps, LoadOptions(args=args.as_dict(), load_optim=False, load_rng=False))
    torch.manual_seed(5)
    for param in ours.parameters():
        if is_adapter(get_param_info(param).names[0]):
            param.data = 0.3 * torch.randn(param.shape)
    record = args.as_dict() | {"padded_vocab_size": theirs.config.get_text_config().vocab_size}
    save(folder / "ours", CheckpointState(iteration=1, args=record), [ours], None, ps, SaveOptions(save_rng=False))
    return theirs, ours.eval(), folder / "ours"


def assert_same_logits(ours, theirs, base):
    tokens, _, positions = batch()
    with torch.no_grad():
        expected = ours(tokens, positions)
    actual = compute_logits(theirs, tokens)
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (compute_logits(base, tokens) - expected).abs().max() > 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_adapters_have_the_same_effect_merged_and_in_peft(name, tmp_path):
    peft = pytest.importorskip("peft")
    base, ours, checkpoint = adapted(name, tmp_path)
    assert run_convert(checkpoint, tmp_path / "merged", "--model-type", name) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    assert_same_logits(ours, merged, base)
    assert run_convert(checkpoint, tmp_path / "adapter", "--to", "peft", "--model-type", name) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    state = peft.get_peft_model_state_dict(loaded)
    assert state.keys() == written.keys() and all(torch.equal(state[key], value) for key, value in written.items())
    assert_same_logits(ours, loaded, base)
