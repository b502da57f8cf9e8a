"""Rules about the machine of a job: environment variables, GPU generation, versions of installed packages.

Parsing does not look at the machine, so that a command line can be checked on a laptop. A run calls `check_machine` at
start-up with its environment and compute capability, `check_packages` with installed versions, and applies
`environment_defaults` before anything reads the environment. `arch` None means no GPU; the variables here affect GPU
libraries only. Violations of kind "machine" are errors; those of kind "note" are logged.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping

from arguments.container import OPTIONS, Arguments
from arguments.mechanisms.attention_backend_kinds.declaration import ATTENTION_BACKEND
from arguments.mechanisms.attention_backends import get_attention_backend
from arguments.mechanisms.dispatchers import get_dispatcher
from arguments.mechanisms.formats import naming_flag, quantized_format
from arguments.mechanisms.implementations import get_implementation
from arguments.mechanisms.shardings import WRAPPED_FLAGS
from arguments.needs import CUDA, notes_about
from arguments.rules.derived_sizes import DerivedSizes, derive_sizes
from arguments.settings import Settings, Violation

BLACKWELL = 10
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second: torch's newer name
EXPANDABLE = "expandable_segments:True"
DETERMINISTIC = (
    ("NCCL_ALGO", ("Ring", "CollnetDirect", "CollnetChain", "^NVLS")),
    ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", ("0",)),
    ("CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")),
)

Rule = Callable[[Settings, DerivedSizes, Mapping[str, str], int], Iterator[Violation]]


def check_machine(args: Arguments | Settings, env: Mapping[str, str], arch: int | None) -> list[Violation]:
    """Check resolved arguments against an environment and a GPU generation (major compute capability; None: a CPU)."""
    s = _flat(args)
    idle = [_finding(s, note, dest, kind="note") for dest, note in notes_about(s, {CUDA: arch is not None})]
    if arch is None:
        return [*idle, *profiling_on_a_cpu(s)]
    facts = derive_sizes(s, None)
    return [*idle, *(violation for rule in RULES for violation in rule(s, facts, env, arch))]


def check_packages(args: Arguments | Settings, versions: Mapping[str, str]) -> list[Violation]:
    """Check resolved arguments against versions of installed packages; packages that are absent are not judged here."""
    s = _flat(args)
    return [
        Violation(
            tuple(s.flag(dest) for dest in dests),
            f"{s.flag(dests[0])} needs {package} {least} or later, found {versions[package]}.",
            "machine",
        )
        for dests, package, least in _MINIMUM_VERSIONS
        if package in versions and all(getattr(s, dest) for dest in dests) and _older(versions[package], least)
    ]


def environment_defaults(args: Arguments | Settings, env: Mapping[str, str], arch: int | None) -> dict[str, str]:
    """Return the variables that a run should set because its flags imply them, unless they are set."""
    s = _flat(args)
    wanted = _flight_recorder(s, env)
    if arch is None:
        return {name: value for name, value in wanted.items() if name not in env}
    if s.deterministic_mode:
        wanted |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    implementation = get_implementation(s)
    wanted |= {name: "1" for dest, name in implementation.switches.items() if getattr(s, dest)}
    if implementation.has_attention:
        wanted |= get_attention_backend(s).switches
    return {name: value for name, value in wanted.items() if name not in env}


def allocator_environment(args: Arguments | Settings, env: Mapping[str, str]) -> dict[str, str]:
    """Return variables to set before torch is imported, so that its allocator uses expandable segments.

    The number of routed tokens varies, which fragments segments of fixed size. Nothing is set if the user has chosen.
    NCCL does not register the buffers of captured graphs then.
    """
    s = _flat(args)
    if any(name in env for name in ALLOCATOR):
        return {}
    if s.cuda_graph_impl == "none":
        return {ALLOCATOR[0]: EXPANDABLE}
    return {ALLOCATOR[0]: EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"} if env.get("NCCL_GRAPH_REGISTER", "0") == "0" else {}


def _flight_recorder(s: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torch's flight recorder, under present and older names, if it is requested."""
    path = (
        env.get("TORCH_FR_DUMP_TEMP_FILE") or env.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE") or s.flight_recorder_dump_path
    )
    if path is None:
        return {}
    prefix = os.path.join(path, "_dump_") if os.path.isdir(path) else path
    size = (
        env.get("TORCH_FR_BUFFER_SIZE")
        or env.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
        or str(s.flight_recorder_trace_buffer_size)
    )
    return {
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(s.flight_recorder_dump_on_timeout)),
        "TORCH_INCLUDE_STACK_TRACE": str(int(s.flight_recorder_include_stack_trace)),
        "TORCH_INCLUDE_ONLY_ACTIVE": str(int(s.flight_recorder_include_only_active)),
        "TORCH_NCCL_EXTRA_DUMP_ON_EXEC": str(int(s.flight_recorder_extra_dump_on_exec)),
    }


