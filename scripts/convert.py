#!/usr/bin/env python3
"""Convert models between Hugging Face folders and checkpoints of this program.

    python scripts/convert.py HF_FOLDER DIR                 -> DIR/release, for --load DIR --use-checkpoint-args
    python scripts/convert.py HF_FOLDER FILE --to weights   -> one safetensors file with Megatron-Core's names, as --export-weights writes it
    python scripts/convert.py DIR HF_FOLDER                 the newest checkpoint under DIR, of any mapping, as a folder for from_pretrained

Families: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, gpt-oss, DeepSeek-V2, V3 and V3.2, Kimi-K2, Moonlight.
config.json becomes flags and flags become config.json; tokenizer files go along; weights in 8 bits with scales per block (as DeepSeek-V3 is
published) become bf16.
One tensor is in memory at a time, per worker. A conversion that was ended, by whatever, is continued by the same command; until it is
complete everything is in TARGET.converting. Several ranks (torchrun, srun: RANK and WORLD_SIZE) share the files of one conversion.
Every tensor of the source must be used and every one of the target filled: what is missing, left over or of another shape is named, and
nothing is written. (--load takes a Hugging Face folder as it is, too; then nothing is converted beforehand.)

Options:
  --to hf|ours|weights     what TO becomes (default: the other kind than FROM)
  --verify                 afterwards run both models on random tokens, in fp32, where both fit into memory, and judge the largest difference
  --workers N              processes on this host (default 1)
  --dtype bf16|fp16|fp32   of the weights (default: as they are stored)
  --max-shard-size GB      largest file (default 5)
  --ckpt-step N            of a checkpoint directory another iteration than the newest
  --model-type TYPE        to hf: the model type to write (default: the first that expresses the model)
  --vocab-size N           to hf: leave out rows of the padded vocabulary behind the N-th
  --config FILE            to hf: a config.json (or its folder) whose other keys, such as bos_token_id, are taken over
  --tokenizer DIR          to hf: the folder whose tokenizer files go along (default: that of the checkpoint)
  --transformer-impl IMPL  to ours: under whose names Megatron-LM would look for the tensors, transformer_engine (as there, the default) or local;
                           this program reads both
  --ignore PATTERN         from hf: a regular expression for tensors that may be left over; they are named

Exit code: 0 done; 1 --verify: the two models are not the same (message); 2 the source, the target or an option is wrong (message); 3 other
ranks have files left to write.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_trainer.exit_codes import ExitCode

if TYPE_CHECKING:
    import torch

    from moe_trainer.checkpoint.hf import Model
    from moe_trainer.checkpoint.hf_job import Job

logger = logging.getLogger("convert")

_DTYPES = MappingProxyType({"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"})
_BATCH, _LONGEST = 2, 64  # sequences and tokens of --verify
_SAME, _ALIKE = 1e-3, 0.1  # of the largest logit: where both compute the same, and where weights of one are rounded
OTHERS_WRITE = 3


def main(words: list[str]) -> int:
    """Run the program. Returns the exit code."""
    if not words or "--help" in words or "-h" in words:
        print(__doc__.strip())
        return ExitCode.OK if words else ExitCode.USER_ERROR
    options = _options(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        return _convert(options)
    except (ValueError, OSError) as error:
        print(f"convert.py: {error}", file=sys.stderr, flush=True)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print("convert.py: interrupted; the same command continues", file=sys.stderr, flush=True)
        return ExitCode.INTERRUPTED


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="convert.py", add_help=False, allow_abbrev=False)
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("target", type=Path, metavar="TO")
    parser.add_argument("--to", choices=("hf", "ours", "weights"))
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--dtype", choices=tuple(_DTYPES))
    parser.add_argument("--max-shard-size", type=float, default=5.0)
    parser.add_argument("--ckpt-step", type=int)
    parser.add_argument("--model-type")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--transformer-impl", choices=("transformer_engine", "local"))
    parser.add_argument("--ignore")
    options = parser.parse_args(words)
    if options.workers < 1:
        parser.error(f"--workers {options.workers} must be above 0")
    if not 0 < options.max_shard_size < float("inf"):
        parser.error(f"--max-shard-size {options.max_shard_size} must be above 0, and finite")
    try:
        re.compile(options.ignore or "")
    except re.error as error:
        parser.error(f"--ignore {options.ignore}: no regular expression: {error}")
    return options


def _convert(options: argparse.Namespace) -> int:
    from moe_trainer.errors import need_packages

    need_packages("torch", "numpy", "safetensors")
    rank, world = (_number(name, default) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if not 0 <= rank < world:
        raise ValueError(f"RANK={rank} WORLD_SIZE={world} in the environment: a rank from 0 to WORLD_SIZE - 1 is needed")
    job = _plan(options, speaks=rank == 0)
    from moe_trainer.checkpoint.hf_job import finish_job, missing_files, open_job

    open_job(job)
    begun, before = time.monotonic(), len(missing_files(job))
    if before < len(job.files):
        logger.info("%d of %d files are there from an earlier run", len(job.files) - before, len(job.files))
    code = _write(job, rank, world, min(options.workers, len(job.files)))
    if code:
        return code
    if not finish_job(job):
        logger.info("this rank is done; %d files are left to others", len(missing_files(job)))
        return OTHERS_WRITE if world == 1 else 0
    seconds = time.monotonic() - begun
    logger.info("%s is complete: %d files, %.2f GB; this run took %.1f s", job.target, len(job.files), job.num_bytes / 1e9, seconds)
    if options.verify and rank == 0:
        return _verify(options)
    return 0


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text} in the environment is no whole number") from error


def _plan(options: argparse.Namespace, speaks: bool) -> Job:
    """Look at the source and settle what is written. Raises: ValueError."""
    import torch

    from moe_trainer.checkpoint.hf_files import is_folder

    if options.source.resolve() == options.target.resolve():
        raise ValueError(f"{options.target} is the source; choose another folder")
    from_hf = is_folder(options.source) and not (options.source / "latest_checkpointed_iteration.txt").is_file()
    to = options.to or ("ours" if from_hf else "hf")
    if from_hf == (to == "hf"):
        kind = "a Hugging Face folder" if from_hf else "no Hugging Face folder (config.json and safetensors files)"
        raise ValueError(f"{options.source} is {kind}, so --to {to} is no conversion")
    for name, belongs in (("model_type", to == "hf"), ("vocab_size", to == "hf"), ("config", to == "hf"), ("tokenizer", to == "hf"),
                          ("ckpt_step", to == "hf"), ("ignore", to != "hf"), ("transformer_impl", to == "ours")):
        if getattr(options, name) is not None and not belongs:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with --to {to}")
    dtype = getattr(torch, _DTYPES[options.dtype]) if options.dtype else None
    most = int(options.max_shard_size * 1e9)
    return _plan_from_hf(options, to, most, dtype, speaks) if from_hf else _plan_to_hf(options, most, dtype)


def _plan_from_hf(options: argparse.Namespace, to: str, most: int, dtype: torch.dtype | None, speaks: bool) -> Job:
    from moe_trainer.checkpoint.hf import compare_copies, open_model
    from moe_trainer.checkpoint.hf_to_ours import plan_to_ours, plan_to_weights

    ignored = re.compile(options.ignore) if options.ignore else None
    model = open_model(options.source, lambda name: ignored is not None and ignored.search(name) is not None)
    record = _record(model) | {"transformer_impl": options.transformer_impl or "transformer_engine"}
    if speaks:
        logger.info("%s: %s, %d tensors of ours", options.source, model.family.name, len(model.links))
        for note in model.notes:
            logger.info("  %s", note)
        if to == "ours":
            logger.info("  dropout is not part of a checkpoint: give --attention-dropout and --hidden-dropout, whose default is 0.1 as in Megatron-LM")
        compare_copies(model)
    return plan_to_ours(model, options.target, record, most, dtype) if to == "ours" else plan_to_weights(model, options.target, dtype)


def _record(model: Model) -> dict[str, object]:
    """The flags that a checkpoint of this model records: they build it, and its tensors are those that will be written.

    Raises: ValueError with the flags that are refused, or the tensors that differ.
    """
    from moe_trainer.checkpoint.hf import record_of
    from moe_trainer.model.build import build_chunks
    from moe_trainer.parallel.params import part_lengths
    from moe_trainer.parallel.state import ParallelState

    args = _flags(record_of(model), None)
    chunk, = build_chunks(args, ParallelState.single(), model.flags["rows"], device="meta")
    built = {name: list(buffer.shape) for name, buffer in chunk.named_state_buffers()}
    for param in chunk.parameters():
        shape, info = list(param.shape[1:] if param.info.stacked else param.shape), param.info
        if info.part_names:  # tensors of their own in a checkpoint
            lengths = part_lengths(info, shape[info.sharded_dim or 0])
            built |= {f"{name}.{part}": [length, *shape[1:]] for name in info.names for part, length in zip(info.part_names, lengths, strict=True)}
        else:
            built |= dict.fromkeys(info.names, shape)
    written = {link.ours: list(link.shape) for link in model.links}
    differing = [f"{name}: {written.get(name, 'missing')}, and the model has {built.get(name, 'no such tensor')}"
                 for name in built | written if built.get(name) != written.get(name)]
    if differing:
        raise ValueError("the tensors do not fill the model:\n  " + "\n  ".join(differing[:12]))
    return args.as_dict() | {"load": None, "use_checkpoint_args": False, "padded_vocab_size": None}


def _flags(record: dict[str, object], folder: Path | None):
    """A run on one rank that takes its architecture from recorded flags."""
    import arguments

    length = min(_LONGEST, int(record.get("max_position_embeddings") or _LONGEST))
    words = ["--use-checkpoint-args", "--load", str(folder or "."), "--seq-length", str(length), "--micro-batch-size", "1",
             "--global-batch-size", "1", "--train-iters", "1", "--lr", "1e-5", "--mock-data", "--eval-iters", "0", "--transformer-impl", "local",
             "--hidden-dropout", "0", "--attention-dropout", "0", "--no-rope-fusion", "--no-use-tokenizer-model-from-checkpoint-args",
             "--tokenizer-type", "NullTokenizer", "--on-missing-backend", "fallback"]
    # where a tokenizer knew the vocabulary, the recorded --vocab-size may be absent or a preset's
    sizes = [size for size in (record.get("vocab_size"), record.get("padded_vocab_size")) if isinstance(size, int)]
    vocabulary = {"vocab_size": min(sizes, default=None)}
    return arguments.parse_args(words, world_size=1, checkpoint={**record, **vocabulary})


def _plan_to_hf(options: argparse.Namespace, most: int, dtype: torch.dtype | None) -> Job:
    from moe_trainer.checkpoint.find import find, read_saved_args
    from moe_trainer.checkpoint.hf_files import read_json
    from moe_trainer.checkpoint.hf_from_ours import plan_to_hf

    folder = find(options.source, options.ckpt_step)
    if folder is None:
        raise ValueError(f"{options.source}: there is neither a checkpoint nor a Hugging Face model in this folder")
    record = read_saved_args(options.source, options.ckpt_step)  # refuses what cannot be read, or is damaged
    config = options.config / "config.json" if options.config is not None and options.config.is_dir() else options.config
    extra = {} if config is None else {
        name: value for name, value in read_json(config).items() if name.endswith("_token_id") or name in ("auto_map", "tokenizer_class")}
    if options.tokenizer is not None and not options.tokenizer.is_dir():
        raise ValueError(f"--tokenizer {options.tokenizer}: there is no such folder")
    tokenizer = options.tokenizer or folder / "tokenizer"
    logger.info("%s", folder)
    if tokenizer.is_dir():
        extra = _special_tokens(record, tokenizer, options) | extra
    return plan_to_hf(folder, options.target, most, options.model_type, options.vocab_size, dtype, extra, tokenizer if tokenizer.is_dir() else None)


def _special_tokens(record: Mapping[str, object], folder: Path, options: argparse.Namespace) -> dict[str, int | None]:
    """The begin token, and the one that ended documents in training, at which generation is to stop; null where the tokenizer does not tell."""
    from arguments.data import DataArgs
    from moe_trainer.checkpoint.find import saved_vocab_rows
    from moe_trainer.data.tokenizer import build_tokenizer

    kind, alone = record.get("tokenizer_type"), folder / "tokenizer.model"
    model = alone if kind != "HuggingFaceTokenizer" and alone.is_file() else folder
    try:
        tokenizer = build_tokenizer(DataArgs(tokenizer_type=kind, tokenizer_model=str(model)))
    except (ValueError, OSError) as error:
        logger.info("  bos_token_id, eos_token_id: null (--tokenizer-type %s: %s); --config takes them over", kind, error)
        return {"eos_token_id": None}
    rows = saved_vocab_rows(options.source, options.ckpt_step)
    if options.vocab_size is None and rows is not None and rows > tokenizer.vocab_size:
        logger.info("  vocab_size: %d with the padding, the tokenizer has %d tokens; --vocab-size %d leaves the padding out, so that no id without a token "
                    "can be drawn", rows, tokenizer.vocab_size, tokenizer.vocab_size)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}


def _write(job: Job, rank: int, world: int, workers: int) -> int:
    """Write this rank's files, in this process or in several. Returns: the exit code."""
    from moe_trainer.checkpoint.hf_job import Progress, run_share

    progress = Progress(job)
    if workers == 1:
        run_share(job, rank, world, progress.look)
        progress.look(last=world == 1)
        return 0
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_work, args=(job, rank * workers + index, world * workers, os.getpid())) for index in range(workers)]
    for child in children:
        child.start()
    try:
        while any(child.is_alive() for child in children) and not any(child.exitcode for child in children):
            time.sleep(0.1)
            progress.look()
    finally:
        for child in children:
            if any(each.exitcode for each in children):
                child.terminate()
            child.join()
    failed = [child.exitcode for child in children if child.exitcode]
    if not failed:
        progress.look(last=world == 1)
    return ExitCode.OK if not failed else ExitCode.USER_ERROR if ExitCode.USER_ERROR in failed else ExitCode.FAILED


