"""Convert models between Hugging Face folders and checkpoints of this program.

    python scripts/convert.py HF_FOLDER DIR                 -> DIR/release, for --load DIR --use-checkpoint-args
    python scripts/convert.py HF_FOLDER FILE --to weights   -> one safetensors file, as --export-weights writes it
    python scripts/convert.py DIR HF_FOLDER                 the latest checkpoint in DIR, for from_pretrained
    python scripts/convert.py HF_FOLDER --check             compare names and shapes only; config.json and the index do
    python scripts/convert.py DIR PEFT_FOLDER --to peft     its low-rank adapters (--lora-dim) alone, for peft
    python scripts/convert.py HF_FOLDER DIR --adapter PEFT_FOLDER    both, to train the adapters further

docs/checkpoints.md lists the families. --hf-mapping FILE describes another one (docs/add_a_family.md).

config.json becomes flags and flags become config.json. Tokenizer files are copied. Weights in block fp8, MXFP4 and
NVFP4 are read as bf16, and written by --quantize. Each worker holds one tensor in memory at a time. The same command
continues an interrupted conversion; until it is complete everything is in TO.converting. Several ranks (torchrun, srun:
RANK and WORLD_SIZE) share the files of one conversion. Every tensor of the source must be used and every one of the
target filled: otherwise the error names the tensors and nothing is written. --load also reads a Hugging Face folder
directly.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from arguments.paths import local_path
from arguments.program import program_name
from moe_trainer.commands.command_parser import make_command_parser
from moe_trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    import torch

    from arguments.container import Arguments
    from moe_trainer.checkpoint.hf.conversion_job import ConversionJob
    from moe_trainer.checkpoint.hf.folder import HFModel
    from moe_trainer.checkpoint.hf.import_adapters import ImportedAdapters

logger = logging.getLogger("convert")

_EXIT_CODES = """exit codes:
  0  done
  1  --verify: the two models differ; --check: tensors do not fit
  2  the source, the target or an option is wrong
  3  other ranks have files left to write
