"""Read a checkpoint, written under any mapping, into a model and an optimizer.

Every local shard is looked up by key; the saved chunks that overlap it are copied in. A key is tried under the scheme
of this run and then under the other spellings that a checkpoint of the same model may have (KeyScheme.alternatives).
All mismatches are collected before anything is overwritten, and reported together with the flags that differ.
"""

import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from arguments.checkpoint_args import LORA, MUP, MUST_AGREE, SHAPE, same_meaning
from arguments.container import OPTIONS
from arguments.layer_flags import TRANSLATED_FLAGS, difference, numbering_difference
from arguments.lora import is_adapter
from arguments.mechanisms.format_kinds.eight_bit import SCALING_PREFIX
from arguments.vocabulary import VOCABULARY_KEYS
from moe_trainer.checkpoint import random_state
from moe_trainer.checkpoint.errors import CheckpointError
from moe_trainer.checkpoint.flavors import is_hybrid, is_other_flavor
from moe_trainer.checkpoint.options import LoadOptions
from moe_trainer.checkpoint.ownership import KINDS, OwnerAssignment, ShardList, assign_owners
from moe_trainer.checkpoint.reading import fill, read_object
from moe_trainer.checkpoint.sharding import KeyScheme, Placement, TensorShard, make_shards, rng_key
from moe_trainer.checkpoint.virtual_index import VirtualMetadata
from moe_trainer.parallel import collectives
from moe_trainer.parallel.params import ParamInfo, get_param_info, is_quantized_param, unique_params
from moe_trainer.parallel.shards import shards_to_load
from moe_trainer.parallel.state import ParallelState

logger = logging.getLogger(__name__)

_OPTIMIZER = "optimizer."
# Megatron's keys of a chain of optimizers begin with the second of these
_OPTIMIZER_KEYS = (_OPTIMIZER, "chained_")
# the state of delayed scaling: a run without it ignores it, a run with it may start from initial values
SCALING = SCALING_PREFIX
# what no model needs: states of TransformerEngine's modules, tables that follow from the flags, counters of routers
_NOT_NEEDED = re.compile(r"\.(_extra_state|inv_freq|(local|global)_tokens_per_expert|ga_steps)(/|$)")
_INDEXER = ".core_attention.indexer."
_MAX_LINES = 12
# a list, as the others that restore="storage" are worth a warning: another vocabulary, or how it is padded. Another
# padded size is logged where it is found
_OTHER_STORAGE = frozenset({"moe_grouped_gemm", "padded_vocab_size"})
# a list, as the rules derive these sizes where a Hugging Face folder does not give them (a flag's `unset` is one value
# or flag); another size would change shapes
_DERIVED_SIZES = frozenset({"kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size"})