def _work(job: Job, rank: int, world: int, parent: int) -> None:
    """One process of several; it ends with the one that has started it."""
    import torch

    from moe_trainer.checkpoint.hf_job import run_share

    def still_wanted() -> None:
        if os.getppid() != parent:
            os._exit(1)

    torch.set_num_threads(1)
    try:
        run_share(job, rank, world, still_wanted)
    except (ValueError, OSError) as error:
        print(f"convert.py: {error}", file=sys.stderr, flush=True)
        os._exit(ExitCode.USER_ERROR)
    os._exit(0)


def _verify(options: argparse.Namespace) -> int:
    """Compare the logits of both models. Returns: the exit code."""
    if options.to == "weights":
        raise ValueError("--verify: a file of weights has no flags, so no model can be made of it")
    from moe_trainer.checkpoint.hf_files import is_folder

    theirs, ours = (options.source, options.target) if is_folder(options.source) else (options.target, options.source)
    needed = 2 * 4 * sum(path.stat().st_size for path in theirs.glob("*.safetensors")) // 2
    available = _available()
    if available is not None and needed > available:
        logger.info("--verify: the two models need %.0f GB in fp32, and %.0f GB are available: not compared", needed / 1e9, available / 1e9)
        return 0
    from moe_trainer.checkpoint.hf_files import CONFIG, read_json

    config = read_json(theirs / CONFIG)  # where scores of keys tie, which happens with few heads of an indexer, the two choose otherwise
    loose = options.dtype is not None or "quantization_config" in config or "index_n_heads" in config
    difference, largest = compare_logits(theirs, ours, options.ckpt_step)
    logger.info("--verify: the logits differ by at most %.3e, the largest logit is %.3e", difference, largest)
    if not difference <= (_ALIKE if loose else _SAME) * largest:
        print(f"convert.py: --verify: {options.source} and {options.target} are not the same model", file=sys.stderr, flush=True)
        return 1
    return 0


