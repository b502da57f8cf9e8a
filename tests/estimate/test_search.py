"""The search: results are valid, fit the memory and match their report; layouts are complete; replaced flags are dropped."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from commands import call_main
from drawing.reading import SVG, root

from arguments import parse_args
from arguments.rules.layout_grammar import DECODER, read_layout
from arguments.stage_layout import chunk_layouts
from arguments.vocabulary import padded_vocab_size_from_flags
from moe_trainer.commands import plan as plan_script
from moe_trainer.commands import train_process
from moe_trainer.commands.checkpoint_flags import spell_checkpoint
from moe_trainer.commands.validate_only import run_validate_only
from moe_trainer.estimate.hardware import GIB, find_hardware
from moe_trainer.estimate.parallel_configs import (
    ParallelConfig,
    dispatcher_choices,
    divisors,
    gemm_formats,
    layer_counts,
    layout_text,
    parallel_shapes,
    recompute_sets,
)
from moe_trainer.estimate.pieces import make_rows
from moe_trainer.estimate.plan import Plan, PlanError, closest_reference_run, make_plan
from moe_trainer.estimate.search import (
    DEFAULT_HEADROOM,
    Estimate,
    Estimator,
    RankedConfig,
    SearchResult,
    base_arguments,
    explain_speedup,
    ranked,
    search,
    search_formats,
    ties,
)
from moe_trainer.estimate.search_pictures import search_figures, search_picture
from moe_trainer.estimate.search_text import launch_line, search_lines
from moe_trainer.estimate.uncertainty import ErrorBar, error_bar

ROOT = Path(__file__).parents[2]
FLAGS = "--preset qwen3_30b_a3b --mock-data --global-batch-size 64".split()


@pytest.fixture(scope="module")
def outcome():
    return search(
        [*FLAGS, "--tensor-model-parallel-size", "2", "--sequence-parallel"], 16, find_hardware("h100"), best=8
    )


def test_search_results_are_valid_and_fit(outcome, capsys):
    assert len(outcome.found) == 8 and outcome.rejected == 0 and outcome.seen > outcome.planned >= 8
    fastest = min(each.plan.time.step for each in outcome.found)
    assert all(ties(outcome.found[0].plan, each.plan) for each in outcome.found if each.plan.time.step == fastest)
    for each in outcome.found:
        argv = [*FLAGS, *each.argv, "--world-size", "16"]
        assert run_validate_only(argv) == 0, argv
        capsys.readouterr()
        assert make_plan(parse_args([*FLAGS, *each.argv], 16), 16, find_hardware("h100")).margin >= 0
        assert each.bottleneck
    shapes_found = Counter(replace(each.mapping, recompute=(), backend="", overlap=False) for each in outcome.found)
    assert max(shapes_found.values()) <= 2  # the fastest, and the fastest whose choices are not doubtful


FOUR = (
    ("deepseek_v3", "h100", 1024, "--fp8-format e4m3 --fp8-recipe blockwise --global-batch-size 8192"),
    ("deepseek_v3", "gb200", 256, "--fp8-format e4m3 --fp8-recipe mxfp8 --global-batch-size 8192"),
    ("qwen3_235b_a22b", "h100", 256, "--global-batch-size 2048"),
    ("mixtral_8x7b", "h100", 64, "--global-batch-size 256"),
)


@pytest.mark.slow
@pytest.mark.parametrize("preset, machine, gpus, flags", FOUR)
def test_search_finds_mappings_as_good_as_published_ones(preset, machine, gpus, flags, capsys):
    """Ten valid mappings that fit; the published mapping is not better than the first."""
    flags = ["--preset", preset, "--mock-data", "--bf16", *flags.split()]
    outcome = search(flags, gpus, find_hardware(machine))
    assert len(outcome.found) == 10
    for each in outcome.found:
        assert each.plan.margin >= 0 and each.plan.headroom >= DEFAULT_HEADROOM and each.bottleneck
        assert run_validate_only([*flags, *each.argv, "--world-size", str(gpus)]) == 0
        capsys.readouterr()
    assert (outcome.published is None) == (preset == "mixtral_8x7b")
    if outcome.published is not None:
        run, plan = outcome.published
        mapping = plan.args.parallel
        assert (
            mapping.tensor_model_parallel_size,
            mapping.pipeline_model_parallel_size,
            mapping.expert_model_parallel_size,
        ) == (run.tp, run.pp, run.ep)
        first = outcome.found[0].plan
        assert first.tokens_per_second > 0.98 * plan.tokens_per_second


def test_search_compares_number_formats():
    flags = ["--preset", "mixtral_tiny", "--mock-data", "--fp16", "--global-batch-size", "16"]
    outcome = search_formats(flags, ("bf16", "blockwise"), 4, find_hardware("h100"), best=30)
    widths = {each.plan.width for each in outcome.found}
    assert widths == {"bf16", "fp8"} and "--fp16" not in outcome.base
    for each in outcome.found[::7]:
        args = parse_args([*outcome.base, *each.argv], 4)
        assert args.precision.bf16 and bool(args.precision.fp8) == (each.plan.width == "fp8")
    assert gemm_formats(find_hardware("a100")) == ("bf16",)
    assert gemm_formats(find_hardware("h100")) == ("bf16", "tensorwise", "blockwise")
    assert gemm_formats(find_hardware("gb300"))[:3] == ("bf16", "tensorwise", "mxfp8")
    assert "nvfp4" in gemm_formats(find_hardware("gb300"))
    with pytest.raises(PlanError, match="no GEMMs in mxfp8"):
        search_formats(flags, ("mxfp8",), 4, find_hardware("h100"))


def test_refusals_of_several_formats_are_counted_together(monkeypatch):
    refused = SearchResult((), (), 1, 0, 2, 2, 0.0, rejections=(("not legal", 2),))
    monkeypatch.setattr("moe_trainer.estimate.search.search", lambda *_: refused)
    flags = ["--preset", "mixtral_tiny", "--mock-data", "--global-batch-size", "16"]
    outcome = search_formats(flags, ("bf16", "blockwise"), 4, find_hardware("h100"))
    assert outcome.rejected == 4 and outcome.rejections == (("not legal", 4),)


def test_simplest_mapping_comes_first_on_equal_error_bars():
    flags = ["--preset", "mixtral_8x7b", "--mock-data", "--bf16", "--global-batch-size", "256"]
    simple = ParallelConfig(2, 1, 1, 1, 8, 1, 2, (), "deepep", False)
    found = []
    for mapping in (replace(simple, pp=2, vpp=12, ep=4), simple):
        line = mapping.flags(layout_text(layer_counts(32, mapping.pp * mapping.vpp, 1.0), 0))
        found.append(
            RankedConfig(
                mapping,
                tuple(line),
                make_plan(parse_args([*flags, *line], 64), 64, find_hardware("h100")),
                "",
                ErrorBar(0.1, ()),
            )
        )
    assert (
        ties(found[0].plan, found[1].plan)
        and closest_reference_run(found[0].plan).distance < closest_reference_run(found[1].plan).distance
    )
    assert [each.mapping.num_features for each in ranked(found, 2)] == [3, 5]


def test_search_respects_the_headroom():
    flags = "--preset mixtral_8x7b --num-layers 16 --mock-data --bf16 --global-batch-size 64".split()
    tight, wide = (search(flags, 4, find_hardware("h200"), best=3, headroom=headroom) for headroom in (1.0, 2.5))
    assert all(each.plan.headroom >= 2.5 for each in wide.found)
    assert min(each.plan.headroom for each in tight.found) < 2.5 and tight.seen > tight.small >= wide.small


def test_first_result_is_explained(outcome):
    first, second = outcome.found[0].plan, outcome.found[1].plan
    assert first.time.step <= second.time.step or ties(first, second)
    assert explain_speedup(first, second) or second.time.step / first.time.step < 1.01
    assert outcome.own is not None and outcome.own.tokens_per_second < first.tokens_per_second


def test_search_estimates_are_close_to_full_plans(outcome):
    """The estimates of the first pass decide which mappings are planned in full."""
    args = parse_args(FLAGS, None)
    hardware = find_hardware("h100")
    estimator = Estimator(args, 16, hardware, padded_vocab_size_from_flags(args))
    for each in outcome.found:
        estimate = estimator.estimate(each.mapping)
        assert estimate.seconds == pytest.approx(each.plan.time.step, rel=0.15)
        assert estimate.memory == pytest.approx(each.plan.peak.total, rel=0.25)


def test_searched_mappings_pass_the_rules():
    """A sample of all mappings that the search may return passes the rules."""
    args, hardware = parse_args(FLAGS, None), find_hardware("gb200")
    mappings = [
        replace(shape, recompute=recompute, backend=backend, overlap=overlap)
        for shape in parallel_shapes(args, 32, hardware)
        for (backend, overlap), recompute in itertools.product(
            dispatcher_choices(args, hardware, shape.ep, shape.etp), recompute_sets(args)
        )
        if not (overlap and (recompute == ("full",) or "moe" in recompute or shape.pp > 1 and shape.vpp == 1))
    ]
    for mapping in mappings[::397]:
        layout = layout_text(layer_counts(48, mapping.pp * mapping.vpp, 1.0), 0)
        args = parse_args([*FLAGS, *mapping.flags(layout)], 32)
        assert not args.unbuildable
        assert args.parallel == mapping.applied(args, layout).parallel


@pytest.mark.parametrize(
    "layers, stages, extra",
    [(61, 16, 2.4), (61, 32, 2.4), (94, 48, 1.0), (32, 1, 0.5), (4, 4, 0.0), (61, 62, 3.0), (5, 4, 9.0)],
)
def test_pipeline_layouts_contain_every_layer(layers, stages, extra):
    counts = layer_counts(layers, stages, extra)
    assert (
        sum(counts) == layers
        and len(counts) == stages
        and min(counts) >= 0
        and max(counts) - min(counts[:-1] or counts) <= 1
    )
    if stages > 1:
        read = read_layout(layout_text(counts, 1))
        assert [stage.count(DECODER) for stage in read.stages] == counts and read.stages[-1].endswith("mL")


def test_the_published_layout_of_deepseek_v3():
    assert layout_text(layer_counts(61, 32, 2.4), 1) == "Et|(tt|)*30mL"


def test_dispatcher_choices_fit_the_hardware():
    args = parse_args(FLAGS, None)
    half = parse_args([*FLAGS, "--bf16"], None)
    assert ("hybridep", False) in dispatcher_choices(args, find_hardware("gb200"), 8, 1)
    assert ("hybridep", True) in dispatcher_choices(half, find_hardware("gb200"), 8, 1)
    assert dispatcher_choices(args, find_hardware("h100"), 1, 1) == [("", False)]
    assert divisors(12, 6) == [1, 2, 3, 4, 6]


def test_a_cpu_is_advised_no_dispatcher_of_gpus():
    args = parse_args([*FLAGS, "--micro-batch-size", "1", "--bf16"])
    names = {
        name: {backend for backend, _ in dispatcher_choices(args, find_hardware(name), 8, 1)}
        for name in ("cpu", "h100")
    }
    assert "deepep" in names["h100"] and not {"deepep", "hybridep"} & names["cpu"]
    line = "--preset mixtral_tiny --mock-data --world-size 2 --expert-model-parallel-size 2 --hardware cpu".split()
    reasons = {row.piece.name: row.reason for row in make_rows(line)}
    for name in ("HybridEP instead of all-to-all", "DeepEP instead of all-to-all", "paged stash"):
        assert reasons[name] == "its dispatcher is made of kernels of GPUs"


def test_a_model_without_its_weights_is_planned_and_searched(tmp_path, monkeypatch, capsys):
    """config.json of a Hugging Face folder is enough; fixes and other mappings keep its model."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 512}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
    config |= {"norm_topk_prob": True, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
    config |= {"rms_norm_eps": 1e-6, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"--load {tmp_path} --use-checkpoint-args --mock-data --seq-length 32 --micro-batch-size 1 --bf16"
    words = f"{line} --global-batch-size 8 --train-iters 2 --lr 1e-3 --eval-iters 0".split()
    assert train_process.main([*words, "--world-size", "4", "--validate-only"]) == 0
    counted = next(text for text in capsys.readouterr().out.splitlines() if text.startswith("parameters: "))
    for mode in (["--world-size", "4"], ["search", "--gpus", "4"], ["pieces", "--world-size", "4"]):
        assert plan_script.main([*mode, *words, "--hardware", "a100"]) == 0, capsys.readouterr()
    planned = capsys.readouterr().out
    assert "mappings of 4 x a100" in planned and counted.split()[1] == "288,128", counted
    with pytest.raises(ValueError, match="--num-layers 3"):
        spell_checkpoint([*words, "--num-layers", "3"])
    small = tmp_path / "small.yaml"
    small.write_text("like: a100\nmemory_gib: 3.004\n")
    assert plan_script.main([*words, "--world-size", "4", "--hardware", str(small)]) == 3
    assert "--use-distributed-optimizer" in capsys.readouterr().out


def test_flags_of_a_mapping_name_every_size():
    sizes = "--tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 1"
    more = "--expert-model-parallel-size 1 --micro-batch-size 2 --expert-tensor-parallel-size 1"
    plain = f"{sizes} {more} --moe-token-dispatcher-type alltoall"
    assert ParallelConfig(1, 1, 1, 1, 1, 1, 2).flags("EtL") == plain.split()


def test_a_single_stage_has_a_layout():
    assert layout_text([3], 1) == "Et*3mL" and read_layout("Et*3mL").stages == ("EtttmL",)


PASTED = "A=1 srun --gpus 8 torchrun --nproc_per_node=4 --nnodes 2 pretrain_moe.py"


@pytest.mark.parametrize(
    "words, code, message",
    [
        (
            "search --preset mixtral_tiny --mock-data --gpus 4 --hardware a100 --best 3",
            0,
            "torchrun --nproc-per-node 4 pretrain_moe.py --preset mixtral_tiny",
        ),
        ("search --preset deepseek_v3 --mock-data --gpus 8", 2, "256 devices hold it"),
        ("search --preset mixtral_8x7b --mock-data --gpus 7", 2, "--use-precision-aware-optimizer"),
        ("search --preset mixtral_8x7b --mock-data --gpus 67", 2, "no sizes divide"),
        ("search --preset mixtral_tiny --mock-data --gpus 4 --formats bf16,fp9", 2, "fp9"),
        (
            "search --preset mixtral_tiny --mock-data --gpus 2 --hardware b200 --formats bf16,mxfp8 --best 2",
            0,
            "mappings of 2 x b200",
        ),
        ("search --preset no_such --mock-data --gpus 8", 2, "no_such"),
        ("search --preset mixtral_tiny --gpus 0", 2, "--gpus"),
        ("search --preset mixtral_tiny --gpus 8 --headrom 1", 2, "did you mean --headroom?"),
        ("search --preset mixtral_tiny --gpu=8", 2, "did you mean --gpus?"),
        ("search --preset mixtral_tiny", 2, "--gpus N is missing"),
        ("search --preset mixtral_tiny --gpus 8 --num-layer 3", 2, "did you mean --num-layers"),
        ("--preset mixtral_tiny --mock-data --world-size 4", 0, "tokens/s/GPU"),
        (f"{PASTED} --preset mixtral_tiny --mock-data --hardware a100", 0, "8 x a100"),
        (f"search {PASTED} --preset mixtral_tiny --mock-data --hardware a100 --best 1", 0, "mappings of 8 x a100"),
        ("torchrun --nproc-per-node gpu pretrain_moe.py --preset mixtral_tiny", 2, "--nproc-per-node gpu: a number"),
        ("", 2, "search FLAGS"),
    ],
)
def test_search_command(words, code, message, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    done = call_main(plan_script.main, words.split(), capsys)
    assert done.returncode == code and message in done.stdout + done.stderr, done


MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm "
    "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8 "
    "--no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer --tokenizer-model t.model --data-path d --split 99990,8,2 "
    "--micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5 "
    "--weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 "
    "--expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --eval-interval 1000 --eval-iters 10 --no-load-optim --no-load-rng"
).split()
"""examples/mixtral/train_mixtral_8x7b_distributed.sh of Megatron-LM: 32 H100."""


@pytest.fixture(scope="module")
def mixtral():
    return search(MIXTRAL, 32, find_hardware("h100"), best=3)


def test_search_of_a_command_line_without_preset(mixtral, capsys):
    """Flags outside the mapping are kept; the printed command is valid and has its launcher."""
    line = launch_line(mixtral, 32).split()
    assert line[:4] == ["torchrun", "--nproc-per-node", "8", "--nnodes"] and line[4] == "4"
    assert set(MIXTRAL) - set(line) <= {"--pipeline-model-parallel-size", "4", "256"} | set(mixtral.replaced)
    assert (
        "--micro-batch-size" in mixtral.replaced
        and "--global-batch-size" in line
        and line.count("--micro-batch-size") == 1
    )
    assert run_validate_only([*mixtral.base, *mixtral.found[0].argv, "--world-size", "32"]) == 0
    capsys.readouterr()
    assert mixtral.own is not None and "your own mapping" in "\n".join(search_lines(mixtral, 32, "h100"))


def test_flags_that_need_a_dispatcher_are_kept():
    """Padding for quantization needs alltoall or flex, which the searched mappings set."""
    line = [*MIXTRAL, *"--fp8-format hybrid --moe-router-padding-for-quantization --num-layers 4".split()]
    base, args, preset = base_arguments(line)
    assert not preset
    assert "--moe-token-dispatcher-type" not in base and args.moe.moe_router_padding_for_quantization
    assert search(line, 4, find_hardware("h200"), best=1).found


def test_preset_may_set_searched_flags(tmp_path):
    path = tmp_path / "mine.yaml"
    text = (ROOT / "model_zoo" / "mixtral_tiny.yaml").read_text()
    path.write_text(
        text + "\n  --tensor-model-parallel-size: 2\n  --sequence-parallel: true\n  --expert-model-parallel-size: 4\n"
    )
    outcome = search(["--preset", str(path), "--mock-data", "--bf16"], 4, find_hardware("h100"), best=30)
    found = {each.mapping.tp for each in outcome.found}
    assert {1, 2} <= found
    for each in outcome.found:
        assert each.plan.args.parallel.tensor_model_parallel_size == each.mapping.tp
        assert each.plan.args.parallel.expert_model_parallel_size == each.mapping.ep


PIPELINE_PRESETS = (
    "  --pipeline-model-parallel-layout: Et|t|t|tL\n  --delay-wgrad-compute: true\n"
    "  --overlap-moe-expert-parallel-comm: true\n  --recompute-granularity: selective\n  --recompute-modules: layernorm\n",
    "  --num-virtual-stages-per-pipeline-rank: 2\n  --microbatch-group-size-per-virtual-pipeline-stage: 4\n"
    "  --pipeline-schedule: interleaved\n",
    "  --account-for-embedding-in-pipeline-split: true\n  --account-for-loss-in-pipeline-split: true\n",
)


@pytest.mark.parametrize("lines", PIPELINE_PRESETS)
def test_search_replaces_the_pipeline_of_a_preset(lines, tmp_path):
    """Every row shows what its line runs, also where the preset has several stages and the row has one."""
    path = tmp_path / "mine.yaml"
    sizes = "\n  --pipeline-model-parallel-size: 2\n  --expert-model-parallel-size: 2\n"
    path.write_text((ROOT / "model_zoo" / "mixtral_tiny.yaml").read_text() + sizes + lines)
    flags = ["--preset", str(path), "--mock-data", "--bf16", "--global-batch-size", "64", "--num-layers", "4"]
    outcome = search(flags, 4, find_hardware("h100"), best=60)
    assert {1, 2} <= {each.mapping.pp for each in outcome.found}
    assert {1, 2} <= {each.mapping.vpp for each in outcome.found}
    assert {True, False} <= {each.mapping.overlap for each in outcome.found}
    for each in outcome.found:
        args = parse_args([*outcome.base, *each.argv], 4)
        parallel, mapping = args.parallel, each.mapping
        shown = (parallel.pipeline_model_parallel_size, len(chunk_layouts(args.model, parallel)[0]))
        assert shown == (mapping.pp, mapping.vpp), each.argv
        assert parallel.expert_model_parallel_size == mapping.ep
        assert parallel.overlap_moe_expert_parallel_comm == mapping.overlap
    plans = [each.plan.args for each in outcome.found]
    assert all(
        (one.parallel, one.moe, one.training) != (other.parallel, other.moe, other.training)
        for one, other in itertools.combinations(plans, 2)
    )


@pytest.mark.parametrize(
    "name, machine, gpus",
    [
        ("zoo_readme/DeepSeek-V3", "h100", 256),
        ("zoo_yaml/Qwen3-30B-A3B/sbatch/bf16", "h100", 16),
        ("zoo_yaml/Mixtral-8x7B/sbatch/mxfp8", "gb200", 16),
    ],
)
@pytest.mark.slow
def test_recipes_without_presets_can_be_searched(shared, name, machine, gpus):
    recipe = next(
        each for each in json.loads((shared / "reference" / "recipes.json").read_text()) if each["name"] == name
    )
    assert "--preset" not in recipe["argv"]
    outcome = search(recipe["argv"], gpus, find_hardware(machine), best=2)
    assert len(outcome.found) == 2


def test_ties_prefer_the_mapping_with_the_smallest_error_bar(mixtral):
    """A mapping with context parallelism at 4K tokens has a wide error bar; a clearly slower mapping is no tie."""
    one = mixtral.found[0]
    hardware = find_hardware("h100")
    flags = [*mixtral.base, *one.argv]
    half = make_plan(parse_args([*flags, "--context-parallel-size", "2"], 32), 32, hardware)

    def timed(plan, seconds):
        return RankedConfig(
            one.mapping,
            one.argv,
            replace(plan, time=replace(plan.time, compute=plan.time.compute + seconds - plan.time.step)),
            "",
            error_bar(plan),
        )

    plain, doubtful, slow = timed(one.plan, 1.0), timed(half, 0.9), timed(one.plan, 1.3)
    assert doubtful.bar.relative > plain.bar.relative + 0.1
    assert [each.plan.time.step for each in ranked([slow, doubtful, plain], 3)] == pytest.approx([1.0, 0.9, 1.3])
    assert [each.plan.time.step for each in ranked([plain, timed(half, 0.4)], 2)] == pytest.approx([0.4, 1.0])


def test_search_reports_the_rule_that_rejects_all_mappings(monkeypatch):
    """No mapping is valid: the rule is named, not a lack of memory."""
    monkeypatch.setattr("moe_trainer.estimate.search.MAX_REJECTED", 60)
    line = [*MIXTRAL, *"--num-distributed-optimizer-instances 7 --num-layers 4".split()]
    outcome = search(line, 4, find_hardware("h100"), best=1)
    text = "\n".join(search_lines(outcome, 4, "h100"))
    assert not outcome.found and outcome.rejected == outcome.planned
    assert (
        "no mapping is legal" in text and "--num-distributed-optimizer-instances 7" in text and "none fits" not in text
    )


def test_estimates_are_corrected_by_their_pipeline_and_overlap(monkeypatch):
    """Also by what the host launches of an overlapped exchange; with experts in 8 bits by their width on a rank."""
    _, args, _ = base_arguments(FLAGS)
    hardware = find_hardware("h100")
    mapping = ParallelConfig(1, 1, 2, 2, 8, 1, 1, backend="deepep", overlap=True)
    found = [Estimator(args, 16, hardware, 151936).estimate(mapping).seconds]
    monkeypatch.setattr("moe_trainer.estimate.search.correction", lambda args, hardware: 1.0)
    found.append(Estimator(args, 16, hardware, 151936).estimate(mapping).seconds)
    assert found[0] > 1.15 * found[1]


def test_tried_mappings_are_planned_before_untried_ones_of_about_their_time():
    _, args, _ = base_arguments(MIXTRAL)
    estimator = Estimator(args, 128, find_hardware("h100"), 32000)
    tried = ParallelConfig(2, 1, 8, 1, 8, 1, 1)
    untried = [replace(tried, ep=1, pp=2), replace(tried, ep=1, pp=4), tried]
    estimates = [
        Estimate(each, layout_text(layer_counts(args.model.num_layers, each.pp, 1.0), 0), 1.0 + 0.01 * number, 0.0)
        for number, each in enumerate(untried)
    ]
    assert [each.mapping for each in estimator.planning_order(estimates)][:2] == [untried[0], tried]


def test_search_reports_progress():
    lines = []
    search([*FLAGS, "--num-layers", "4"], 4, find_hardware("h100"), best=1, progress=lines.append)
    assert any("mappings estimated" in text and " of " in text for text in lines) and any(
        "planned in full" in text for text in lines
    )


def test_picture_of_a_search_has_its_mappings(outcome, tmp_path, capsys):
    svg = search_picture(outcome)
    points = root(svg).findall(f"{SVG}circle")
    tips = [point.findtext(f"{SVG}title") for point in points]
    num_named = 1 + (outcome.published is not None)
    assert len(points) == len(outcome.fitting) + num_named and len(outcome.fitting) > len(outcome.found)
    for number, each in enumerate(outcome.found, start=1):
        assert (
            sum(tip.startswith(f"{number}: ") and f"{each.plan.peak.total / GIB:.1f} GiB" in tip for tip in tips) == 1
        )
    assert any(tip.startswith("your own mapping") for tip in tips)
    headings = [figure.heading for figure in search_figures(outcome)]
    assert headings[:2] == ["Speed against memory", "Memory of the first mapping"]
    assert not list(search_figures(replace(outcome, found=())))


def test_search_report_and_where_it_is_not_taken(tmp_path, capsys):
    words = ["search", "--preset", "mixtral_tiny", "--mock-data", "--global-batch-size", "16", "--gpus", "2"]
    path = tmp_path / "search.html"
    assert plan_script.main([*words, "--report-html", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].strip().split(" pretrain")[0] in path.read_text(encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        plan_script.main([*words, "--report-html", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"--report-html {tmp_path}: the file cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        plan_script.main(["pieces", *words[1:5], "--world-size", "2", "--report-html", str(path)])
    assert stopped.value.code == 2 and "leave pieces out" in capsys.readouterr().err


def test_plans_must_fit_with_the_given_headroom(monkeypatch):
    asked = set()
    monkeypatch.setattr(Plan, "fits", lambda plan, headroom: not asked.add(headroom))
    flags = ["--preset", "mixtral_tiny", "--mock-data", "--global-batch-size", "4"]
    assert search(flags, 1, find_hardware("h100"), best=1, headroom=1.7).found
    assert asked == {1.7}