"""

_QUANTIZED_FORMATS = ("fp8-block", "mxfp4", "nvfp4")
_DTYPES = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
_TO_HF_OPTIONS = (
    *("model_type", "vocab_size", "keep_vocab_padding", "drop_mtp", "config", "tokenizer", "ckpt_step"),
    *("base_model", "quantize"),
)
_WHOLE_MODEL_OPTIONS = (
    *("vocab_size", "keep_vocab_padding", "drop_mtp", "config", "tokenizer", "quantize", "max_shard_size"),
    "hf_mapping",
)
_MAX_SHARD_GB = 5.0
_VERIFY_BATCH_SIZE, _VERIFY_SEQ_LENGTH = 2, 64
# fractions of the largest logit: the same computation, and one whose weights are rounded or whose scores may tie
_EXACT_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 0.1


def main(argv: list[str]) -> int:
    """Run the program. Returns the exit code."""
    options = _parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        return _convert(options)
    except (ValueError, OSError) as error:
        _print_error(error)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        _print_error("interrupted; run the same command to continue")
        return ExitCode.INTERRUPTED


def _print_error(message: object) -> None:
    print(f"{program_name('convert')}: {message}", file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = make_command_parser("convert", __doc__, epilog=_EXIT_CODES)
    add = parser.add_argument
    add("source", type=local_path, metavar="FROM", help="Hugging Face folder or checkpoint directory")
    add("target", type=local_path, nargs="?", metavar="TO", help="folder or file to create")
    add("--to", choices=("hf", "ours", "weights", "peft"), help="what TO becomes (default: the other kind than FROM)")
    add("--check", action="store_true", help="compare the tensors of FROM with its config.json, and write nothing")
    text = "mapping file of a Hugging Face family that is not built in"
    add("--hf-mapping", type=local_path, metavar="FILE", help=text)
    add("--verify", action="store_true", help="then compare the logits of both models in fp32, if they fit in memory")
    add("--workers", type=int, metavar="N", help="processes on this host (default: 1)")
    add("--dtype", choices=tuple(_DTYPES), help="type of the weights (default: as stored)")
    text = f"size of the largest file (default: {_MAX_SHARD_GB:g})"
    add("--max-shard-size", type=float, metavar="GB", help=text)
    to_hf = parser.add_argument_group("to hf").add_argument
    to_hf("--ckpt-step", type=int, metavar="N", help="iteration to convert (default: the latest)")
    to_hf("--model-type", metavar="TYPE", help="model type to write (default: the first that expresses the model)")
    text = "keep N rows of the vocabulary (default: those before its padding, where the run or its tokenizer tells)"
    to_hf("--vocab-size", type=int, metavar="N", help=text)
    text = "keep the rows that pad the vocabulary"
    to_hf("--keep-vocab-padding", action="store_true", default=None, help=text)
    text = "name of the base model to write into the adapter's configuration, to peft"
    to_hf("--base-model", metavar="NAME", help=text)
    to_hf("--drop-mtp", action="store_true", default=None, help="leave out the layers of multi-token prediction")
    text = "config.json (or its folder) to copy bos_token_id and the like from"
    to_hf("--config", type=local_path, metavar="FILE", help=text)
    to_hf(
        "--tokenizer",
        type=local_path,
        metavar="DIR",
        help="folder of tokenizer files (default: that of the checkpoint)",
    )
    text = "store the weights of experts and MLPs (fp8-block: of attention too) in this format (default: in none)"
    to_hf("--quantize", choices=_QUANTIZED_FORMATS, help=text)
    from_hf = parser.add_argument_group("from hf").add_argument
    text = "names that Megatron-LM would expect (default: transformer_engine); this program reads both"
    from_hf("--transformer-impl", choices=("transformer_engine", "local"), help=text)
    from_hf("--adapter", type=local_path, metavar="DIR", help="adapter folder of PEFT, to train it further (--to ours)")
    text = "regular expression of tensors that may be left unused; they are listed"
    from_hf("--ignore", metavar="PATTERN", help=text)
    if not argv:
        parser.print_help()
        sys.exit(ExitCode.USER_ERROR)
    options = parser.parse_args(argv)
    if options.check == (options.target is not None):
        parser.error("--check writes nothing: TO must be left out" if options.check else "TO is missing")
    if options.check:
        given = [name for name, value in vars(options).items() if value not in (None, False)]
        unused = [name for name in given if name not in ("source", "check", "hf_mapping")]
        if unused:
            parser.error(f"--check writes nothing, and does not read --{unused[0].replace('_', '-')}")
    if options.workers is not None and options.workers < 1:
        parser.error(f"--workers {options.workers} must be above 0")
    if options.max_shard_size is not None and not 0 < options.max_shard_size < float("inf"):
        parser.error(f"--max-shard-size {options.max_shard_size} must be above 0, and finite")
    if options.verify and options.quantize == "nvfp4":
        # transformers 5.23, integrations/compressed_tensors.py: only values, scales and shapes reach the decompression
        parser.error("--verify --quantize nvfp4: transformers leaves out the tensors' scales of experts in NVFP4")
    try:
        re.compile(options.ignore or "")
    except re.error as error:
        parser.error(f"--ignore {options.ignore}: not a regular expression: {error}")
    return options


def _convert(options: argparse.Namespace) -> int:
    from moe_trainer.errors import require_packages

    require_packages("torch", "numpy", "safetensors")
    if options.check:
        return _check(options)
    rank, world_size = (_read_integer(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world_size:
        raise ValueError(
            f"RANK={rank} WORLD_SIZE={world_size} in the environment: a rank from 0 to WORLD_SIZE - 1 is needed"
        )
    job = _plan(options, log=rank == 0)
    from moe_trainer.checkpoint.hf.conversion_job import finish_job, missing_files, open_job

    open_job(job)
    start_time, num_missing = time.monotonic(), len(missing_files(job))
    if num_missing < len(job.files):
        logger.info("%d of %d files exist from an earlier run", len(job.files) - num_missing, len(job.files))
    code = _write(job, rank, world_size, min(options.workers or 1, len(job.files)))
    if code:
        return code
    if not finish_job(job):
        logger.info("this rank is done; other ranks have %d files left to write", len(missing_files(job)))
        return ExitCode.FILES_LEFT_TO_WRITE if world_size == 1 else ExitCode.OK
    size = f"{len(job.files)} files, {job.num_bytes / 1e9:.2f} GB"
    logger.info("%s is complete: %s; this run took %.1f s", job.target, size, time.monotonic() - start_time)
    if options.verify and rank == 0:
        return _verify(options)
    return 0


def _read_integer(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text} in the environment is not an integer") from error


def _plan(options: argparse.Namespace, log: bool) -> ConversionJob:
    """Read the source's metadata and plan what is written."""
    import torch

    from moe_trainer.checkpoint.folder_format import is_hf_folder

    if options.source.resolve() == options.target.resolve():
        raise ValueError(f"{options.target} is the source; choose another folder")
    from_hf = is_hf_folder(options.source) and not (options.source / "latest_checkpointed_iteration.txt").is_file()
    to = options.to or ("ours" if from_hf else "hf")
    if from_hf == (to in ("hf", "peft")):
        kind = "a Hugging Face folder" if from_hf else "not a Hugging Face folder (config.json and safetensors files)"
        raise ValueError(f"{options.source} is {kind}, so --to {to} does not convert it")
    inapplicable = {
        "hf": ("ignore", "transformer_impl", "adapter", "base_model"),
        "peft": ("ignore", "transformer_impl", "adapter", *_WHOLE_MODEL_OPTIONS),
        "ours": _TO_HF_OPTIONS,
        "weights": (*_TO_HF_OPTIONS, "transformer_impl", "adapter", "max_shard_size"),
    }
    for name in inapplicable[to]:
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} does not apply to --to {to}")
    if options.verify and to == "weights":
        raise ValueError("--verify: a weights file has no flags to build a model from")
    if options.verify and (to == "peft" or options.adapter is not None):
        raise ValueError("--verify compares two models, and not adapters; --to hf merges them into one")
    dtype = getattr(torch, _DTYPES[options.dtype]) if options.dtype else None
    most = int((options.max_shard_size or _MAX_SHARD_GB) * 1e9)
    return _plan_from_hf(options, to, most, dtype, log) if from_hf else _plan_to_hf(options, most, dtype)