def compare_logits(theirs: Path, ours: Path, step: int | None = None, tokens_BS: torch.Tensor | None = None) -> tuple[float, float]:
    """Run both models on the same tokens (by default random ones) in fp32. Returns: largest difference, largest logit (of what both have)."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise ValueError("--verify needs transformers: pip install transformers") from error
    from moe_trainer.checkpoint.checkpoint import load, read_saved_args
    from moe_trainer.checkpoint.find import saved_vocab_rows
    from moe_trainer.checkpoint.options import LoadOptions
    from moe_trainer.model.build import build_chunks
    from moe_trainer.parallel.state import ParallelState

    args, ps = _flags(read_saved_args(ours, step), ours), ParallelState.single()
    model, = build_chunks(args, ps, saved_vocab_rows(ours, step))
    load(ours, [model], None, ps, LoadOptions(args=args.as_dict(), ckpt_step=step, load_optim=False, load_rng=False))
    other = _load_transformers_model(transformers, theirs)
    rows = other.config.vocab_size
    if tokens_BS is None:
        tokens_BS = torch.randint(rows, (_BATCH, args.data.seq_length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = other.eval()(tokens_BS).logits.float()
        given = model.eval()(tokens_BS, torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS))[..., :rows].float()
    return (given - expected).abs().max().item(), expected.abs().max().item()


def _load_transformers_model(transformers: ModuleType, folder: Path) -> torch.nn.Module:
    """Load a model in fp32 by the class of its family: code that comes with the folder is never run.

    Experts run one by one, because grouped GEMMs take only widths that are multiples of 16 bytes.

    Raises: ValueError if this release of transformers has no such class.
    """
    import torch

    from moe_trainer.checkpoint.hf_families import family_of
    from moe_trainer.checkpoint.hf_files import CONFIG, read_json

    written = read_json(folder / CONFIG)
    family = family_of(written, str(folder / CONFIG))
    model_class = getattr(transformers, family.architecture, None)
    if model_class is None:
        raise ValueError(f"--verify: transformers {transformers.__version__} has no {family.architecture}; a newer release is needed")
    # how stored names become those of the class follows from the model type, which may be another name of the family
    config = model_class.config_class.from_dict({**written, "model_type": family.name})
    return model_class.from_pretrained(folder, config=config, dtype=torch.float32, experts_implementation="eager")


def _available() -> int | None:
    """Bytes of memory that can be had, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
