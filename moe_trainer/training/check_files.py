"""--check-files: check the files that the flags name, and the space for outputs, before a job waits in a queue.

Opens the indexes of all token files, the tokenizer, the checkpoint to load, files of settings and the output folders.
No model is built, and torch is imported only to inspect a checkpoint or settings of layers. All problems are collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from arguments import Arguments, Violation
from arguments.blend import SPLIT_NAMES, Blend, get_blends_per_split, get_common_blend, get_phase_blends
from arguments.data import DEFAULT_SPLIT
from arguments.mechanisms.optimizers import get_optimizer
from arguments.vocabulary import choose_padded_vocab_size
from moe_trainer.checkpoint.directory import is_same_folder
from moe_trainer.data.blend import normalize
from moe_trainer.data.document_sources import open_sources
from moe_trainer.data.fingerprint import make_fingerprint, warn_of_training_text
from moe_trainer.data.index_build import parse_split, split_range
from moe_trainer.data.indexed import IndexedDataset, open_token_file
from moe_trainer.data.object_storage import make_object_store
from moe_trainer.data.sources import requested_sizes, source_flag, training_phases
from moe_trainer.data.text_sequences import TextSequences, first_label, is_text_file
from moe_trainer.data.tokenizer import Tokenizer, build_tokenizer
from moe_trainer.data.tokenizer_record import TokenizerCheck
from moe_trainer.errors import UserError
from moe_trainer.estimate.parameters import count_parameters
from moe_trainer.io import OutputKind, nearest_folder, why_unwritable

MAX_CHECKED_TOKENS = 2**18
"""Tokens at the start of each file whose ids are compared with the vocabulary size."""
MAX_CHECKED_ROWS = 1000
"""Rows at the start of each text file that are tokenized."""


@dataclass(frozen=True)
class FileCheckResult:
    """Result of checking the files that flags name: problems, lines to print, and the tokenizer's padded vocabulary."""

    problems: list[Violation]
    lines: list[str]
    vocab_rows: int | None = None


def check_files(args: Arguments) -> FileCheckResult:
    """Check every file that the flags name. Nothing is written. The flags may have other errors."""
    check = _Check(args)
    vocab_size = check.tokenizer()
    check.data(vocab_size)
    check.loaded()
    check.layer_settings()
    check.outputs(vocab_size)
    return FileCheckResult(check.problems, check.lines, vocab_size)


