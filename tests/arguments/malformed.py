"""Malformed command lines, drawn by seed from the declarations of all flags, so that new flags are covered at once.

Each kind of mistake is a function of a random generator; `malformed` takes the kinds in turn. A line is a small model's
flags followed by the mistake, with the words that its rejection must name. Lines whose mistake only a start finds
(missing or invalid files) are in `STARTUP_ERRORS`, with the files they need.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from arguments.container import OPTIONS
from arguments.flag_status import is_known_spelling
from arguments.schema import Option
from arguments.tokens import FIELDS
from tests.arguments import refusals
from tests.training.tiny import MOCK, TINY

REFUSED = [row for row in refusals.rows() if row.rules]
BASE = (*TINY, *MOCK, "--train-iters", "1")
NO_INTEGERS = (*"abc 12.5 1e30 nan inf 0x10 1,000 ten -- 2**3 true \uff18.5".split(), "1" * 5000)
NO_NUMBERS = ("abc", "1,5", "1e", "--", "1.2.3", "0x1p", "ten", "1/3", "1e-3.5", "true")
NO_NAMES = ("foo", "NONE", "0", "yes", "adamm", "*", "\u03b1", "None ")
NOT_FINITE = ("nan", "inf", "-inf", "1e999")
LETTERS = "abcdefghijklmnopqrstuvwxyz-"


@dataclass(frozen=True)
class Malformed:
    """A line: kind of mistake, arguments, words that the error must name, environment and files it needs."""

    kind: str
    argv: tuple[str, ...]
    names: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join([*(f'{name}={value!r}' for name, value in self.env.items()), *map(ascii, self.argv)])}"


def _choose(rng: random.Random, fits: Callable[[Option], bool]) -> Option:
    return rng.choice([option for option in OPTIONS.values() if fits(option)])


def _with(kind: str, *added: str, names: tuple[str, ...] = (), **needs) -> Malformed:
    return Malformed(kind, (*BASE, *added), names or (added[0],), **needs)


def _words(option: Option, word: str) -> list[str]:
    """Repeat the word for every value that the flag takes."""
    return [word] * (option.takes if isinstance(option.takes, int) else 1)


def _plain(option: Option, *types: str) -> bool:
    """Return whether the flag takes values of these types, without choices."""
    return option.takes != 0 and option.type_name in types and option.choices is None


def wrong_type(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: _plain(o, "int", "float"))
    words = _words(option, rng.choice(NO_INTEGERS if option.type_name == "int" else NO_NUMBERS))
    return _with("wrong type", rng.choice(option.spellings), *words)


def unknown_choice(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.takes != 0 and o.choices is not None)
    words = [*NO_NAMES, f"{option.choices[0]}x", str(option.choices[-1])[:-1] + "_"]
    word = rng.choice([word for word in words if word not in map(str, option.choices)])
    return _with("unknown choice", rng.choice(option.spellings), *_words(option, word))


def not_finite(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: _plain(o, "float"))
    return _with("not finite", option.spellings[0], *_words(option, rng.choice(NOT_FINITE)))


def impossible_number(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.bounds not in (None, "any"))
    values = ["-1", f"-{rng.randrange(2, 10**6)}"]
    values += ["0"] if option.bounds in (">0", "(0,1]") else []
    values += ["7"] if "1" in option.bounds else []
    return _with("impossible number", option.spellings[0], *_words(option, rng.choice(values)))


def negative(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: _plain(o, "int", "float") and o.bounds != "any")
    return _with("negative", option.spellings[0], *_words(option, f"-{rng.randrange(1, 100)}"))


def overflow(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: _plain(o, "int"))
    return _with("overflow", option.spellings[0], *_words(option, str(10 ** rng.randrange(19, 400))))


def mistyped_flag(rng: random.Random) -> Malformed:
    """One typo, two in a long name; the error suggests the intended flag."""
    meant = rng.choice([spelling for spelling, option in FIELDS.items() if not option.hidden and len(spelling) > 5])
    while True:
        typo = _slip(rng, _slip(rng, meant) if len(meant) > 14 and rng.random() < 0.5 else meant)
        if typo not in FIELDS and not is_known_spelling(typo) and typo[2] != "-":
            return _with("typo", typo, "1", names=(typo, meant))


def _slip(rng: random.Random, name: str) -> str:
    at = rng.randrange(2, len(name) - 1)
    letter = rng.choice(LETTERS)
    return rng.choice(
        [
            name[:at] + letter + name[at:],
            name[:at] + name[at + 1 :],
            name[:at] + letter + name[at + 1 :],
            name[:at] + name[at + 1] + name[at] + name[at + 2 :],
            name.replace("-", "_").replace("__", "--", 1),
        ]
    )


def missing_value(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.takes in (1, "+") or (isinstance(o.takes, int) and o.takes > 1))
    return _with("missing value", option.spellings[0], *rng.choice([(), ("--bf16",), ("--swiglu", "--lr", "1")]))


def wrong_count(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: isinstance(o.takes, int) and o.takes > 1)
    return _with("wrong count", option.spellings[0], *["1"] * rng.choice([*range(1, option.takes), option.takes + 1]))


def positional(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.takes in (0, 1))
    words = [] if option.takes == 0 else [str(option.choices[0] if option.choices else 1)]
    word = rng.choice(["train", "2", "0.5", "-3", "pretrain_moe.py", "{", "a b"])
    return _with("positional", option.spellings[0], *words, word, names=(option.spellings[0], word))


def empty(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.takes != 0 and o.default != "")
    return _with("empty", option.spellings[0], *_words(option, rng.choice(["", " ", "''", '""', "\t"])))


def invalid_utf8(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.takes != 0)
    word = rng.choice(["\udcff\udcfe", "data\udc80", "\udce4"])
    return _with("invalid UTF-8", option.spellings[0], *_words(option, word))


def switch_with_value(rng: random.Random) -> Malformed:
    option = _choose(rng, lambda o: o.takes == 0)
    name = rng.choice(option.spellings)
    return _with("switch with a value", f"{name}={rng.choice(['2', 'yes', 'on', '', 'abc'])}", names=(name,))


def _refused(rng: random.Random, *kinds: str) -> Malformed:
    """A row of refusals.txt, whose texts must be in the error."""
    row = rng.choice([row for row in REFUSED if row.kind in kinds])
    launched = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return Malformed(kinds[0], row.line.argv, row.texts, launched | {"WORLD_SIZE": str(row.line.ranks)})


def broken_rule(rng: random.Random) -> Malformed:
    return _refused(rng, "rule", "build")


def unreadable_words(rng: random.Random) -> Malformed:
    return _refused(rng, "value", "unknown")


def missing_feature(rng: random.Random) -> Malformed:
    return _refused(rng, "later", "product")


PRESETS = (
    b"MODEL_ARGS: [",
    b"",
    b"- a\n- b\n",
    b"MODEL_ARGS:\n  --num-layers: two\n",
    b"MODEL_ARGS:\n  --num-layer: 2\n",
    b"\xff\xfe\x00",
    b"MODEL_ARGS: 7\n",
    b"MODEL_ARGS:\n  --num-layers: ${NOT_SET_ANYWHERE}\n",
    b"a: b\n",
    b"MODEL_ARGS:\n  --num-layers: {a: b}\n",
    b"MODEL_ARGS:\n  ? [a, b]\n  : 2\n",
    b"MODEL_ARGS:\n  num-layers: 2\n",
    b"ENV_VARS: 3\nMODEL_ARGS:\n",
    b"%bad",
    b"MODEL_ARGS:\n\t--num-layers: 2\n",
    b'MODEL_ARGS:\n  --load: "a\\0b"\n',
    b"MODEL_ARGS:\n  --lr: [1, 2]\n",
    b"MODEL_ARGS: &a\n  --load: *b\n",
    b"MODEL_ARGS:\n  2: 3\n",
    b"ENV_VARS:\n  OMP_NUM_THREADS: {a: 1}\nMODEL_ARGS: {}\n",
    b"ENV_VARS:\n  [a]: 1\nMODEL_ARGS: {}\n",
    b"ENV_VARS:\n  A=B: 1\nMODEL_ARGS: {}\n",
    b"MODEL_ARGS:\n  --lr: " + b"[" * 20_000 + b"]" * 20_000 + b"\n",
    b"MODEL_ARGS:\n" + b"  --lr: 1\n" * 500_000,
)


def bad_preset(rng: random.Random) -> Malformed:
    """A recipe that is missing, unreadable, not YAML, not a recipe, or contains mistakes."""
    name = rng.choice(["mixtral_8x7", "missing.yaml", "folder/missing", "/", ""])
    files = {}
    if rng.random() < 0.8:
        name = f"recipe{rng.randrange(10**6)}.yaml"
        files = {name: rng.choice(PRESETS)}
    return _with("preset", "--preset", name, names=("--preset" if not files else name,), files=files)


LAUNCHER_VARIABLES = {
    "RANK": ("x", "", "0.5", "-1", "5"),
    "WORLD_SIZE": ("two", "", "1e9", "0", "-2"),
    "LOCAL_RANK": ("a", "", "-1"),
    "MASTER_PORT": ("http", "", "0", "99999", "-1"),
    "MASTER_ADDR": ("",),
    "SLURM_PROCID": ("x", "4", "-1"),
    "SLURM_NTASKS": ("2.5", "0"),
}


def bad_environment(rng: random.Random) -> Malformed:
    """One variable of a launcher is wrong."""
    name = rng.choice(sorted(LAUNCHER_VARIABLES))
    value = rng.choice(LAUNCHER_VARIABLES[name])
    if name.startswith("SLURM"):
        env = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    else:
        env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    return Malformed("environment", BASE, (name,), env | {name: value})


def above_upper_limit(rng: random.Random) -> Malformed:
    """A size, time, number of threads or factor above its upper limit."""
    option = _choose(rng, lambda o: o.most is not None)
    most = option.most
    value = (
        int(most) * rng.randrange(2, 1000)
        if option.type_name == "int"
        else f"{most * rng.uniform(1.1, 9.0) if most < 1e300 else 1e39:e}"
    )
    return _with("above limit", option.spellings[0], *_words(option, str(value)))


KINDS = (
    wrong_type,
    unknown_choice,
    not_finite,
    impossible_number,
    negative,
    overflow,
    mistyped_flag,
    missing_value,
    wrong_count,
    positional,
    empty,
    invalid_utf8,
    switch_with_value,
    broken_rule,
    unreadable_words,
    missing_feature,
    bad_preset,
    bad_environment,
    above_upper_limit,
)


def malformed(
    seed: int, count: int, kinds: Sequence[Callable[[random.Random], Malformed]] = KINDS
) -> Iterator[Malformed]:
    """`count` lines, the kinds in turn, the same for the same seed."""
    rng = random.Random(seed)
    for number in range(count):
        yield kinds[number % len(kinds)](rng)


NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "120")
_FILES = {
    "file": b"x",
    "broken.json": b"{",
    "five.json": b'{"train": 5}',
    "words.txt": b"0.3 a 0.7 b",
    "odd.txt": b"nan a",
    "bytes": bytes(range(256)),
    "short.idx": b"abc",
    "short.bin": b"123",
    "broken.yaml": b"a: [",
    "word/latest_checkpointed_iteration.txt": b"abc",
    "gone/latest_checkpointed_iteration.txt": b"5",
    "tracked/latest_checkpointed_iteration.txt/file": b"",
    "digits/latest_checkpointed_iteration.txt": b"9" * 5000,
    "tokenizer/tokenizer.json": b"[]",
}


def _start(line: str, *names: str, mock: bool = True) -> Malformed:
    return Malformed(
        "start", (*TINY, *(MOCK if mock else ()), "--train-iters", "1", *line.split()), names, files=_FILES
    )


def _data(line: str, *names: str) -> Malformed:
    return Malformed("start", (*TINY, *NULL, "--train-iters", "1", *line.split()), names, files=_FILES)


STARTUP_ERRORS = (
    _data("--data-path missing", "--data-path", "missing"),
    _data("--data-path 1 short 2 missing", "--data-path", "short.idx"),
    _data("--train-data-path missing", "--train-data-path", "missing"),
    _data("--data-args-path missing", "--data-args-path", "missing"),
    _data("--data-args-path bytes", "--data-args-path", "bytes"),
    _data("--data-args-path odd.txt", "--data-args-path", "odd.txt"),
    _data("--data-args-path words.txt", "--data-args-path words.txt", "a.idx"),
    _data("--per-split-data-args-path broken.json", "--per-split-data-args-path", "broken.json"),
    _data("--per-split-data-args-path five.json", "--per-split-data-args-path", "five.json"),
    _start("--load nowhere --exit-on-missing-checkpoint", "--exit-on-missing-checkpoint", "nowhere"),
    _start("--load file", "--load", "file"),
    _start("--load word", "--load", "latest_checkpointed_iteration.txt"),
    _start("--load gone", "--load", "iter_0000005"),
    _start("--load gone --ckpt-step 7", "--ckpt-step", "iter_0000007"),
    _start("--pretrained-checkpoint nowhere", "--pretrained-checkpoint", "nowhere"),
    _start("--use-checkpoint-args --load nowhere", "--use-checkpoint-args", "nowhere"),
    _start("--init-from nowhere", "--init-from", "nowhere"),
    _start("--init-from bytes", "--init-from", "bytes"),
    _start("--te-precision-config-file nowhere --fp8-format e4m3", "--te-precision-config-file", "nowhere"),
    _start("--te-precision-config-file broken.yaml --fp8-format e4m3", "--te-precision-config-file", "broken.yaml"),
    _start("--save file --save-interval 1", "--save", "file"),
    _start("--metrics-file file/x", "--metrics-file", "file/x"),
    _start("--tensorboard-dir file/x", "file/x"),
    _start("--dump-step 1 file", "--dump-step", "file"),
    _start("--export-weights nowhere/w.safetensors", "--export-weights", "nowhere"),
    _start("--train-iters 0", "--train-iters"),
    _start("--train-iters 1000000000000", "--train-iters"),
    _start("--hidden-size 1000000000 --kv-channels 8", "--hidden-size"),
    _start("--vocab-size 2000000000 --hidden-size 100000 --num-attention-heads 4 --kv-channels 8", "--vocab-size"),
    _start("--save tracked --save-interval 1", "--save", "latest_checkpointed_iteration.txt"),
    _start("--load digits", "--load", "latest_checkpointed_iteration.txt"),
    _start("--init-method-std 1e7", "--init-method-std"),
    _start("--preset /dev/zero", "--preset", "/dev/zero"),
    _start("--null-tokenizer-eod-id 500", "--null-tokenizer-eod-id"),
    *(
        _start(f"--mock-data --tokenizer-type {line}", *names, mock=False)
        for line, *names in (
            ("GPT2BPETokenizer", "--vocab-file"),
            ("GPT2BPETokenizer --vocab-file nowhere --merge-file nowhere", "--vocab-file", "nowhere"),
            ("GPT2BPETokenizer --vocab-file bytes --merge-file bytes", "--vocab-file", "bytes"),
            ("HuggingFaceTokenizer", "--tokenizer-model"),
            ("HuggingFaceTokenizer --tokenizer-model nowhere", "--tokenizer-model", "nowhere"),
            ("HuggingFaceTokenizer --tokenizer-model tokenizer", "--tokenizer-model", "tokenizer"),
            ("SentencePieceTokenizer --tokenizer-model nowhere", "--tokenizer-model", "nowhere"),
            ("Llama2Tokenizer --tokenizer-model bytes", "--tokenizer-model", "bytes"),
            ("TikTokenizer --tokenizer-model broken.json", "--tokenizer-model", "broken.json"),
        )
    ),
)
"""Mistakes that are only found when a run starts."""
