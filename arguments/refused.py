"""The manual's page on what is refused (docs/refused_flags.md), made of the tables that refuse.

    python -m arguments.refused > docs/refused_flags.md

Single flags and values come from standing.py, retired.py and products.py. COMBINATIONS lists flags that act, but not together:
each is a command line, and a test holds that the rules refuse it.
"""

from collections.abc import Iterator

from arguments import products, retired, standing
from arguments.container import OPTIONS

GRAPHS = "--cuda-graph-impl local --cuda-graph-modules"
PADDED = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"

COMBINATIONS = (
    # (flags, why)
    ("--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", "a graph of the whole iteration needs padded experts "
     f"(`{PADDED}`): dropless MoE, with a paged stash or without, is captured part by part"),
    (f"--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad {PADDED} --pipeline-model-parallel-size 2",
     "messages between stages are waited for by the host; so are the collectives of `--overlap-grad-reduce`, `--overlap-param-gather` and "
     "`--context-parallel-size`"),
    ("--cuda-graph-impl local", f"whole layers are captured with padded experts (`{PADDED}`) alone"),
    (f"{GRAPHS} attn --fp4-format e2m1", "stochastic rounding has a generator for every tensor"),
    (f"{GRAPHS} attn --use-torch-fsdp2", "sharded parameters (`--use-megatron-fsdp` too) are gathered at other addresses every time"),
    (f"{GRAPHS} attn --cpu-offloading-num-layers 2", "layers whose activations go to the host are not captured"),
    (f"{GRAPHS} attn --fine-grained-activation-offloading --offload-modules core_attn", "nothing goes to the host out of a graph; what stands outside does"),
    (f"{GRAPHS} attn --reset-attention-mask", "which tiles attention computes depends on a batch's documents "
     "(`--dataloader-inter-document-masking` too)"),
    (f"{GRAPHS} attn --attention-dropout 0.1 --recompute-granularity selective", "dropout inside a graph is not drawn twice alike; the same holds for "
     "`--hidden-dropout` and `--moe-input-jitter-eps`, and under tensor parallelism without recompute"),
    (f"{GRAPHS} moe_router --moe-router-load-balancing-type sinkhorn", "its end is judged on the host"),
    (f"{GRAPHS} moe_router --moe-router-force-biased 1.0", "forced biases are drawn on the host"),
    (f"{GRAPHS} moe_router moe_preprocess --moe-expert-capacity-factor 1.0", "with the all-to-all, as in Megatron-LM: how many tokens stay depends on "
     "the routing; `--moe-router-padding-for-quantization` likewise"),
    ("--optimizer muon --chunked-optimizer-state-offload", "Muon keeps fp32 state beside the model"),
    ("--optimizer muon --use-distributed-optimizer --fp8-format hybrid --fp8-param-gather", "Muon updates whole matrices of the model; with "
     "`--fp8-recipe mxfp8`, whose weights stay in bf16, it does"),
    ("--use-megatron-fsdp --ckpt-format fsdp_dtensor --pipeline-schedule zero-bubble --pipeline-model-parallel-size 2",
     "weight gradients that wait find the parameters sharded again"),
    ("--overlap-moe-expert-parallel-comm --expert-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
     "--recompute-num-layers 1", "as in Megatron-LM: recompute selected modules"),
    ("--moe-clone-hot-experts 1 --expert-model-parallel-size 2 --fp8-format hybrid", "scales are kept for each expert of a rank; nor with "
     "flex dispatchers, overlapped exchange or full sharding"),
    ("--moe-dispatch-fwd-dtype mxfp8 --moe-token-dispatcher-type flex --expert-model-parallel-size 2", "8-bit dispatch goes by the all-to-all"),
    ("--moe-paged-stash --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.2 "
     "--expert-model-parallel-size 2 --cpu-offloading-num-layers 2", "the same tensors would go to the host twice"),
)
"""Flags that act, but not together."""

_HEAD = """\
# Flags and combinations that are refused

Made by `python -m arguments.refused > docs/refused_flags.md`; a test compares this page with the program.

Everything else of Megatron-LM's flags acts, or is accepted and says why it has no effect. `--validate-only` says all that applies to a
command line. *Not yet* means that a later version may have it.
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *_not_yet(), *_instead(), *_combinations(), *_products(), *_gone()]) + "\n"


def _flag(dest: str) -> str:
    return OPTIONS[dest].spellings[0]


def _entry(flags: str, text: str) -> str:
    return f"- `{flags}`: {text}"


def _not_yet() -> Iterator[str]:
    yield "## Not yet\n"
    for dest, entry in standing.LATER.items():
        values = f" {'|'.join(map(str, entry.values))}" if entry.values else ""
        others = f" (with `{'`, `'.join(map(_flag, standing.PART_OF[dest].split()))}`)" if dest in standing.PART_OF else ""
        yield _entry(f"{_flag(dest)}{values}", f"{entry.what}{others}")
    for (dest, value), (what, _) in retired.LATER_VALUES.items():
        yield _entry(f"{_flag(dest)} {value}", what)
    for spelling, _, what, _, harmless in retired.LATER:
        yield _entry(spelling, what + (f" (accepted: {', '.join(harmless)})" if harmless else ""))
    yield "\nAsked for together, these are one missing architecture:\n"
    for what, architecture in retired.ARCHITECTURES.items():
        yield f"- {what}: `{'`, `'.join(architecture.flags)}`"


def _instead() -> Iterator[str]:
    yield "\n## Not planned, and what to use instead\n"
    for text in dict.fromkeys(standing.OTHER.values()):
        dests = [dest for dest, reason in standing.OTHER.items() if reason == text]
        values = [f" {'|'.join(standing.OTHER_VALUES[dest])}" if dest in standing.OTHER_VALUES else "" for dest in dests]
        yield _entry("`, `".join(f"{_flag(dest)}{value}" for dest, value in zip(dests, values)), text)


def _combinations() -> Iterator[str]:
    yield "\n## Flags that act, but not together\n"
    yield from (_entry(flags, why) for flags, why in COMBINATIONS)


def _products() -> Iterator[str]:
    yield "\n## Flags of other products\n"
    for product in products.PRODUCTS:
        flags = [word.partition("=")[0] for word in product.flags.split()]
        yield f"- {product.name} ({product.instead}): `{'`, `'.join(flags)}`"


def _gone() -> Iterator[str]:
    yield "\n## Flags that have gone\n"
    for text in dict.fromkeys(instead for _, _, instead in retired.REFUSED):
        yield _entry("`, `".join(spelling for spelling, _, instead in retired.REFUSED if instead == text), text)


if __name__ == "__main__":
    print(page(), end="")
