"""Muon: its old name, the polynomials that it knows, and its scale with muP."""

from collections.abc import Iterator

from arguments.mechanisms.optimizer_kinds.muon import COEFFICIENTS, MUON
from arguments.mechanisms.optimizers import get_optimizer
from arguments.rules.derived_sizes import DerivedSizes
from arguments.settings import Settings, Violation


def resolve_old_dist_muon(s: Settings, _f: DerivedSizes) -> None:
    if s.optimizer == "dist_muon":
        s.note(f"{s.shown('optimizer')} is an old name: taken as --optimizer muon --use-distributed-optimizer.")
        s.set_derived("optimizer", "muon", "from dist_muon")
        s.set_derived("use_distributed_optimizer", True, "from dist_muon")


def note_scale_with_mup(s: Settings, _f: DerivedSizes) -> None:
    if s.use_mup and get_optimizer(s) is MUON and s.muon_scale_mode == "spectral":
        s.note(
            "--use-mup: matrices that Muon updates keep --muon-scale-mode spectral; unit_rms_norm is the mode for muP."
        )


def check_muon_coefficients(s: Settings, _f: DerivedSizes) -> Iterator[Violation]:
    if get_optimizer(s) is MUON and s.muon_coefficient_type not in COEFFICIENTS:
        yield s.violation("{muon_coefficient_type} must be one of {accepted}.", accepted=", ".join(COEFFICIENTS))
