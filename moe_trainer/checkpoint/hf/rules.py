"""Tensor rules of a family of Hugging Face models, for one kind of layer.

A rule relates a native tensor to Hugging Face tensors, with the layout of each and a transform between them. Mapping
files have the rules of the families; names.py expands them for the layers of a model. Several spellings of a rule are
read (files of the hub name every expert; transformers may stack them); the first one is written.

Symbols of the layouts are sizes of a model (`model_sizes` in names.py; docs/add_a_family.md has a table). Numbers are
literal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_trainer.checkpoint.hf.transforms import Transform


@dataclass(frozen=True)
class Rule:
    """A rule for the tensors of one kind of layer.

    Attributes:
        native: name inside the layer, or several that are made of the same Hugging Face tensors.
        spellings: NAME LAYOUT [, NAME LAYOUT ...] each. `{e}` is the expert; a spelling without it whose layout begins
            with X is a stack over experts.
        needs: flag that the rule requires, after "not " the flag that excludes it.
        origin: file and line of the rule, for messages.
    """

    native: tuple[str, ...]
    spellings: tuple[str, ...]
    transform: Transform
    needs: str
    origin: str = field(compare=False)

    def applies(self, flags: Mapping[str, Any]) -> bool:
        return not self.needs or bool(flags.get(self.needs.removeprefix("not "))) != self.needs.startswith("not ")


@dataclass(frozen=True)
class Names:
    """Rules of a family.

    Attributes:
        model: of the embedding.
        head: of the final norm and the output layer.
        layer: of every layer with softmax attention.
        moe: of MoE layers.
        dense: of dense layers.
        mtp: of a multi-token prediction depth, besides its layer.
        linear: replaces `layer` for layers with linear attention.
        mamba: of Mamba-2 layers.
        layer_prefix: of the tensors of layer {l}.
        mtp_prefixes: of the tensors of an MTP depth and of its layer; {l} continues the layers, {d} starts at zero.
        mtp_copies: tensors of an MTP depth that repeat another one of the model, with its name.
        module_prefixes: prefixes of tensors in files, with those that the modules of transformers have instead.
        left_out: prefixes of tensors that are not read.
        native_layers: native layers that one Hugging Face layer makes.
    """

    model: tuple[Rule, ...]
    head: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    moe: tuple[Rule, ...]
    dense: tuple[Rule, ...]
    mtp: tuple[Rule, ...]
    linear: tuple[Rule, ...]
    mamba: tuple[Rule, ...]
    layer_prefix: str
    mtp_prefixes: tuple[str, str]
    mtp_copies: Mapping[str, str]
    module_prefixes: Mapping[str, str]
    left_out: tuple[str, ...] = ()
    native_layers: int = 1

    def module_name(self, name: str) -> str:
        """Return the name of a tensor in the model of transformers."""
        for stored, own in self.module_prefixes.items():
            if name.startswith(stored):
                return own + name.removeprefix(stored)
        return name