class Loader:
    """State of one load: requested shards, mismatches and unused keys."""

    def __init__(
        self,
        folder: Path,
        index: Metadata,
        options: LoadOptions,
        saved_args: Mapping[str, Any],
        log_warnings: bool = True,
        from_megatron: bool = False,
    ):
        """Collect the keys of a checkpoint.

        Args:
            log_warnings: log warnings that are equal on all ranks.
            from_megatron: Megatron-LM wrote it, so its --spec names no modules of this program.
        """
        self._folder = folder
        self._warn = logger.warning if log_warnings else logger.debug
        self._options = options
        self._saved_args = saved_args
        self._spec = None if from_megatron else saved_args.get("spec")
        self._index = index
        self._stored = {
            key: entry for key, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
        }
        self._is_other_flavor = is_other_flavor(saved_args, options.args)
        self._schemes = list(dict.fromkeys(self._scheme().alternatives()))
        # by (kind, weights or moments): all replicas hold the same weights, but not always the same moments
        self._requests: dict[tuple[str, str], dict[str, list[TensorShard]]] = {
            (kind, what): {} for kind in KINDS for what in ("weights", "moments")
        }
        self._shared: dict[tuple[str, str], OwnerAssignment] = {}
        self._runs: dict[int, list[Placement]] = {}
        self._padding_logged = False
        self._missing: list[str] = []
        self._mismatched: list[str] = []
        self._found: set[str] = set()  # keys of weights, of which an fp32 copy may be read instead
        self._unexpected: list[str] = []  # known after `gather_key_mismatches`

    def _scheme(self) -> KeyScheme:
        """Return the scheme of the stored keys for the names of this run's model.

        Raises:
            CheckpointError: if a GPT and a hybrid model differ in a layer.
        """
        here = self._options.args
        if not self._is_other_flavor or self._options.upcycle:  # whose index has this run's names
            return KeyScheme.from_record(here)
        kind = "hybrid" if is_hybrid(self._saved_args) else "GPT"
        try:
            problem = difference(self._saved_args, here)
            numbering = None if problem else numbering_difference(self._saved_args, here)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{self._folder}: the recorded flags are damaged: {error}") from error
        if numbering is not None and self._options.finetune:
            self._warn("%s is of a %s model; %s", self._folder, kind, numbering)
        elif problem := problem or numbering:
            raise CheckpointError(f"the checkpoint {self._folder} is of a {kind} model; {problem}")
        self._warn("%s is of a %s model with the same layers: its names are translated", self._folder, kind)
        return KeyScheme.from_record(self._saved_args, named_by=here)

    def request_model(self, chunks: Sequence[Any]) -> None:
        """Request all parameters and persistent buffers."""
        for chunk in chunks:
            for param in unique_params(chunk.parameters()):
                runs = self._find(get_param_info(param), tuple(param.shape))
                if runs is not None:
                    self._runs[id(param)] = runs
                    shards = itertools.chain.from_iterable(make_shards(runs, *part) for part in shards_to_load(param))
                    # the values of a quantized weight are loaded with the optimizer state, sharded like it
                    self._request(
                        (get_param_info(param).kind, "moments" if is_quantized_param(param) else "weights"),
                        shards,
                        {run.key: self._best_weight(run.key, param.dtype) for run in runs},
                    )
            for name, buffer in chunk.named_state_buffers():
                runs = self._find(ParamInfo((name,)), tuple(buffer.shape))
                if runs is not None:
                    self._request_buffer(runs, buffer)

    def request_scaling(self, chunks: Sequence[Any]) -> None:
        """Request the state of delayed scaling. Without a matching one it starts from initial values."""
        absent = []
        for chunk in chunks:
            for name, state in chunk.named_scaling_state():
                runs = self._schemes[0].placements(ParamInfo((name,)), tuple(state.shape))
                if runs[0].key in self._stored and self._fits(runs[0]):
                    self._request_buffer(runs, state)
                else:
                    absent.append(name)
        if absent:
            self._warn(
                "%s has no scales of delayed scaling that fit %s%s: they start from initial values",
                self._folder,
                absent[0],
                f" and {len(absent) - 1} more" if len(absent) > 1 else "",
            )

    def request_optimizer(self, optimizer: Any, state_names: tuple[str, ...] | None = None) -> None:
        """Request the optimizer's tensors, or only those of `state_names`.

        Raises:
            CheckpointError: if the checkpoint has no optimizer state in a form that fits any layout.
        """
        missing: list[str] = []
        for entry in optimizer.tensors():
            runs = self._runs.get(id(entry.param))
            if runs is None or (state_names is not None and entry.state_name not in state_names):
                continue
            source: dict[str, str] = {}
            absent = []
            for run in runs:
                if (key := self._state_key(entry.state_name, run.key)) is not None:
                    source[run.key] = key
                else:
                    absent.append(f"{_OPTIMIZER}state.{entry.state_name}.{run.key}")
            if absent:
                missing += absent
                continue
            self._request(
                (get_param_info(entry.param).kind, "moments"),
                make_shards(runs, entry.tensor, entry.start, entry.stop),
                source,
            )
        if missing:
            self._raise_no_optimizer(sorted(set(missing)))

    def _raise_no_optimizer(self, missing: list[str]) -> None:
        stored = [key for key in self._stored if key.startswith(_OPTIMIZER_KEYS)]
        if isinstance(self._index, VirtualMetadata) and self._index.state_problem:
            why = self._index.state_problem
        elif not stored:
            why = "it holds no optimizer state (saved with --no-save-optim?)"
        else:
            why = f"its optimizer state lacks {missing[0]}" + (
                f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            )
        saved, here = self._saved_args.get("optimizer"), self._options.args.get("optimizer")
        if saved != here:
            why += f"; it was written with --optimizer {saved}, this run has --optimizer {here}"
        raise CheckpointError(
            f"the checkpoint {self._folder} cannot resume this run: {why}. To start from its weights with "
            "a fresh optimizer: --no-load-optim --no-load-rng (keeps the iteration) or --finetune"
        )

    def gather_key_mismatches(self, ps: ParallelState, device: torch.device) -> None:
        """Gather the missing, mismatched and unused keys of all ranks. Collective."""
        problems = collectives.all_gather_object((self._missing, self._mismatched), ps.world)
        self._missing, self._mismatched = (
            list(dict.fromkeys(line for rank in problems for line in rank[part])) for part in (0, 1)
        )
        keys = [
            key
            for key in self._stored
            if not key.startswith((*_OPTIMIZER_KEYS, SCALING)) and not _NOT_NEEDED.search(key)
        ]
        used = torch.tensor([key in self._found for key in keys], dtype=torch.uint8, device=device)
        if keys:
            collectives.all_reduce(used, ps.world, op="max")
        self._unexpected = [key for key, is_used in zip(keys, used.tolist()) if not is_used]

    def check(self) -> None:
        """Apply --dist-ckpt-strictness to missing, mismatched and unused keys.

        The result is equal on every rank after `gather_key_mismatches`.

        Raises:
            CheckpointError: listing everything, with the flags that differ.
        """
        strictness = self._options.strictness
        differing = self._differing_flags()
        fatal = [] if self._options.finetune else [line for name, line in differing.items() if name in MUST_AGREE]
        lines, remedy = list(self._mismatched), ""
        drops_modules = self._check_spec()
        self._initialize_indexers()
        self._initialize_adapters()
        tolerant = self._options.accepts_missing
        if tolerant and self._missing and strictness != "ignore_all":
            self._warn(
                "%s lacks %s; they keep their initial values", self._folder, ", ".join(self._missing[:_MAX_LINES])
            )
        if not tolerant:
            lines += [f"{key} is not in the checkpoint" for key in self._missing]
        unexpected = self._unexpected
        if unexpected and strictness in ("raise_unexpected", "raise_all") and not drops_modules:
            if not lines:
                is_mtp = all(key.startswith("mtp.") for key in unexpected)
                more = (
                    "To train without multi-token prediction (--mtp-num-layers 0)" if is_mtp else "To load it without"
                )
                remedy = f"{more} these tensors: --dist-ckpt-strictness log_unexpected\n"
            lines += [f"{key} of the checkpoint is not in this model" for key in unexpected]
        elif unexpected and strictness not in ("assume_ok_unexpected", "ignore_all"):
            self._warn(
                "%s holds tensors that this model does not have: %s", self._folder, ", ".join(unexpected[:_MAX_LINES])
            )
        if lines or fatal:
            raise CheckpointError(
                f"the checkpoint {self._folder} is of another architecture:\n"
                + _format_lines(lines)
                + _format_flags(differing)
                + remedy
                + "To take the architecture from the checkpoint: --use-checkpoint-args"
            )
        if differing:
            self._warn("flags differ from those of the checkpoint:\n%s", _format_flags(differing, title="").rstrip())

    def _check_spec(self) -> bool:
        """Never compute with other modules than those that were trained, unless --finetune asks for it.

        Returns whether it does.
        """
        if not self._spec or self._options.args.get("spec"):
            return False
        written = f"the checkpoint {self._folder} was written with --spec {' '.join(self._spec)}"
        if not self._options.finetune:
            raise CheckpointError(
                f"{written}, which replaces modules: give it again (no code is taken from a checkpoint). --finetune "
                "takes the weights without its modules"
            )
        self._warn("%s; this model is built without it", written)
        return True

    def _initialize_indexers(self) -> None:
        """Keep the initial values of indexers that the checkpoint lacks, with --finetune."""
        absent = [key for key in self._missing if _INDEXER in key]
        if not absent or any(_INDEXER in key for key in self._stored):
            return
        if not self._options.finetune:
            raise CheckpointError(
                f"the checkpoint {self._folder} has no indexers of sparse attention ({absent[0]}, ...): it is of a "
                "model without --experimental-attention-variant dsa. --finetune takes its weights and initializes the "
                "indexers"
            )
        self._warn(
            "%s has no indexers of sparse attention (%s, ...): they start from initial values", self._folder, absent[0]
        )
        self._missing = [key for key in self._missing if key not in absent]

    def _initialize_adapters(self) -> None:
        """Keep the initial values of adapters that the checkpoint lacks; never drop trained ones."""
        absent = [key for key in self._missing if is_adapter(key)]
        if unused := [line for line in (*self._unexpected, *self._mismatched) if is_adapter(line)]:
            rank, targets = self._saved_args.get("lora_dim"), self._saved_args.get("lora_target_modules") or ()
            raise CheckpointError(
                f"the checkpoint {self._folder} has adapters that this run does not have ({unused[0]}, ...): its run "
                f"had --lora-dim {rank} --lora-target-modules {' '.join(targets)}; --use-checkpoint-args takes them"
            )
        if not absent or any(map(is_adapter, self._stored)):
            return
        if self._options.load_optim and not self._options.finetune:
            raise CheckpointError(
                f"the checkpoint {self._folder} has no adapters ({absent[0]}, ...): it is of a run without --lora-dim. "
                "--finetune takes its weights and initializes the adapters"
            )
        self._warn("%s has no adapters (%s, ...): they start from initial values", self._folder, absent[0])
        self._missing = [key for key in self._missing if key not in absent]

    def assign_readers(self, ps: ParallelState) -> None:
        """With --ckpt-fully-parallel-load: assign each shard to one of the ranks that hold it. Collective."""
        if self._options.fully_parallel:
            batches = [ShardList(slot[0], self._requested_shards(slot)) for slot in self._requests]
            assigned = zip(self._requests, assign_owners(batches, ps, True))
            self._shared = {slot: shared for slot, shared in assigned if len(shared.peers) == shared.group.size > 1}

    def read(self) -> None:
        """Read everything requested, except what other ranks read for this one.

        Raises:
            CheckpointError: if a file is damaged.
        """
        wanted: dict[str, list[TensorShard]] = {}
        for slot in self._requests:
            for shard in self._shared[slot].owned if slot in self._shared else self._requested_shards(slot):
                wanted.setdefault(shard.key, []).append(shard)
        fill(self._folder, self._index, wanted)

    def _requested_shards(self, slot: tuple[str, str]) -> list[TensorShard]:
        """Return the requested shards under their stored keys."""
        return [replace(shard, key=key) for key, local in self._requests[slot].items() for shard in local]

    def exchange(self, device: torch.device) -> None:
        """Broadcast what this rank read for others, and receive theirs. Collective; `device` is that of the groups."""
        for shared in self._shared.values():
            for shard, owner in zip(shared.shards, shared.owners):
                data = shard.data.to(device)  # optimizer state may be on the host
                collectives.broadcast(data, shared.group, owner)
                if data is not shard.data:
                    shard.data.copy_(data)

    def random_states(self, ps: ParallelState) -> dict[str, Any] | None:
        """Return the random states saved for this rank's position (pp, tp, rank in dp x cp), or None.

        Raises:
            CheckpointError: if they are damaged.
        """
        key = rng_key(ps)
        states = read_object(self._folder, self._index, key) if key in self._index.state_dict_metadata else []
        # Megatron-LM writes one state for all data-parallel ranks, or one for each (--data-parallel-random-init)
        if states and not random_state.is_native(states[0]) and len(states) in (1, ps.dp.size):
            return states[ps.dp.rank if len(states) > 1 else 0]
        if len(states) < ps.dp_cp.size:
            self._warn(
                "%s has no random states for %s of the places of this mapping (pp %d, tp %d, dp x cp %d): there, "
                "dropout and jitter start afresh from --seed and the iteration",
                self._folder,
                "some" if states else "any",
                ps.pp.size,
                ps.tp.size,
                ps.dp_cp.size,
            )
        return states[ps.dp_cp.rank] if ps.dp_cp.rank < len(states) else None

    def all_random_states(self) -> Iterator[dict[str, Any]]:
        """Yield one state of every (pp, tp) position of the mapping that wrote the checkpoint.

        Raises:
            CheckpointError: if one is damaged.
        """
        for key in self._index.state_dict_metadata:
            if key.startswith("rng_state/"):
                yield read_object(self._folder, self._index, key)[0]

    def _find(self, info: ParamInfo, shape: tuple[int, ...]) -> list[Placement] | None:
        """Return the runs of a parameter under the first scheme whose keys the checkpoint has."""
        for scheme in self._schemes:
            runs = scheme.placements(info, shape)
            if all(run.key in self._stored for run in runs):
                self._found.update(run.key for run in runs)
                wrong = [run for run in runs if not self._fits(run)]
                if not wrong:
                    return runs
                line = (
                    f"{wrong[0].key}: {tuple(self._stored[wrong[0].key].size)} in the checkpoint, "
                    f"{wrong[0].global_shape} here"
                )
                if line not in self._mismatched:
                    self._mismatched.append(line)
                return None
        key = self._schemes[0].placements(info, shape)[0].key
        if key not in self._missing:
            self._missing.append(key)
        return None

    def _fits(self, run: Placement) -> bool:
        saved = tuple(self._stored[run.key].size)
        return saved == run.global_shape or self._differs_in_padding(run.key, saved, run.global_shape)

    def _differs_in_padding(self, key: str, saved: tuple[int, ...], here: tuple[int, ...]) -> bool:
        vocab = self._options.vocab_size
        accepted = (
            vocab is not None
            and key.startswith(VOCABULARY_KEYS)
            and saved[1:] == here[1:]
            and min(saved[0], here[0]) >= vocab
        )
        if accepted and not self._padding_logged:
            self._padding_logged = True
            self._warn(
                "the vocabulary is padded to %d rows in the checkpoint and to %d here (it depends on "
                "--tensor-model-parallel-size); the softmax includes the padding, so losses differ a little at first. "
                "--make-vocab-size-divisible-by keeps it",
                saved[0],
                here[0],
            )
        return accepted

    def _request_buffer(self, runs: list[Placement], buffer: torch.Tensor) -> None:
        shards = make_shards(runs, buffer, 0, buffer.numel())
        self._request(("dense", "weights"), shards, {run.key: run.key for run in runs})

    def _request(self, slot: tuple[str, str], local_shards: Iterator[TensorShard], source: Mapping[str, str]) -> None:
        """Request shards; `source` maps their keys to stored keys."""
        for shard in local_shards:
            key = source[shard.key]
            if shard.offsets:
                # rows are missing only if the vocabulary is padded further here than in the checkpoint
                rows = min(shard.sizes[0], self._stored[key].size[0] - shard.offsets[0])
                if rows <= 0:
                    continue
                shard = replace(shard, sizes=(rows, *shard.sizes[1:]), data=shard.data[:rows])
            self._requests[slot].setdefault(key, []).append(shard)

    def _best_weight(self, key: str, dtype: torch.dtype) -> str:
        """Return the key of the fp32 main parameter for an fp32 weight, if a mixed-precision run stored one."""
        main = self._state_key("fp32_param", key)
        if dtype == torch.float32 and self._stored[key].properties.dtype != dtype and main is not None:
            return main
        return key

    def _state_key(self, state_name: str, key: str) -> str | None:
        names = [f"{_OPTIMIZER}state.{state_name}.{key}"]
        if state_name == "fp32_param":
            names.append(f"{_OPTIMIZER}state.param.{key}")
            if self._stored[key].properties.dtype == torch.float32:
                names.append(key)  # an fp32 run has no other main parameters than its weights
        return next((name for name in names if name in self._stored), None)

    def _differing_flags(self) -> dict[str, str]:
        here = self._options.args
        saved = self._saved_args
        left_out = _OTHER_STORAGE | {name for name in _DERIVED_SIZES if saved.get(name) is None}
        if self._is_other_flavor:  # `difference` and `numbering_difference` have compared the layers
            left_out |= TRANSLATED_FLAGS
        if self._options.upcycle:  # of a dense model
            left_out |= {name for name in SHAPE if OPTIONS[name].section == "moe"} | {"hybrid_layer_pattern"}
        differences = {}
        lora = LORA if here.get("lora_dim") and saved.get("lora_dim") else ()  # the base of new adapters has none
        for name in (dest for dest in (*SHAPE, *MUP, *lora) if dest not in left_out):
            if name in here and name in saved and not same_meaning(name, here, saved):
                flag = OPTIONS[name].spellings[0]
                differences[name] = f"{flag} ({name}): {saved[name]!r} in the checkpoint, {here[name]!r} here"
        return differences


def _format_lines(lines: list[str]) -> str:
    shown = lines[:_MAX_LINES] + ([f"... and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else [])
    return "".join(f"  {line}\n" for line in shown)


def _format_flags(differing: dict[str, str], title: str = "flags that differ:\n") -> str:
    return title + _format_lines(list(differing.values())) if differing else ""
