"""Flags of the model change the function of given weights as their fields say, and the estimate counts what they save.

Each flag of the model and the experts is tried on a toy, new ones too. A flag that needs others than the toy has is not tried here.
"""

import zlib
from dataclasses import dataclass

import pytest
import torch
from memory.measure import measure_retained
from memory.one_pass import GROUPED, MODEL, SEQ, batch, build, compute_loss

from arguments import parse_args
from arguments.container import OPTIONS
from arguments.flag_status import get_flag_status
from arguments.parse import resolve_command_line
from moe_trainer.estimate.activations import chunk_activations
from moe_trainer.layers.pass_inputs import PassInputs
from moe_trainer.ops import grouped_gemm
from moe_trainer.parallel.params import get_param_info
from tests.arguments.test_flags_alone import lines_with

BASE = (
    f"{MODEL} {GROUPED} --num-layers 2 --hidden-size 32 --ffn-hidden-size 80 --moe-ffn-hidden-size 48 --moe-router-dtype fp32 "
    "--group-query-attention --num-query-groups 2 --moe-shared-expert-intermediate-size 40"
).split()
TRIED = [
    option
    for dest, option in OPTIONS.items()
    if option.section in ("model", "moe") and "adapters" not in option.restore and get_flag_status(dest)[0] == "acts"
]
SAME_HERE = {
    "attn_temperature_tuning": "it begins beyond the positions of the toy",
    "moe_router_load_balancing_type": "what selects experts is refused with the toy's loss",
    "mtp_num_layers": "the losses of further tokens are those of training",
}
"""Flags that change the function, but not of this toy."""
MISCOUNTED = {
    "attention_dropout": "its mask is inside the kernels that the list is about",
    "attention_chunk_size": "the list has the scores of all keys",
    "moe_expert_capacity_factor": "the list has the tokens that are dropped",
    "moe_n_hash_layers": "the list has the indices of a choice",
    "window_size": "the list has the scores of all keys",
}


@dataclass(frozen=True)
class Toy:
    """The loss without training, and bytes that layers save: listed by the estimate, and measured."""

    loss: float
    listed: int
    left: int

    @classmethod
    def of(cls, words: list[str]) -> "Toy":
        args = parse_args([*BASE, *words], 1)
        (chunk,) = build(args)
        for param in chunk.parameters():
            param.data.copy_(0.3 * torch.randn(param.shape, generator=seeded(get_param_info(param).names[0])))
        for name, tensor in chunk.state_dict().items():
            if name.endswith("expert_bias"):
                tensor.copy_(torch.randn(tensor.shape, generator=seeded(name)))
        chunk.eval()
        with torch.no_grad():
            loss = compute_loss(chunk, 1).item()
        chunk.train()
        rope = None if chunk.rotary is None else chunk.rotary.tables(SEQ, torch.device("cpu"))
        size = (SEQ, args.training.micro_batch_size, args.model.hidden_size * chunk.num_streams)
        x_SBH = torch.randn(size, generator=seeded("x"), dtype=chunk.params_dtype).requires_grad_()

        def forward():
            chunk.activations.begin_pass(*(rope or ()))
            ids_T = batch(1)[0].t().flatten()
            return chunk._layers(x_SBH.clone(), PassInputs((rope,) * len(chunk.rotaries), token_ids_T=ids_T))

        forward().sum().backward()
        left, _result = measure_retained(forward)
        entries = chunk_activations(args, chunk.layout, device="cpu")
        listed = sum(each.num_bytes for each in entries if not each.on_host and not each.name.startswith("mtp"))
        return cls(loss, listed, left.device)

    def has_loss_of(self, other: "Toy") -> bool:
        return abs(self.loss - other.loss) <= 1e-5 * abs(other.loss)


def seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def acting_lines(option):
    """Yield the lines that give a flag another value, with which it is neither refused nor noted."""
    without = resolve_command_line(BASE, 1)[0].values[option.dest]
    starts = tuple(f"{spelling}{end}" for spelling in option.spellings for end in " :")
    for words in lines_with(option):
        settings, violations = resolve_command_line([*BASE, *words], 1)
        is_noted = any(line.startswith(starts) for line in settings.lines())
        if not violations and not is_noted and settings.values[option.dest] != without:
            yield words


@pytest.fixture(scope="module")
def toys():
    """The toy without a flag, and by destination with it: the first legal value that changes the loss, or the last one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm, "token_bucket", lambda count: count)  # its surplus depends on the routing
        plain, found = Toy.of([]), {}
        for option in TRIED:
            for words in acting_lines(option):
                found[option.dest] = Toy.of(words)
                if not found[option.dest].has_loss_of(plain):
                    break
    assert len(found) > 50
    return plain, found


def test_flags_that_change_the_function_are_restored_always(toys):
    """Only those: --use-checkpoint-args and exports to Hugging Face go by it."""
    plain, found = toys
    same = {dest for dest, toy in found.items() if toy.has_loss_of(plain)}
    always = {dest for dest in found if "always" in OPTIONS[dest].restore}
    never = {dest for dest in found if "never" in OPTIONS[dest].restore and OPTIONS[dest].role != "noise"}
    assert always & same == set(SAME_HERE), "do they act? else another restore= than always"
    assert never - same == set(), 'they change the function of the weights: restore="always"'


def test_estimate_counts_what_flags_save(toys):
    plain, found = toys
    errors = {}
    for dest, toy in found.items():
        error, change = (toy.listed - toy.left) - (plain.listed - plain.left), abs(toy.left - plain.left)
        if abs(error) > 0.1 * change + 128:
            errors[dest] = f"{toy.left - plain.left} more bytes saved, {toy.listed - plain.listed} listed"
    assert errors.keys() == MISCOUNTED.keys(), f"count them in moe_trainer/estimate/saved_*.py: {errors}"