def _plan_from_hf(
    options: argparse.Namespace, to: str, most: int, dtype: torch.dtype | None, log: bool
) -> ConversionJob:
    from moe_trainer.checkpoint.hf.families import families_with
    from moe_trainer.checkpoint.hf.folder import check_copies, open_hf_model
    from moe_trainer.checkpoint.hf.import_adapters import read_peft_folder
    from moe_trainer.checkpoint.hf.import_weights import plan_native_checkpoint, plan_weights_file

    ignored = re.compile(options.ignore) if options.ignore else None
    families = families_with(options.hf_mapping)
    model = open_hf_model(
        options.source, lambda name: ignored is not None and ignored.search(name) is not None, families
    )
    adapters = None
    if options.adapter is not None:
        adapters = read_peft_folder(options.adapter, model.family, model.flags)
    record = _record(model, adapters) | {"transformer_impl": options.transformer_impl or "transformer_engine"}
    if log:
        logger.info("%s: %s, %d native tensors", options.source, model.family.name, len(model.mappings))
        for note in model.notes:
            logger.info("  %s", note)
        if to == "ours":
            logger.info(
                "  without --use-checkpoint-args give --attention-dropout and --hidden-dropout, whose default is 0.1 "
                "as in Megatron-LM"
            )
        check_copies(model)
    if to == "weights":
        return plan_weights_file(model, options.target, dtype)
    return plan_native_checkpoint(model, options.target, record, most, dtype, adapters)


