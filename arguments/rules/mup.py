"""Maximal update parametrization: the width multiplier and what follows from it."""

import math

from arguments.mup import width_mult
from arguments.rules.derived_sizes import DerivedSizes, positive
from arguments.settings import Settings


def resolve_width_mult(s: Settings, _f: DerivedSizes) -> None:
    """Derive the width multiplier; as in Megatron-LM its flag is ignored, and --mup-output-mult 1 means unset."""
    asked = s.mup_width_mult if s.given("mup_width_mult") else None
    if asked is not None and not 0 < asked < math.inf:
        return  # refused by the rules on numbers
    if not s.use_mup:
        s.set_derived("mup_width_mult", 1.0, "no --use-mup")
        return
    if s.mup_base_hidden_size is None:
        s.set_derived("mup_base_hidden_size", s.hidden_size, "as --hidden-size")
    if not positive(s.hidden_size) or not positive(s.mup_base_hidden_size):
        return
    width = width_mult(s.use_mup, s.hidden_size, s.mup_base_hidden_size)
    if asked not in (None, width):
        s.note(
            f"{s.flag('mup_width_mult')} {asked}: {width:g} instead, --hidden-size {s.hidden_size} / "
            f"--mup-base-hidden-size {s.mup_base_hidden_size}."
        )
    s.set_derived("mup_width_mult", width, "hidden size / --mup-base-hidden-size")
    if s.mup_output_mult == 1.0 and width != 1.0:
        s.set_derived("mup_output_mult", 1.0 / width, "1 / --mup-width-mult")


def note_unscaled_parts(s: Settings, _f: DerivedSizes) -> None:
    """Note what --use-mup does not scale: decoupled rates, Xavier draws, MLA scores."""
    if not s.use_mup:
        return
    if s.decoupled_lr is not None:
        s.note("--use-mup: embedding and output layer follow --decoupled-lr, whatever the width.")
    if s.init_method_xavier_uniform:
        s.note(
            "--use-mup: --init-method-xavier-uniform draws all weights by their own shapes; muP scales none of them."
        )
    if s.multi_latent_attention:
        s.note("--use-mup: latent attention divides its scores by the root of the key size in any case.")
