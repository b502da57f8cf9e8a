"""What other code may ask of a kind of sublayer: attention, a recurrence, a convolution, an MLP or experts."""

from dataclasses import dataclass

VARIANT = "experimental_attention_variant"
"""Destination of the flag that names a kind of attention."""


@dataclass(frozen=True, kw_only=True)
class Sublayer:
    """Declaration of a kind of sublayer.

    Attributes:
        key: unlike that of all others; that of its rules, arguments/rules/<key>.py, if it has some.
        name: name in messages and in the manual.
        built_by: class of moe_trainer/layers that computes it, as module.Class; "" for an MLP and experts.
        letter: of --hybrid-layer-pattern; "" if a hybrid model cannot have it.
        variant: value of --experimental-attention-variant that selects it; None if other flags or letters do.
        old_variants: earlier spellings of that value.
        unbuilt_variants: values for relatives of it that are not built, with which its rules hold too.
        in_some_layers: --linear-attention-freq says which layers have it; the others have softmax attention.
        is_attention: tokens attend to keys of other tokens.
        has_delta_rule: its state is a matrix that the delta rule updates.
        decays_by_channel: the state decays at a rate for each channel of a key, not at one rate.
        gate_rank: destination of the flag with the width of the latents of decays and output gates; "" without latents.
        reads_latents: queries, keys and values are made from latents.
        has_indexer: an indexer selects keys, at least in some of its layers.
        selects_keys: it is latent attention, and the indexer of every layer selects its keys.
        compresses_keys: it attends to a window and to compressed keys.
        is_megatron_attention: Megatron-Core computes it, not Transformer Engine, from normalized latents.
        has_legacy_places: the torch format of checkpoints has places for its parameters.
        kernel: name in --triton-kernels of its kernels; "" without.
        is_upstream: the main branch of Megatron-LM has it.
        has_rules: arguments/rules/<key>.py says what else it needs.
        toy_sizes: sizes of small models, by destination, where the flag is given.
        draws: destinations of flags that no other sublayer reads, with the values that random tests draw from.
    """

    key: str
    name: str
    built_by: str = ""
    letter: str = ""
    variant: str | None = None
    old_variants: tuple[str, ...] = ()
    unbuilt_variants: tuple[str, ...] = ()
    in_some_layers: bool = False
    is_attention: bool = False
    has_delta_rule: bool = False
    decays_by_channel: bool = False
    gate_rank: str = ""
    reads_latents: bool = False
    has_indexer: bool = False
    selects_keys: bool = False
    compresses_keys: bool = False
    is_megatron_attention: bool = False
    has_legacy_places: bool = False
    kernel: str = ""
    is_upstream: bool = True
    has_rules: bool = False
    toy_sizes: tuple[tuple[str, int], ...] = ()
    draws: tuple[tuple[str, tuple], ...] = ()

    @property
    def is_convolution(self) -> bool:
        """Whether it mixes positions without a state."""
        return self.in_some_layers and not self.has_delta_rule

    @property
    def words(self) -> str:
        """The flag that names it, with its value, as usually spelled."""
        return f"--{VARIANT.replace('_', '-')} {self.variant}"

    @property
    def mention(self) -> str:
        """The flag that names it, with its value, as a template of Settings.violation."""
        return f"{{{VARIANT}:flag}} {self.variant}"
