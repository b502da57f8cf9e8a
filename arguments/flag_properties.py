"""What `flag` (schema.py) says of a flag, in words that other modules read instead of lists of flags.

A test fails for a flag that leaves out what it has to say: see CONTRIBUTING.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Restore = Literal[
    "always",
    "storage",
    "adapters",
    "mapping",
    "tokenizer",
    "tokenizer unless given",
    "unless given",
    "to evaluate",
    "capacity",
    "data",
    "to convert",
    "must agree",
    "never",
]
"""When --use-checkpoint-args takes a flag from the checkpoint.

* always: another value would be another function of the weights;
* storage: always; another value would store the same weights differently;
* adapters: from a checkpoint with adapters; one without them may be the base of new ones;
* mapping: with --use-mp-args-from-checkpoint-args: how the model is sharded. Context and data parallelism depend on the
  number of ranks available;
* tokenizer: unless --no-use-tokenizer-model-from-checkpoint-args. A tokenizer of the command line wins over that of a
  Hugging Face folder, and with --sft over that of a run, which need not have read conversations;
* unless given: a run may continue with longer sequences, another precision or other dropout, but the default need not
  be what the weights were trained with. No Hugging Face model has Megatron's default of 0.1;
* to evaluate: for --skip-train, unless given: an evaluation reads what the run's validations read;
* capacity: for --skip-train from a run that drops tokens, unless given: the losses depend on it;
* data: for --skip-train if the command line names no data at all;
* to convert: for --ckpt-convert-format, unless given: it determines what is stored of a parameter;
* must agree: next to another of these; a run does not resume with another value, which need not change any shape.
  The others differ with a warning: a run may continue with another --rotary-base;
* never: it says how a run trains or computes, not what.
"""


Role = Literal[
    "model",
    "size",
    "noise",
    "parallel",
    "mapping",
    "method",
    "quantization",
    "precision",
    "update",
    "schedule",
    "batch",
    "data",
    "mask",
    "evaluation",
    "check",
    "exit",
    "load",
    "output",
    "runtime",
    "launch",
]
"""What a flag is for. Proofs, replays, trials and comparisons of runs choose the flags that they keep by it.

* model: what the model computes; size: a width, count or pattern of it, or what fits only one; noise: random numbers;
* parallel: how ranks share work and talk; mapping: who holds what, or what fits only one mapping;
* method: another way to the same numbers, such as recompute; quantization: formats of 8 and 4 bits; precision: of 16;
* update: what an iteration makes of the gradients; schedule: how that changes over the run, and the run's length;
* batch: the samples of an iteration; data: where they come from; mask: what of them is seen and trained on;
* evaluation, check, exit: what a run does between iterations, which of its results it rejects, when it ends;
* load: what it starts from; output: what it logs, writes and plans;
* runtime: use of the machine; launch: what starts the processes.
"""

PathUse = Literal["read", "write", "cache", "data"]
"""What is done with a path: it is read, written, or both as a cache; "data" is read, also from object storage."""

Bounds = Literal[">0", ">=0", "[0,1)", "[0,1]", "(0,1]", "any"]
"""Which numbers a flag takes, whatever else is given; a number that fp32 rounds to 0 is not above 0. "any":
negative ones too. Without bounds, a rule has to refuse negative numbers."""


@dataclass(frozen=True)
class LayerNumbers:
    """What a flag says of decoder layers by their numbers from 1, which are those of sublayers in a hybrid pattern.

    Attributes:
        of: the parts of layers that it is about.
        unset: the entry of every layer without a value, or with 0; None: no entry is one that the flag could give.
        entry: a layer's number and an integer value -> the layer's entry in a list; None if it takes lists only.
        counts: an integer value is a number of layers, and there are no lists.
    """

    of: Literal["attention", "experts"]
    unset: float | None = None
    entry: Callable[[int, int], int] | None = None
    counts: bool = False


Layers = LayerNumbers | Literal["kinds"]
"""What a flag says of single layers: something by number, or which kinds of sublayers they have, which a GPT model and
a hybrid one say with other flags."""

MAX_LAYERS = 100_000
"""Beyond this a number of layers is a slip of the keyboard, and no list is made for it."""
MAX_SAMPLES = 10**12
"""Beyond this, sample counts no longer fit the 64-bit index of a dataset, whatever the batch size."""
MAX_SIZE = 2**31 - 1
"""Indices in kernels have 32 bits."""
MAX_EXPERTS = 1_000_000
MAX_WORKERS = 1024
MAX_MINUTES = 500_000
MAX_FP32 = 3.4028234663852886e38
MAX_STD = 1e6