def _flat(args: Arguments | Settings) -> Settings:
    """The same flags as flat settings."""
    if isinstance(args, Settings):
        return args
    s = Settings(OPTIONS)
    s.values.update(args.as_dict())
    s.spelling.update(args.spelling)
    s.source.update(args.source)
    s.requests.update({dest: (s.values[dest], s.source[dest]) for dest in s.spelling})
    return s


def _finding(s: Settings, message: str, *dests: str, kind: str = "machine") -> Violation:
    return Violation(tuple(s.flag(dest) for dest in dests), message, kind)


def _env(env: Mapping[str, str], name: str) -> str:
    return f"{name}={env[name]}" if name in env else f"{name} is not set"


def one_connection_for_split_layers(
    s: Settings, f: DerivedSizes, env: Mapping[str, str], arch: int
) -> Iterator[Violation]:
    """Before Blackwell the order of kernels on one connection is what overlaps communication with computation."""
    split = [d for d, n in (("tensor_model_parallel_size", f.tp), ("context_parallel_size", f.cp)) if n > 1]
    if not split or arch >= BLACKWELL or env.get(CONNECTIONS) == "1":
        return
    lenient = [d for d in ("overlap_moe_expert_parallel_comm", *WRAPPED_FLAGS) if getattr(s, d)]
    if lenient:
        message = (
            f"{s.describe(split[0])} with {s.flag(lenient[0])}: on GPUs before Blackwell both want different values of "
            f"{CONNECTIONS}; expect less overlap."
        )
        yield _finding(s, message, split[0], lenient[0], kind="note")
        return
    message = (
        f"{s.describe(split[0])} on a GPU before Blackwell needs {CONNECTIONS}=1 in the environment "
        f"({_env(env, CONNECTIONS)}): kernels must start in the order they are issued."
    )
    yield _finding(s, message, *split)


def several_connections(s: Settings, _f: DerivedSizes, env: Mapping[str, str], _arch: int) -> Iterator[Violation]:
    if env.get(CONNECTIONS) != "1":
        return
    for dest in WRAPPED_FLAGS:
        if getattr(s, dest):
            message = (
                f"{s.flag(dest)} needs {CONNECTIONS} above 1 or not set ({_env(env, CONNECTIONS)}): gathers must run "
                "during computation."
            )
            yield _finding(s, message, dest)
    if s.pipeline_model_parallel_comm_backend == "ucc":
        message = f"{s.describe('pipeline_model_parallel_comm_backend')} needs {CONNECTIONS} above 1 or not set."
        yield _finding(s, message, "pipeline_model_parallel_comm_backend")
    if s.overlap_moe_expert_parallel_comm:
        message = f"{s.flag('overlap_moe_expert_parallel_comm')} overlaps better with {CONNECTIONS}=32 than with 1."
        yield _finding(s, message, "overlap_moe_expert_parallel_comm", kind="note")


def deterministic_libraries(s: Settings, _f: DerivedSizes, env: Mapping[str, str], _arch: int) -> Iterator[Violation]:
    if not s.deterministic_mode:
        return
    for name, accepted in DETERMINISTIC:
        if name in env and env[name] not in accepted:
            message = (
                f"{s.flag('deterministic_mode')} needs {name} to be {' or '.join(accepted)}, but {_env(env, name)}."
            )
            yield _finding(s, message, "deterministic_mode")


def offloading_switch(s: Settings, _f: DerivedSizes, env: Mapping[str, str], _arch: int) -> Iterator[Violation]:
    dest, name = "fine_grained_activation_offloading", "NVTE_CPU_OFFLOAD_V1"
    if s.fine_grained_activation_offloading and env.get(name) != "1":
        message = f"{s.flag(dest)} needs {name}=1 in the environment ({_env(env, name)})."
        yield _finding(s, message, dest)