def _record(model: HFModel, adapters: ImportedAdapters | None) -> dict[str, object]:
    """Return the flags to record in the checkpoint, after checking that they build the model that is written.

    Raises:
        ValueError: naming the rejected flags, or the tensors that differ.
    """
    from moe_trainer.checkpoint.hf.check_mapping import compare_native
    from moe_trainer.checkpoint.hf.folder import recorded_flags

    args = _flags(recorded_flags(model) | ({} if adapters is None else dict(adapters.flags)), None)
    written = {mapping.native: mapping.shape for mapping in model.mappings}
    if adapters is not None:
        written |= {name: tuple(tensor.shape) for name, tensor in adapters.tensors.items()}
    differing = list(compare_native(written, _native_shapes(args, model.flags["rows"]), model.family.name))
    if differing:
        raise ValueError("the tensors do not match the model:\n  " + "\n  ".join(differing[:12]))
    # no length of sequences: that of `_flags` serves the verification, and the user's recipe has another
    return args.as_dict() | {"load": None, "use_checkpoint_args": False, "padded_vocab_size": None, "seq_length": None}


def _native_shapes(args: Arguments, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of the model that the arguments build."""
    from moe_trainer.model.build import build_chunks
    from moe_trainer.parallel.params import get_param_info, part_lengths
    from moe_trainer.parallel.state import ParallelState

    (chunk,) = build_chunks(args, ParallelState.single(), rows, device="meta")
    built = {name: tuple(buffer.shape) for name, buffer in chunk.named_state_buffers()}
    for param in chunk.parameters():
        info = get_param_info(param)
        shape = tuple(param.shape[1:] if info.stacked else param.shape)
        if info.part_names:  # separate tensors in a checkpoint
            lengths = part_lengths(info, shape[info.sharded_dim or 0])
            built |= {
                f"{name}.{part}": (length, *shape[1:])
                for name in info.names
                for part, length in zip(info.part_names, lengths, strict=True)
            }
        else:
            built |= dict.fromkeys(info.names, shape)
    return built


def _check(options: argparse.Namespace) -> int:
    """Compare the tensors of a Hugging Face folder with those that its family needs. Returns the exit code."""
    from arguments.container import OPTIONS
    from moe_trainer.checkpoint.hf.check_mapping import compare_folder, compare_native
    from moe_trainer.checkpoint.hf.families import families_with

    folder = options.source.parent if options.source.is_file() else options.source
    result = compare_folder(folder, families_with(options.hf_mapping))
    for note in result.notes:
        logger.info("  %s", note)
    record = {dest: option.default for dest, option in OPTIONS.items()}
    record |= {dest: value for dest, value in result.flags.items() if dest in OPTIONS}
    built = _native_shapes(_flags({**record, "hf_model_type": result.family.name}, None), result.flags["rows"])
    written = {mapping.native: mapping.shape for mapping in result.mappings}
    problems = [*result.problems, *compare_native(written, built, result.family.name)]
    for problem in problems:
        logger.info("%s", problem)
    compared = "names and shapes" if result.has_shapes else "names"
    logger.info(
        "%s: %s, %d native tensors of %d Hugging Face tensors, %s compared: %s",
        folder,
        result.family.name,
        len(written),
        result.num_tensors,
        compared,
        f"{len(problems)} problems" if problems else "all fit",
    )
    return ExitCode.FAILED if problems else ExitCode.OK


def _flags(record: Mapping[str, Any], folder: Path | None) -> Arguments:
    """Return the arguments of a single-rank run whose architecture comes from recorded flags."""
    import arguments

    length = min(_VERIFY_SEQ_LENGTH, int(record.get("max_position_embeddings") or _VERIFY_SEQ_LENGTH))
    argv = (
        f"--use-checkpoint-args --seq-length {length} --micro-batch-size 1 --global-batch-size 1 --train-iters 1 "
        "--lr 1e-5 --mock-data --eval-iters 0 --transformer-impl local --hidden-dropout 0 --attention-dropout 0 "
        "--no-rope-fusion --no-use-tokenizer-model-from-checkpoint-args --tokenizer-type NullTokenizer "
        "--on-missing-backend fallback"
    ).split()
    # with a tokenizer the recorded --vocab-size may be absent or a preset's
    sizes = [size for size in (record.get("vocab_size"), record.get("padded_vocab_size")) if isinstance(size, int)]
    vocabulary = {"vocab_size": min(sizes, default=None)}
    return arguments.parse_args([*argv, "--load", str(folder or ".")], 1, checkpoint={**record, **vocabulary})


def _plan_to_hf(options: argparse.Namespace, most: int, dtype: torch.dtype | None) -> ConversionJob:
    from moe_trainer.checkpoint.hf.adapters import plan_peft_folder
    from moe_trainer.checkpoint.hf.export import ExportFormat, TokenizerParts, Vocabulary, plan_hf_folder
    from moe_trainer.checkpoint.hf.families import families_with
    from moe_trainer.checkpoint.hf.files import read_json
    from moe_trainer.checkpoint.resolve import read_saved_args, resolve_checkpoint

    folder = resolve_checkpoint(options.source, options.ckpt_step, loads=True)
    if folder is None:
        if not os.path.exists(options.source):
            raise ValueError(f"{options.source}: no such folder")
        raise ValueError(f"{options.source}: this folder holds neither a checkpoint nor a Hugging Face model")
    record = read_saved_args(options.source, options.ckpt_step)  # raises for an unreadable or damaged checkpoint
    if options.to == "peft":
        return plan_peft_folder(folder, options.target, options.model_type, dtype, options.base_model)
    if options.vocab_size is not None and options.keep_vocab_padding:
        raise ValueError("--vocab-size and --keep-vocab-padding exclude each other")
    extra: dict[str, object] = {}
    tokens: int | None = None
    if options.config is not None:
        config = read_json(options.config / "config.json" if options.config.is_dir() else options.config)
        names = [name for name in config if name.endswith("_token_id") or name in ("auto_map", "tokenizer_class")]
        extra = {name: config[name] for name in names}
    if options.tokenizer is not None and not options.tokenizer.is_dir():
        raise ValueError(f"--tokenizer {options.tokenizer}: not a directory")
    logger.info("%s", folder)
    tokenizer = options.tokenizer or folder / "tokenizer"
    if tokenizer.is_dir():
        special, tokens = _special_tokens(record, tokenizer)
        extra = special | extra
    else:
        tokenizer = None
    families = families_with(options.hf_mapping)
    # the first family is that of the mapping file
    model_type = options.model_type or (next(iter(families)) if options.hf_mapping is not None else None)
    return plan_hf_folder(
        folder,
        options.target,
        most,
        model_type,
        families,
        Vocabulary(options.vocab_size, bool(options.keep_vocab_padding), tokens),
        ExportFormat(dtype, options.quantize),
        TokenizerParts(extra, tokenizer),
        bool(options.drop_mtp),
    )


def _special_tokens(record: Mapping[str, Any], folder: Path) -> tuple[dict[str, int | None], int | None]:
    """Return the ids of the begin token and of the token that ended documents in training, and the number of tokens.

    None where unknown.
    """
    from arguments.data import DataArgs
    from moe_trainer.data.tokenizer import build_tokenizer

    kind, models = record.get("tokenizer_type"), list(folder.glob("*.model"))
    if kind == "NullTokenizer":
        logger.info("  bos_token_id, eos_token_id: null (the run had a NullTokenizer); --config copies them")
        return {"eos_token_id": None}, None
    model = models[0] if kind != "HuggingFaceTokenizer" and len(models) == 1 else folder
    try:
        form = record.get("sft_tokenizer_prompt_format") or DataArgs.sft_tokenizer_prompt_format
        tokenizer = build_tokenizer(
            DataArgs(tokenizer_type=kind, tokenizer_model=str(model), sft_tokenizer_prompt_format=str(form))
        )
    except (ValueError, OSError) as error:
        logger.info("  bos_token_id, eos_token_id: null (--tokenizer-type %s: %s); --config copies them", kind, error)
        return {"eos_token_id": None}, None
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}, tokenizer.vocab_size


def _write(job: ConversionJob, rank: int, world_size: int, workers: int) -> int:
    """Write this rank's files, in this process or in several. Returns the exit code."""
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    from moe_trainer.checkpoint.hf.conversion_job import Progress, write_share

    progress = Progress(job)
    if workers == 1:
        write_share(job, rank, world_size, progress.update)
    else:
        args = (job, rank * workers, world_size * workers)
        # a worker ends with its parent, and the others with the first one that fails
        processes = start_processes(_work, args, nprocs=workers, join=False, daemon=True, start_method="fork")
        try:
            while not processes.join(timeout=0.1):
                progress.update()
        except ProcessExitedException as error:
            return ExitCode.USER_ERROR if error.exit_code == ExitCode.USER_ERROR else ExitCode.FAILED
    progress.update(last=world_size == 1)
    return ExitCode.OK


def _work(index: int, job: ConversionJob, first_rank: int, world_size: int) -> None:
    """Write the files of one worker process."""
    import torch

    from moe_trainer.checkpoint.hf.conversion_job import write_share

    torch.set_num_threads(1)
    try:
        write_share(job, first_rank + index, world_size)
    except (ValueError, OSError) as error:
        _print_error(error)
        sys.exit(ExitCode.USER_ERROR)


def _verify(options: argparse.Namespace) -> int:
    """Compare the logits of both models. Returns the exit code."""
    from moe_trainer.checkpoint.folder_format import is_hf_folder
    from moe_trainer.checkpoint.hf.files import CONFIG, read_json

    hf_folder, native = options.source, options.target
    if not is_hf_folder(hf_folder):
        hf_folder, native = native, hf_folder
    if options.quantize is not None:  # the other model has other weights: transformers and this program read these
        native = hf_folder
    needed_gb = 4 * sum(path.stat().st_size for path in hf_folder.glob("*.safetensors")) / 1e9  # two models, from bf16
    available_gb = (_available_bytes() or float("inf")) / 1e9
    if needed_gb > available_gb:
        text = "--verify: the two models need %.0f GB in fp32, and %.0f GB are available: not compared"
        logger.info(text, needed_gb, available_gb)
        return ExitCode.OK
    config = read_json(hf_folder / CONFIG)
    _check_full_blocks(hf_folder)
    # with few indexer heads scores tie, and the two models select different keys
    loose = options.dtype is not None or "quantization_config" in config or "index_n_heads" in config
    step = None if options.quantize else options.ckpt_step
    difference, largest = compare_logits(hf_folder, native, step, hf_mapping=options.hf_mapping)
    logger.info("--verify: the logits differ by at most %.3e, the largest logit is %.3e", difference, largest)
    if not difference <= (_ROUNDED_TOLERANCE if loose else _EXACT_TOLERANCE) * largest:
        _print_error(f"--verify: {options.source} and {options.target} are not the same model")
        return ExitCode.FAILED
    return ExitCode.OK


def _check_full_blocks(folder: Path) -> None:
    """Raise a ValueError if transformers, which derives block sizes from shapes, would misread a weight in fp8."""
    from moe_trainer.checkpoint.hf.encodings import BLOCK_SIZE
    from moe_trainer.checkpoint.hf.files import SCALE, SafetensorsFolder

    source = SafetensorsFolder(folder)
    for name in source.names:
        shape = source.shape(name)
        if f"{name}{SCALE}" in source.scales and any(size > BLOCK_SIZE and size % BLOCK_SIZE for size in shape):
            raise ValueError(
                f"--verify: {name} has the shape {list(shape)}, whose last block of {BLOCK_SIZE} is not full: "
                "transformers takes blocks of another size and misreads it, so the models are not compared"
            )


def compare_logits(
    hf_folder: Path,
    native: Path,
    step: int | None = None,
    tokens_BS: torch.Tensor | None = None,
    hf_mapping: Path | None = None,
) -> tuple[float, float]:
    """Run both models on the same tokens (by default random ones) in fp32. Returns the largest difference and logit."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise ValueError("--verify needs transformers: pip install transformers") from error
    from moe_trainer.checkpoint.manager import load, read_saved_args
    from moe_trainer.checkpoint.options import LoadOptions
    from moe_trainer.checkpoint.resolve import saved_padded_vocab_size
    from moe_trainer.model.build import build_chunks
    from moe_trainer.parallel.state import ParallelState

    args, ps = _flags(read_saved_args(native, step), native), ParallelState.single()
    vocab_size = saved_padded_vocab_size(native, step)
    if vocab_size is None:
        raise ValueError(f"--verify: {native} has no token embedding")
    (model,) = build_chunks(args, ps, vocab_size)
    load(native, [model], None, ps, LoadOptions(args=args.as_dict(), ckpt_step=step, load_optim=False, load_rng=False))
    other = _load_transformers_model(transformers, hf_folder, hf_mapping)
    rows = other.config.get_text_config().vocab_size
    if tokens_BS is None:
        generator = torch.Generator().manual_seed(1)
        tokens_BS = torch.randint(rows, (_VERIFY_BATCH_SIZE, args.data.seq_length), generator=generator)
    with torch.no_grad():
        expected = other.eval()(tokens_BS).logits.float()
        actual = model.eval()(tokens_BS, torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS))[..., :rows].float()
    return (actual - expected).abs().max().item(), expected.abs().max().item()


def _load_transformers_model(transformers: ModuleType, folder: Path, hf_mapping: Path | None) -> Any:
    """Load a model in fp32 by the class of its family, from transformers or from this program's remote_code.

    Code that comes with the folder is never run.

    Experts run one by one, because grouped GEMMs take only widths that are multiples of 16 bytes.

    Raises: ValueError if this release of transformers has no such class.
    """
    import torch

    from moe_trainer.checkpoint.hf.families import families_with, get_family
    from moe_trainer.checkpoint.hf.files import CONFIG, read_json
    from moe_trainer.checkpoint.hf.folder import read_text_config

    families = families_with(hf_mapping)
    written, _ = read_text_config(folder, families)
    family = get_family(written, str(folder / CONFIG), families)
    # how stored names become those of the class follows from the model type, which may be another name of the family
    whole, kind = read_json(folder / CONFIG), family.name
    part = family.text_parts.get(str(whole.get("model_type")))
    classes = transformers
    if family.code_files:
        classes = importlib.import_module(f"moe_trainer.checkpoint.hf.remote_code.modeling_{family.name}")
    model_class = getattr(classes, family.architecture, None)
    if model_class is None and part is not None:  # no class has the language model alone
        model_class = getattr(
            classes, f"{family.architecture.removesuffix('ForCausalLM')}ForConditionalGeneration", None
        )
        written, kind, part = whole, whole["model_type"], None
    if model_class is None:
        raise ValueError(
            f"--verify: transformers {transformers.__version__} has no {family.architecture}; "
            + ("`class_prefix` of the mapping file names its classes" if hf_mapping else "a newer release is needed")
        )
    config = model_class.config_class.from_dict({**written, "model_type": kind})
    dtype = torch.float32
    if getattr(config, "quantization_config", None) is not None:
        config.quantization_config["dequantize"] = True
        dtype = torch.bfloat16  # transformers dequantizes some weights to it in any case
    try:
        model = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            experts_implementation="eager",
            key_mapping={f"^{re.escape(part.prefix)}": part.own_prefix} if part else None,
        )
        return model.float()
    except ImportError as error:
        raise ValueError(f"--verify: transformers needs a package to read {folder}: {error}") from error


def _available_bytes() -> int | None:
    """Return the available memory in bytes, if the system reports it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