@dataclass
class _Check:
    args: Arguments
    problems: list[Violation] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    built_tokenizer: Tokenizer | None = None

    def _add_problem(self, flag: str, message: str) -> None:
        violation = Violation((flag,), " ".join(message.split()), "machine")
        if violation not in self.problems:
            self.problems.append(violation)

    def tokenizer(self) -> int | None:
        """Open the tokenizer and return the padded vocabulary size, None if unknown."""
        data = self.args.data
        try:
            self.built_tokenizer = build_tokenizer(data)
            size = self.built_tokenizer.vocab_size
        except (ValueError, OSError) as error:
            self._add_problem("--tokenizer-type", f"tokenizer: {error}")
            return None
        vocab_size = self._padded_vocab_size(size)
        if vocab_size < size:
            message = f"--padded-vocab-size {vocab_size} is smaller than the tokenizer's vocabulary ({size})"
            self._add_problem("--padded-vocab-size", message)
        source = data.tokenizer_model or data.vocab_file or ""
        self.lines.append(
            f"tokenizer: {data.tokenizer_type} {source}".rstrip() + f", {size:,} tokens, padded to {vocab_size:,}"
        )
        return vocab_size

    def _padded_vocab_size(self, size: int) -> int:
        """Return the vocabulary size as the run will pad it, that of the checkpoint if there is one."""

        def saved_rows(folder: str) -> int | None:
            if not os.path.exists(folder):
                return None
            from moe_trainer.checkpoint.resolve import saved_padded_vocab_size

            try:
                return saved_padded_vocab_size(folder, self.args.output.ckpt_step, self.args.output.hf_mapping)
            except (ValueError, OSError):  # reported by `loaded`
                return None

        return choose_padded_vocab_size(self.args, size, saved_rows)

    def data(self, vocab_size: int | None) -> None:
        """Open the index of every prefix in every split, and count tokens; of streamed text only the parts."""
        data, training = self.args.data, self.args.training
        if training.dataloader_type == "external":
            self._streamed_text()
            return
        try:
            per_split, combined, phases = get_blends_per_split(data), get_common_blend(data), get_phase_blends(data)
        except ValueError as error:
            self._add_problem("--data-path", str(error))
            return
        if per_split is None and combined is None:
            reason = "" if data.mock_data else ", because no data is given (--data-path)"
            self.lines.append(f"data: mock data{reason}")
            return
        blends = per_split
        shares: Sequence[tuple[float, float] | None] = ((0.0, 1.0),) * 3
        if blends is None:
            blends, shares = (combined, combined, combined), parse_split(data.split or DEFAULT_SPLIT)
        numbered = [
            (number, blend) for number, blend in (*enumerate(blends), *((0, blend) for blend in phases)) if blend
        ]
        wanted = {prefix: source_flag(data, number) for number, blend in numbered for prefix in blend.prefixes}
        opened = self._open(wanted, vocab_size)
        if per_split is not None:
            self._warn_of_training_text(make_fingerprint(data, ())["data"])
        has_sizes = training.global_batch_size and training.eval_global_batch_size
        needed = requested_sizes(training) if has_sizes else (0, 0, 0)
        for phase in training_phases(data, training, 0) if phases and needed[0] else ():
            # a wrong number of files is reported with the flags
            if phase.number < len(phases) and all(prefix in opened for prefix in phases[phase.number].prefixes):
                name, size = f"phase {phase.number + 1} of training", phase.end - phase.first
                self._split(0, phases[phase.number], (0.0, 1.0), opened, size, name)
        for number, (blend, share) in enumerate(zip(blends, shares)):
            if number == 0 and phases:
                continue
            if blend is not None and share is not None and all(prefix in opened for prefix in blend.prefixes):
                self._split(number, blend, share, opened, needed[number])
            elif number == 0 and (blend is None or share is None) and needed[0]:
                self._add_problem("--data-path", f"{needed[0]} samples are asked of the train split, which has no data")

    def _streamed_text(self) -> None:
        try:
            for number, source, parts in open_sources(self.args.data):
                self.lines.append(f"  {SPLIT_NAMES[number]}: {source}: {parts:,} parts of streamed text")
            self._warn_of_training_text({})
        except ValueError as error:
            self._add_problem("--dataloader-type", str(error))

    def _warn_of_training_text(self, digests: Mapping[str, str]) -> None:
        self.lines += [f"  WARNING: {text}" for text in warn_of_training_text(self.args.data, digests)]

    def _open(self, wanted: dict[str, str], vocab_size: int | None) -> dict[str, np.ndarray]:
        """Return the sequence lengths of each prefix that can be opened."""
        found, store = {}, make_object_store(self.args.data)
        check = None if self.built_tokenizer is None else TokenizerCheck(self.built_tokenizer)
        data = self.args.data
        for prefix, flag in wanted.items():
            try:
                if data.has_sequences and (data.sft or is_text_file(prefix)):
                    self._check_text(prefix)
                    continue
                dataset = open_token_file(prefix, store=store)
                self._compare_ids(dataset, prefix, flag, vocab_size)
                if check is not None:
                    check.check(prefix)
            except (ValueError, OSError) as error:
                self._add_problem(flag.split()[0], f"{flag}: {error}")
                continue
            found[prefix] = np.asarray(dataset.sequence_lengths, dtype=np.int64)
            if data.has_sequences and (cut := int((found[prefix] > data.seq_length + 1).sum())):
                self.lines.append(
                    f"data: {prefix}: {cut:,} of {len(dataset):,} sequences are longer than --seq-length and will be "
                    "cut"
                )
        if found:
            tokens, sequences = sum(int(lengths.sum()) for lengths in found.values()), sum(map(len, found.values()))
            self.lines.append(
                f"data: {len(found)} of {len(wanted)} prefixes can be read, {tokens:,} tokens in {sequences:,} "
                "sequences"
            )
        return found

    def _check_text(self, path: str) -> None:
        """Tokenize the first samples of a text file."""
        if self.built_tokenizer is None:
            return
        longest = self.args.data.seq_length + 1
        samples = TextSequences(path, self.built_tokenizer, self.args.data.sft).samples()
        found = [(len(sample.ids), first_label(sample)) for _, sample in islice(samples, MAX_CHECKED_ROWS)]
        cut = sum(length > longest for length, _ in found)
        tokens = sum(length for length, _ in found)
        self.lines.append(
            f"data: {path}: the first {len(found):,} samples have {tokens:,} tokens; {cut:,} are longer than "
            "--seq-length and will be cut"
        )
        untrained = sum(label >= longest for _, label in found)
        if untrained:
            problem = (
                f"{path}: {untrained:,} of the first {len(found):,} samples have no trained token: their answers begin "
                "after --seq-length"
            )
            if untrained == len(found) < MAX_CHECKED_ROWS:
                raise UserError(problem)
            self.lines.append(f"  WARNING: {problem}")

    def _compare_ids(self, dataset: IndexedDataset, prefix: str, flag: str, vocab_size: int | None) -> None:
        left = MAX_CHECKED_TOKENS
        for number in range(len(dataset)):
            if left <= 0 or vocab_size is None:
                return
            ids = dataset.get(number, 0, min(left, int(dataset.sequence_lengths[number])))
            left -= max(len(ids), 1)
            if len(ids) and int(ids.max()) >= vocab_size:
                self._add_problem(
                    flag.split()[0],
                    f"{flag}: {prefix}: sequence {number} holds the id {int(ids.max())}, the padded vocabulary has "
                    f"{vocab_size}: these tokens are of another tokenizer",
                )
                return

    def _split(
        self,
        number: int,
        blend: Blend,
        share: tuple[float, float],
        opened: dict[str, np.ndarray],
        samples: int | None,
        name: str | None = None,
    ) -> None:
        """Compare the tokens of a split with what the run reads; `samples` is None for one pass."""
        length = None if self.args.data.use_varlen_dataset else self.args.data.seq_length
        found: list[int] = []
        empty: list[str] = []
        small: list[str] = []
        for prefix in blend.prefixes:
            begin, end = split_range(share, len(opened[prefix]))
            tokens = int(opened[prefix][begin:end].sum())
            found.append(tokens)
            if length and tokens < length + 1:
                # a small split is read again and again, as in Megatron-LM
                too_few = empty if tokens == 0 or samples is None else small
                count = f"{end - begin:,} of {len(opened[prefix]):,} sequences"
                too_few.append(f"{prefix} ({tokens:,} tokens in {count})")
        name, total = name or ("train", "validation", "test")[number], sum(found)
        if samples == 0 or not length:
            self.lines.append(f"  {name}: {total:,} tokens")
            return
        if empty:
            self._add_problem(
                source_flag(self.args.data, number).split()[0],
                f"the {SPLIT_NAMES[number]} split of {', '.join(empty)} holds less than one "
                f"sample of --seq-length {length} (+ 1) tokens; {self._remedy(number)}",
            )
            return
        read = total if samples is None else samples * length
        text = "one pass" if samples is None else f"{read:,} are read, {read / total:.2f} epochs"
        self.lines.append(f"  {name}: {total:,} tokens; {text}")
        if small:
            self.lines.append(
                f"    WARNING: less than one sample of --seq-length {length} (+ 1) tokens: {', '.join(small)}: the "
                f"same tokens are read again within a sample; {self._remedy(number)}"
            )
        if samples is not None and blend.weights is not None and len(blend.prefixes) > 1:
            for prefix, weight, tokens in zip(blend.prefixes, normalize(blend.weights), found):
                self.lines.append(
                    f"    {prefix}: {tokens:,} tokens, weight {weight:.4g}: {weight * read / tokens:.2f} epochs"
                )

    def _remedy(self, number: int) -> str:
        """Describe what to change if a split is too small."""
        data, training = self.args.data, self.args.training
        text = "add data"
        if get_blends_per_split(data) is None:
            text = f"give it a larger share (now --split {data.split or DEFAULT_SPLIT}), or add data"
        if number == 0:
            return text
        is_full = training.full_validation and number == 1
        evaluated = "--full-validation" if is_full else f"--eval-iters {training.eval_iters}"
        return f"{text}, or do not evaluate (now {evaluated}; --eval-iters 0)"

    def loaded(self) -> None:
        """Find the checkpoints and weights from which the run starts."""
        output = self.args.output
        is_own = output.save and output.load and is_same_folder(output.save, output.load)
        for flag, folder in (("--load", output.load), ("--pretrained-checkpoint", output.pretrained_checkpoint)):
            if folder is None:
                continue
            try:
                found = self._find(folder, output.ckpt_step if flag == "--load" else None)
            except (ValueError, OSError) as error:
                self._add_problem(flag, f"{flag} {folder}: {error}")
                continue
            if found is not None:
                self.lines.append(f"{flag} {folder}: {found}")
            elif flag == "--load" and not self._needs_checkpoint():
                base = output.pretrained_checkpoint
                start = f"--pretrained-checkpoint {base}" if base else "RANDOM WEIGHTS"
                line = f"{flag} {folder}: {_describe_missing(folder)}; the run starts from {start}"
                if not is_own and not base:
                    line = f"WARNING: {line} (--exit-on-missing-checkpoint ends it instead)"
                self.lines.append(line)
            else:
                self._add_problem(flag, f"{flag} {folder}: {_describe_missing(folder)}")
        if output.init_from is not None and not os.path.isfile(output.init_from):
            self._add_problem("--init-from", f"--init-from {output.init_from}: there is no such file")

    def _needs_checkpoint(self) -> bool:
        """Return whether a missing --load checkpoint ends the run: nothing else gives it weights."""
        output = self.args.output
        return output.pretrained_checkpoint is None and (
            self.args.is_eval_only
            or output.exit_on_missing_checkpoint
            or output.ckpt_convert_format is not None
            or self.args.moe.moe_use_upcycling
        )

    def _find(self, folder: str, step: int | None) -> str | None:
        """Describe the checkpoint in the folder, None if there is none.

        Raises:
            ValueError: if it is incomplete or of an unknown format.
        """
        if not os.path.exists(folder):
            return None
        from moe_trainer.checkpoint.resolve import check_complete, check_format, is_weights_only, resolve_checkpoint

        found = resolve_checkpoint(Path(folder), step, loads=True)
        if found is None:
            return None
        check_format(found)
        check_complete(found)
        size = sum(path.stat().st_size for path in found.rglob("*") if path.is_file())
        kind = "Hugging Face or released weights" if is_weights_only(found) else found.name
        return f"{kind}, complete, {_format_bytes(size)}"

    def layer_settings(self) -> None:
        """Read the files with settings of single layers, as the model's construction does."""
        from moe_trainer.model.layer_files import layer_files

        for flag, load in layer_files(self.args):
            self._read(flag, load)

    def _read(self, flag: str, load: Callable[[], object]) -> None:
        try:
            load()
        except UserError as error:
            self._add_problem(flag, str(error))

    def outputs(self, vocab_size: int | None) -> None:
        """Check that the output folders are writable and the checkpoints fit."""
        output = self.args.output
        for flag, path, kind in _written(self.args):
            problem = why_unwritable(path, kind)
            if problem is not None:
                self._add_problem(flag, f"{flag} {path}: {problem}")
            elif flag == "--save":
                self._check_space(nearest_folder(Path(path)), vocab_size)
        if output.save is None and not self.args.training.skip_train:
            self.lines.append("--save is not given: nothing is saved")

    def _check_space(self, folder: Path, vocab_size: int | None) -> None:
        output, training = self.args.output, self.args.training
        stat = os.statvfs(folder)
        free = stat.f_bavail * stat.f_frsize
        if free == 0:
            message = f"--save {output.save}: the file system of {folder} has no space that can be written"
            self._add_problem("--save", message)
            return
        size = None if vocab_size is None else checkpoint_bytes(self.args, vocab_size)
        if size is None:
            self.lines.append(f"--save {output.save}: can be written, {_format_bytes(free)} free")
            return
        count = -(-training.train_iters // output.save_interval) if training.train_iters and output.save_interval else 1
        kept, most = "", count  # most: at one time
        if output.save_retain_interval and training.train_iters:
            retained = training.train_iters // output.save_retain_interval
            last = training.train_iters % output.save_retain_interval > 0
            # the last one is deleted when the next one is complete
            kept, most = f", {retained + last} are kept (--save-retain-interval)", min(count, retained + 2)
        elif output.save_total_limit and output.save_total_limit < count:
            # an older one is deleted when the newer one is complete
            kept, most = f", the last {output.save_total_limit} are kept", output.save_total_limit + 1
        self.lines.append(
            f"--save {output.save}: can be written, {_format_bytes(free)} free; a checkpoint takes about "
            f"{_format_bytes(size)} (estimate), {count} {'is' if count == 1 else 'are'} planned{kept}"
        )
        if free < size:
            message = f"{_format_bytes(free)} are free, one checkpoint takes about {_format_bytes(size)}"
            self._add_problem("--save", f"--save {output.save}: {message}")
        elif free < most * size:
            self.lines.append(
                f"WARNING: {most} checkpoints take about {_format_bytes(most * size)}, more than the "
                f"{_format_bytes(free)} that are free"
            )


def checkpoint_bytes(args: Arguments, vocab_size: int) -> int | None:
    """Estimate the size of a checkpoint: weights, and optimizer state in fp32. None if the model is not known."""
    try:
        total = count_parameters(args, vocab_size)
    except (TypeError, ValueError, ZeroDivisionError):  # wrong flags, which are reported elsewhere
        return None
    narrow = args.precision.bf16 or args.precision.fp16
    state = 0 if args.output.no_save_optim else 4 * (len(get_optimizer(args.optimizer).states) + narrow)
    return (total.total + (total.mtp or 0)) * ((2 if narrow else 4) + state)


def _written(args: Arguments) -> Iterator[tuple[str, str, OutputKind]]:
    """Yield (flag, path, kind as for `why_unwritable`) of everything the run writes."""
    output = args.output
    folders = [("--data-cache-path", args.data.data_cache_path), ("--config-logger-dir", output.config_logger_dir)]
    if not args.is_eval_only:
        metrics = [("--tensorboard-dir", output.tensorboard_dir), ("--wandb-save-dir", output.wandb_save_dir)]
        folders = [("--save", output.save), *metrics, *folders]
    yield from ((flag, path, "folder") for flag, path in folders if path)
    if output.metrics_file:
        yield "--metrics-file", output.metrics_file, "file"
    if output.export_weights:
        yield "--export-weights", output.export_weights, "file in a folder that exists"


def _describe_missing(folder: str) -> str:
    return f"there is no {'checkpoint in this' if os.path.isdir(folder) else 'such'} folder"


def _format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} TB" if size < 1000 else f"{size:,.0f} TB"