def expandable_segments(s: Settings, _f: DerivedSizes, env: Mapping[str, str], _arch: int) -> Iterator[Violation]:
    allocator = next((name for name in ALLOCATOR if name in env), None)
    if allocator is None:
        return
    if EXPANDABLE not in env[allocator]:
        if s.num_experts:
            message = (
                f"{_env(env, allocator)} is kept: without {EXPANDABLE} memory fragments, since {s.flag('num_experts')} "
                "makes sizes vary with the routing."
            )
            yield _finding(s, message, "num_experts", kind="note")
        return
    if s.cuda_graph_impl == "transformer_engine" and env.get("NCCL_GRAPH_REGISTER") != "0":
        message = (
            f"{s.describe('cuda_graph_impl')} with {_env(env, allocator)} needs NCCL_GRAPH_REGISTER=0 in the "
            f"environment ({_env(env, 'NCCL_GRAPH_REGISTER')}): registered buffers may move."
        )
        yield _finding(s, message, "cuda_graph_impl")


def library_switches(s: Settings, _f: DerivedSizes, env: Mapping[str, str], _arch: int) -> Iterator[Violation]:
    implementation = get_implementation(s)
    for name, value in get_attention_backend(s).switches.items() if implementation.has_attention else ():
        if env.get(name, value) != value:
            message = f"{s.describe(ATTENTION_BACKEND)} needs {name}={value} or not set, but {_env(env, name)}."
            yield _finding(s, message, ATTENTION_BACKEND)
    for dest, name in implementation.switches.items():
        if name in env and (env[name] == "1") != bool(getattr(s, dest)):
            yield _finding(s, f"{_env(env, name)} does not agree with {s.flag(dest)}; set both or neither.", dest)


def gpu_generation(s: Settings, _f: DerivedSizes, _environment: Mapping[str, str], arch: int) -> Iterator[Violation]:
    if s.moe_grouped_gemm and arch < 8:
        message = f"{s.flag('moe_grouped_gemm')} needs a GPU of compute capability 8.0 or later, this one has {arch}.x."
        yield _finding(s, message, "moe_grouped_gemm")
    dispatcher = get_dispatcher(s)
    if arch < dispatcher.compute_capability:
        message = (
            f"{s.describe(dispatcher.dest)} needs a GPU of compute capability {dispatcher.compute_capability}.0 or "
            f"later, this one has {arch}.x."
        )
        yield _finding(s, message, dispatcher.dest)
    fmt = quantized_format(s)
    if fmt is not None and fmt.needs_blackwell and arch < BLACKWELL:
        dest = naming_flag(fmt, lambda each: each.needs_blackwell)
        message = (
            f"{s.describe(dest)} has hardware support from Blackwell on (compute capability 10), this GPU has {arch}.x."
        )
        yield _finding(s, message, dest, kind="note")


def profiling_on_a_cpu(s: Settings) -> Iterator[Violation]:
    """Note what marks for nsys are replaced by: the CUDA driver starts and stops its recording."""
    if s.profile and not s.use_pytorch_profiler:
        message = f"{s.flag('profile')}: on a CPU torch's profiler writes a trace, as with --use-pytorch-profiler."
        yield _finding(s, message, "profile", kind="note")


def _older(version: str, least: str) -> bool:
    """Return whether the leading numbers of a version such as 2.7.0+cu129 are before those of another."""
    parts = [tuple(int(n) for n in re.findall(r"\d+", text.split("+")[0])[:2]) for text in (version, least)]
    return parts[0] < parts[1]


_MINIMUM_VERSIONS = (
    (("moe_permute_fusion",), "transformer_engine", "2.1"),
    (("moe_router_fusion",), "transformer_engine", "2.7"),
    (("delay_wgrad_compute", "overlap_grad_reduce"), "transformer_engine", "2.8"),
    (("overlap_moe_expert_parallel_comm",), "torch", "2.6"),
)
RULES: tuple[Rule, ...] = (
    one_connection_for_split_layers,
    several_connections,
    deterministic_libraries,
    offloading_switch,
    expandable_segments,
    library_switches,
    gpu_generation,
)
