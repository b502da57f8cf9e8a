"""Arguments and results of saving and loading."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from arguments import Arguments
from arguments.output import OutputArgs


@dataclass
class CheckpointState:
    """The non-tensor part of a run: plain types only (numbers, strings, None, lists, tuples, dicts, tensors).

    Attributes:
        args: every flag by destination, for --use-checkpoint-args and for comparing architectures. It must hold at
            least num_layers, moe_layer_freq, num_experts and multi_latent_attention, which determine the keys.
        scheduler: Megatron's opt_param_scheduler. Ours is a function of consumed samples, so this is a record only.
        extra: everything else that bitwise resume needs.
    """

    iteration: int
    args: Mapping[str, Any]
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_floating_point_operations_so_far: float = 0.0
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class PlanCache:
    """Plan of the first save of a run, reused by later ones (--ckpt-assume-constant-structure).

    Attributes:
        digest: of this rank's shards.
        writes: keys and places that it writes.
        index: of all ranks, on rank 0; empty on others.
    """

    digest: str = ""
    writes: frozenset[tuple[str, tuple[int, ...]]] | None = None
    index: Metadata = field(default_factory=lambda: Metadata({}))


@dataclass(frozen=True)
class SaveOptions:
    """How to save.

    Attributes:
        plan_cache: None plans every save from the start.
        total_limit: number of checkpoints that are kept, next to those of retain_interval and `protected`.
        protected: iterations that total_limit never deletes: the loaded one.
        filesystem_id: result of check_writable; saving to another file system is rejected.
        ckpt_format: "torch" for Megatron-LM's legacy format; all others are written as torch_dist.
    """

    save_optim: bool = True
    save_rng: bool = True
    fully_parallel: bool = True
    retain_interval: int | None = None
    total_limit: int | None = None
    protected: frozenset[int] = frozenset()
    log_progress: bool = False
    verify_integrity: bool = False
    tokenizer_files: tuple[Path, ...] = ()
    plan_cache: PlanCache | None = None
    filesystem_id: int | None = None
    ckpt_format: str = "torch_dist"

    @classmethod
    def from_args(cls, output: OutputArgs, tokenizer_files: tuple[Path, ...] = ()) -> "SaveOptions":
        """Derive it from the flags; see `directory.tokenizer_files`."""
        return cls(
            save_optim=not output.no_save_optim,
            save_rng=not output.no_save_rng,
            fully_parallel=output.ckpt_fully_parallel_save,
            retain_interval=output.save_retain_interval,
            total_limit=output.save_total_limit,
            log_progress=output.log_progress,
            verify_integrity=output.verify_integrity,
            tokenizer_files=tokenizer_files if output.save_tokenizer_assets else (),
            plan_cache=PlanCache() if output.ckpt_assume_constant_structure else None,
            ckpt_format=output.ckpt_format,
        )

    def expired(self, complete: Sequence[int], newest: int, previous: int | None) -> list[int]:
        """Return the iterations whose checkpoints are deleted when that of `newest` is complete.

        Without total_limit it is at most the previous one, as in Megatron-LM.

        Args:
            complete: iterations that the folder holds, ascending.
            newest: the iteration just saved.
            previous: the iteration that was saved before it.
        """
        if self.total_limit is not None:
            saved = [iteration for iteration in complete if iteration <= newest]
            old = [iteration for iteration in saved[: -self.total_limit] if iteration not in self.protected]
        else:
            old = [previous] if self.retain_interval and previous not in (None, newest) else []
        return [iteration for iteration in old if not self.retain_interval or iteration % self.retain_interval]


@dataclass(frozen=True)
class LoadOptions:
    """What to load.

    Attributes:
        args: this run's flags by destination, as in CheckpointState.
        vocab_size: of the tokenizer. If set, checkpoints whose embedding is padded differently are accepted.
        fully_parallel: replicas share the reading and send it to each other.
        upcycle: load a dense checkpoint into the MoE model of `args`; together with finetune.
        hf_mapping: mapping file of a Hugging Face folder's family, if that is not built in.
        has_initial_weights: whether a weight that the checkpoint lacks may keep its value.
        strictness: of --dist-ckpt-strictness. Its default accepts tensors that nothing reads, with which the model is
            another one than was trained; so it counts only where it is given.
    """

    args: Mapping[str, Any]
    ckpt_step: int | None = None
    finetune: bool = False
    load_optim: bool = True
    load_rng: bool = True
    load_main_params: bool = False
    exit_on_missing: bool = False
    strictness: str = "raise_unexpected"
    verify_integrity: bool = False
    vocab_size: int | None = None
    fully_parallel: bool = False
    upcycle: bool = False
    hf_mapping: str | None = None
    has_initial_weights: bool = True

    @property
    def accepts_missing(self) -> bool:
        """Whether weights that the checkpoint lacks keep their initial values."""
        return self.has_initial_weights and self.strictness in ("log_all", "return_all", "ignore_all")

    @classmethod
    def from_args(cls, args: Arguments, vocab_size: int | None = None) -> "LoadOptions":
        output = args.output
        is_given = "dist_ckpt_strictness" in args.spelling
        return cls(
            args=args.as_dict(),
            ckpt_step=output.ckpt_step,
            finetune=output.finetune,
            load_optim=not output.no_load_optim,
            load_rng=not output.no_load_rng,
            load_main_params=output.load_main_params_from_ckpt,
            exit_on_missing=output.exit_on_missing_checkpoint or output.ckpt_convert_format is not None,
            verify_integrity=output.verify_integrity,
            vocab_size=vocab_size,
            fully_parallel=output.ckpt_fully_parallel_load,
            hf_mapping=output.hf_mapping,
            strictness=output.dist_ckpt_strictness if is_given else cls.strictness,
        )


@dataclass(frozen=True)
class LoadedState:
    """Result of a load.

    Attributes:
        iteration: where the run continues (0 with --finetune).
        state: the saved CheckpointState, with the iteration of the file.
        from_megatron: written by Megatron-LM, so state.extra is empty.
        weights_only: a release or a Hugging Face model.
    """

    iteration: int
    folder: Path
    state: CheckpointState
    optim_loaded: bool
    rng_loaded: bool
    from_megatron: bool
    weights_only: bool = False
