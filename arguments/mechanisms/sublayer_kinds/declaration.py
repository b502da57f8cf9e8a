"""What other code may ask of a kind of sublayer: attention, a recurrence, a convolution, an MLP or experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from arguments.mechanisms.support import Mechanism, Support

VARIANT = "experimental_attention_variant"
"""Destination of the flag that names a kind of attention."""
PATTERN = "hybrid_layer_pattern"
"""Destination of the flag with a letter for each layer."""


class SublayerCapability(Enum):
    """What flags may demand of a sublayer; the value is the text of the manual."""

    INDEXER_LOSS = "`--dsa-indexer-loss-coeff`"
    SINKS = "`--softmax-type` other than vanilla"
    WINDOW = "`--window-size`"
    CHUNKS = "`--attention-chunk-size`"
    TEMPERATURE = "`--attn-temperature-tuning`"
    QK_CLIP = "`--qk-clip`"
    MAX_LOGITS = "`--log-max-attention-logit`"
    MULTIPLIER = "`--attention-multiplier`"
    LAYERS_WITHOUT_ROPE = "`--no-rope-freq`"
    LAYER_ROTARY_BASES = "`--rotary-base-per-layer`"
    ROTARY_PERCENT = "`--rotary-percent`"
    FUSED_DOWN_PROJ = "`--mla-down-proj-fusion`"
    HEAD_GATES = "`--head-wise-attn-gate`"
    CHANNEL_GATES = "`--attention-output-gate`"
    VALUE_WIDTH = "`--value-channels`"
    VALUE_SCALE = "`--attention-value-scale`"
    WINDOW_GROUPS = "`--window-num-query-groups`"
    WINDOW_SINKS = "`--window-softmax-type`"
    NORMS_AFTER_ROPE = "`--qk-layernorm-after-rope`"
    NORMS_OF_ALL_HEADS = "`--qk-layernorm-all-heads`"
    OUTPUT_BIAS = "`--add-attention-output-bias`"
    LINEAR_LAYERS = "`--linear-attention-freq`"
    NORM_AFTER = "`--post-self-attn-layernorm`"
    NORMED_RESIDUAL = "`--apply-residual-connection-post-layernorm`"
    MTP = "`--mtp-num-layers`"
    ADAPTERS = "`--lora-dim`"
    ADAPTER_DROPOUT = "`--lora-dropout`"
    FROZEN_BACKBONE = "`--freeze-backbone`"
    MUP = "`--use-mup`"
    GRAPHS = "`--cuda-graph-impl`"
    QUANTIZED = "GEMMs of 8 and 4 bits"
    DOCUMENTS = "`--reset-attention-mask`, `--dataloader-inter-document-masking`"
    PACKED_SAMPLES = "`--use-varlen-dataset`, `--sft`"
    CONTEXT_PARALLEL = "`--context-parallel-size`"
    OFFLOAD = "`--fine-grained-activation-offloading`"
    UPCYCLING = "`--moe-use-upcycling`"
    LEGACY_FORMAT = "`--ckpt-format torch`, `--ckpt-convert-format torch`"


OF_SCORES = (
    SublayerCapability.SINKS,
    SublayerCapability.WINDOW,
    SublayerCapability.CHUNKS,
    SublayerCapability.TEMPERATURE,
    SublayerCapability.QK_CLIP,
    SublayerCapability.MAX_LOGITS,
    SublayerCapability.MULTIPLIER,
    SublayerCapability.WINDOW_SINKS,
)
"""Of attention that has scores of keys."""
OF_ROTATION = (
    SublayerCapability.LAYERS_WITHOUT_ROPE,
    SublayerCapability.LAYER_ROTARY_BASES,
    SublayerCapability.ROTARY_PERCENT,
)
"""Of attention that may rotate queries and keys by their positions."""
OF_HEADS = (
    SublayerCapability.CHANNEL_GATES,
    SublayerCapability.VALUE_WIDTH,
    SublayerCapability.VALUE_SCALE,
    SublayerCapability.WINDOW_GROUPS,
    SublayerCapability.NORMS_AFTER_ROPE,
    SublayerCapability.NORMS_OF_ALL_HEADS,
)
"""Of attention whose queries, keys and values are heads of one projection."""
OF_LATENTS = (SublayerCapability.FUSED_DOWN_PROJ, SublayerCapability.HEAD_GATES)
"""Of attention whose queries, keys and values are made from latents."""
OF_ATTENTION = (
    *OF_SCORES,
    *OF_ROTATION,
    *OF_HEADS,
    *OF_LATENTS,
    SublayerCapability.INDEXER_LOSS,
    SublayerCapability.OUTPUT_BIAS,
)
OF_TRAINING = (
    SublayerCapability.MTP,
    SublayerCapability.ADAPTERS,
    SublayerCapability.ADAPTER_DROPOUT,
    SublayerCapability.MUP,
    SublayerCapability.GRAPHS,
    SublayerCapability.QUANTIZED,
    SublayerCapability.DOCUMENTS,
    SublayerCapability.PACKED_SAMPLES,
    SublayerCapability.CONTEXT_PARALLEL,
    SublayerCapability.OFFLOAD,
)
"""Of all sublayers, whatever they compute."""


@dataclass(frozen=True, kw_only=True, eq=False)  # hashable, whatever its fields
class SublayerDeclaration(Mechanism[SublayerCapability]):
    """Declaration of a kind of sublayer.

    Attributes:
        key: unlike that of all others; that of its rules, arguments/rules/<key>.py, if it has some.
        name: name in messages and in the manual.
        capabilities: for each whether it acts, or why not.
        built_by: class of moe_trainer/layers that computes it, as module.Class; "" for an MLP and experts.
        letter: of --hybrid-layer-pattern; "" if a hybrid model cannot have it.
        variant: value of --experimental-attention-variant that selects it; None if other flags or letters do.
        switch: destination of the flag that asks for it without naming it, or of the pattern that alone can.
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
        kernel: name in --triton-kernels of its kernels; "" without.
        is_upstream: the main branch of Megatron-LM has it.
        has_rules: arguments/rules/<key>.py says what else it needs.
        toy_sizes: sizes of small models, by destination, where the flag is given.
        draws: destinations of flags that no other sublayer reads, with the values that random tests draw from.
    """

    key: str
    name: str
    capabilities: Mapping[SublayerCapability, Support]
    built_by: str = ""
    letter: str = ""
    variant: str | None = None
    switch: str = ""
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
    kernel: str = ""
    is_upstream: bool = True
    has_rules: bool = False
    toy_sizes: tuple[tuple[str, int], ...] = ()
    draws: tuple[tuple[str, tuple], ...] = ()

    def __post_init__(self):
        self.check_declares_all(SublayerCapability)

    @property
    def is_convolution(self) -> bool:
        """Whether it mixes positions without a state."""
        return self.in_some_layers and not self.has_delta_rule

    @property
    def lettered(self) -> str:
        """Its letter, and what it stands for."""
        return f"{self.letter} ({self.name})"

    @property
    def mention_of_letter(self) -> str:
        """What asks for it in a hybrid model, as a template of Settings.violation."""
        return f"{{{PATTERN}:flag}} with {self.lettered}"

    @property
    def words(self) -> str:
        """The flag that names it, with its value, as usually spelled."""
        return f"--{VARIANT.replace('_', '-')} {self.variant}"

    @property
    def mention(self) -> str:  # type: ignore[override]  # another attribute, read only
        """What asks for it, as a template of Settings.violation; "" of a sublayer that needs no flag."""
        if self.variant is not None:
            return f"{{{VARIANT}:flag}} {self.variant}"
        if self.switch == PATTERN:
            return self.mention_of_letter
        return f"{{{self.switch}:flag}}" if self.switch else ""
