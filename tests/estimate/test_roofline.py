"""Costs of operators (bytes, FLOPs, limits), and the step time that they add up to."""

import pytest

from arguments import parse_args
from moe_trainer.estimate.executed_step import executed_args, rank_of_stage, stages_to_execute
from moe_trainer.estimate.hardware import find_hardware
from moe_trainer.estimate.interconnect import Interconnect
from moe_trainer.estimate.layer_time import attention_rates, gemm_seconds
from moe_trainer.estimate.plan import make_plan
from moe_trainer.estimate.roofline import (
    FINISH,
    OPERATOR,
    START,
    WAIT,
    Collective,
    RecordingCosts,
    make_roofline,
    read_operator,
)

H100 = find_hardware("h100")
# text: bytes, FLOPs
OPERATORS = {
    "aten::mm.out|r,BFloat16,4x8,64|r,BFloat16,8x2,32|w,BFloat16,4x2,16": (112, 2 * 4 * 8 * 2),
    "aten::addmm|r,float32,4x2,32|r,bfloat16,4x8,64|r,bfloat16,8x2,32|o,float32,4x2,32": (160, 2 * 4 * 8 * 2),
    "aten::bmm|r,BFloat16,3x4x8,192|r,BFloat16,3x8x2,96|o,BFloat16,3x4x2,48": (336, 3 * 2 * 4 * 8 * 2),
    # rows of two experts times a weight each; and the gradient of the weights, which contracts the rows
    "aten::_grouped_mm|r,BFloat16,10x8,160|r,BFloat16,2x8x6,192|r,Int,2,8|o,BFloat16,10x6,120": (480, 2 * 10 * 8 * 6),
    "aten::_grouped_mm|r,BFloat16,6x10,120|r,BFloat16,10x8,160|r,Int,2,8|o,BFloat16,2x6x8,192": (480, 2 * 10 * 8 * 6),
    "aten::_scaled_dot_product_flash_attention causal|r,bfloat16,1x2x16x8,512|r,bfloat16,1x2x16x8,512|r,bfloat16,1x2x16x8,512|o,bfloat16,1x2x16x8,512": (
        2048,
        2 * 2 * 16 * 16 * (8 + 8) // 2,
    ),
    "aten::_scaled_dot_product_flash_attention_backward causal|r,bfloat16,1x2x16x8,512|r,bfloat16,1x2x16x8,512|r,bfloat16,1x2x16x8,512"
    "|r,bfloat16,1x2x16x8,512|o,bfloat16,1x2x16x8,512": (2560, int(2.5 * 2 * 2 * 16 * 16 * (8 + 8) // 2)),
    # what is overwritten is not read, what is changed is
    "aten::fill_.Scalar|w,Float,100,400": (400, 0),
    "copy on the device|r,BFloat16,100,200|w,Float,100,400": (600, 0),
    "aten::add.out|r,Float,100,400|r,BFloat16,100,200|w,Float,100,400": (1000, 0),
    "aten::mul_.Tensor|w,Float,100,400|r,Float,,4": (804, 0),
    "aten::_fused_adamw_|w,Float,9,36|w,Float,9,36|w,Float,9,36|w,Float,9,36": (7 * 36, 0),
    # of a table the rows that are picked
    "aten::index_select|r,BFloat16,1000x8,16000|r,Long,5,40|o,BFloat16,5x8,80": (200, 0),
    "aten::index_add_|w,Float,1000x8,32000|r,Long,5,40|r,Float,5x8,160": (520, 0),
    "aten::_embedding_bag_forward_only|r,BFloat16,64x16,2048|r,Long,32,256|r,Long,17,136|o,BFloat16,16x16,512": (
        1024 + 256 + 136 + 512,
        0,
    ),
    "triton::rows_kernel|o,BFloat16,10x8,160|o,BFloat16,2x6x8,192|o,BFloat16,10x6,120|o,Int,2,8": (480, 2 * 10 * 8 * 6),
    "triton::weight_kernel|o,BFloat16,10x6,120|o,BFloat16,10x8,160|o,BFloat16,2x6x8,192|o,Int,2,8": (
        480,
        2 * 10 * 8 * 6,
    ),
    # in 8 bits; tokens are the columns of what a weight gradient contracts
    "triton::block_rows_kernel|o,Float8_e4m3fn,10x8,80|o,Float8_e4m3fn,2x6x8,96|o,BFloat16,10x6,120|o,Float,10x1,40": (
        336,
        2 * 10 * 8 * 6,
    ),
    "triton::block_weight_kernel|o,Float8_e4m3fn,6x10,60|o,Float8_e4m3fn,8x10,80|o,BFloat16,2x6x8,192": (
        332,
        2 * 10 * 8 * 6,
    ),
    "triton::rows_kernel|o,BFloat16,10x8,160|o,Long,10,80": (240, 0),
    "triton::norm_kernel|o,BFloat16,4x8,64|o,BFloat16,4x8,64": (128, 0),
}


@pytest.mark.parametrize("text", OPERATORS)
def test_bytes_and_flops_of_operators(text):
    operator = read_operator(text)
    assert (operator.bytes, operator.flops) == OPERATORS[text]


def test_operator_times_use_the_rates_of_the_planner():
    left, right, flash = list(OPERATORS)[3:6]
    assert read_operator(left).compute(H100) == pytest.approx(2 * gemm_seconds(H100, 5, 6, 8))
    assert read_operator(right).compute(H100) == pytest.approx(2 * gemm_seconds(H100, 6, 8, 5))
    assert read_operator(flash).compute(H100) == pytest.approx(OPERATORS[flash][1] / attention_rates(H100, 16)[0])
    eight = "aten::_scaled_mm_v2|r,float8_e4m3fn,4x8,32|r,float8_e4m3fn,8x2,16|o,bfloat16,4x2,16"
    assert read_operator(eight).compute(H100) == pytest.approx(gemm_seconds(H100, 4, 2, 8, "fp8"))
    rows, grads = (text for text in OPERATORS if "block_" in text)
    assert read_operator(rows).compute(H100) == pytest.approx(2 * gemm_seconds(H100, 5, 6, 8, "fp8"))
    assert read_operator(grads).compute(H100) == pytest.approx(2 * gemm_seconds(H100, 6, 8, 5, "fp8"))
    single = "aten::mm|r,Float,4x8,128|r,Float,8x2,64|o,Float,4x2,32"
    assert read_operator(single).compute(H100) == pytest.approx(2 * gemm_seconds(H100, 4, 2, 8))


FLAGS = (
    "--preset mixtral_8x7b --mock-data --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --expert-model-parallel-size 8 "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer"
)
SLOW, FAST = "aten::fill_.Scalar|w,Float,1,1000000000", "aten::fill_.Scalar|w,Float,1,4"
PUBLISHED_RUNS = "all_to_all|ep|8|1|8192|1"


def make_recording(*events: tuple) -> dict[str, list]:
    """Events: (kind, text, microbatch, pass, and the captured part if it is in one)."""
    texts: dict[str, int] = {}
    return {
        "events": [
            [
                kind,
                *(texts.setdefault(word, len(texts)) for word in (text, "a.py:1 f", "decoder.layers.0")),
                microbatch,
                *(texts.setdefault(word, len(texts)) for word in (action, *(part or [""]))),
            ]
            for kind, text, microbatch, action, *part in events
        ],
        "texts": list(texts),
    }


def test_a_stage_of_layers_with_chunks_is_executed_like_no_other():
    flags = "--mock-data --pipeline-model-parallel-size 4 --expert-model-parallel-size 16"
    scout = f"--preset llama_4_scout {flags} --no-rope-freq 1"
    assert stages_to_execute(parse_args(scout.split(), 64)) == [0, 1, 3]
    half = [*scout.split(), "--window-attn-skip-freq", "([1]*24+[0]*24)"]
    assert stages_to_execute(parse_args(half, 64)) == [0, 1, 2, 3]


def test_step_time_is_the_sum_of_recorded_operators():
    plan = make_plan(parse_args(FLAGS.split(), 64), 64, H100)
    assert plan.num_microbatches == 16
    assert stages_to_execute(plan.args) == [0, 1, 3] and rank_of_stage(plan.args, 64, 1) == 16
    events = [(OPERATOR, SLOW, 0, "")]
    for microbatch in (1, 2, 3):
        events += [
            (OPERATOR, SLOW, microbatch, "forward 0"),
            (WAIT, "a", microbatch, "forward 0"),
            (OPERATOR, FAST, microbatch, "backward 0"),
        ]
    found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording(*events)))
    memory, constants = H100.hbm_tb_s * 1e12 * H100.constants.memory, H100.constants
    # the first launch; later ones are made while the device is busy, but the two after the wait
    assert found.time.optimizer == pytest.approx(1e9 / memory + constants.launch)
    idle = 16 * (constants.latency + constants.launch) + 15 * constants.launch
    assert found.time.compute == pytest.approx(16 * 1e9 / memory + idle)
    assert found.time.bubble > 3 * (1e9 / memory + constants.latency + constants.launch)
    line = found.busiest.lines["a.py:1 f"]
    assert line.kernels == {"memory": 17, "launch": 16} and found.busiest.host_waits == 16
    assert found.busiest.idle == pytest.approx(idle + constants.launch)


def test_collectives_overlap_with_computation():
    plan = make_plan(parse_args(FLAGS.split(), 64), 64, H100)
    ring = "all_gather|tp|2|1|1000000000|1"
    seconds = Interconnect(H100).ring(1e9, 1, 2)
    for overlaps, exposed in ((False, seconds), (True, seconds - 1e9 / (H100.hbm_tb_s * 1e12 * H100.constants.memory))):
        events = []
        for microbatch in (1, 2, 3):
            events += [
                (START, ring, microbatch, "forward 0"),
                *([(OPERATOR, SLOW, microbatch, "forward 0")] if overlaps else []),
                (FINISH, ring, microbatch, "forward 0"),
            ]
        found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording(*events)))
        first = H100.constants.launch if overlaps else 0.0  # the device waits for the first launch meanwhile
        assert found.time.tensor == pytest.approx(16 * exposed - first)


def test_host_runs_ahead_until_it_waits():
    plan = make_plan(parse_args(FLAGS.split(), 64), 64, H100)
    few = [(OPERATOR, SLOW, 1, "forward 0"), *[(OPERATOR, FAST, 1, "forward 0")] * 8]
    slow, constants = 1e9 / (H100.hbm_tb_s * 1e12 * H100.constants.memory), H100.constants
    found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording(*few)))
    assert found.busiest.idle == pytest.approx(constants.launch)  # eight launches take less than the first operator
    found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording(few[0], (WAIT, "a", 1, "forward 0"), *few[1:])))
    assert slow > 8 * constants.launch
    assert found.busiest.idle == pytest.approx(9 * constants.launch + constants.latency)


def test_full_iteration_graph_neither_launches_nor_waits():
    words = [*FLAGS.split(), "--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "1"]
    words += ["--moe-pad-expert-input-to-capacity", "--cuda-graph-impl", "full_iteration"]
    plan = make_plan(parse_args([*words, "--no-check-for-nan-in-loss-and-grad"], 64), 64, H100)
    events = [(OPERATOR, FAST, 1, "forward 0"), (WAIT, "a", 1, "forward 0"), (OPERATOR, FAST, 1, "forward 0")]
    found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording(*events)))
    assert found.busiest.idle == found.busiest.host_waits == 0


def test_copies_of_offloaded_tensors_overlap_the_computation():
    plan = make_plan(parse_args(FLAGS.split(), 64), 64, H100)
    copy = "copy to the host|r,Byte,1000000000,1000000000|w,Byte,1000000000,1000000000"
    slow = 1e9 / (H100.hbm_tb_s * 1e12 * H100.constants.memory)
    for copies in (0, 1):
        events = [(OPERATOR, SLOW, number, "forward 0") for number in (1, 2, 3)]
        events += [(OPERATOR, copy, number, "forward 0") for number in (1, 2, 3)] * copies
        found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording(*events)))
        expected = 16 * 1e9 / (H100.host_gb_s * 1e9) if copies else 16 * slow
        assert found.time.compute == pytest.approx(expected, rel=0.01)


def test_grouped_gemms_of_a_buffer_compute_the_tokens_that_arrive():
    words = [*FLAGS.split(), "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
    gemm = "aten::_grouped_mm|r,BFloat16,{0}x4096,1|r,BFloat16,1x4096x14336,1|r,Int,1,4|o,BFloat16,{0}x14336,1"
    seconds = []
    for flags, rows in (((), 8192), (("--moe-expert-rank-capacity-factor", "1.5"), 12288)):
        plan = make_plan(parse_args([*words, *flags], 64), 64, H100)
        events = make_recording((OPERATOR, gemm.format(rows), 1, "forward 0"))
        seconds.append(make_roofline(plan, dict.fromkeys((0, 1, 3), events)).busiest.total)
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


def test_slots_of_a_budget_take_what_their_tokens_take():
    """HybridEP has none."""
    exchange, slots, copy = (
        Collective("all_to_all", "ep", 8, 1, 10**9, 1),
        "ops/fixed_slots.py:1 f",
        read_operator(SLOW),
    )
    seconds = {}
    for factor in (1, 2):
        words = [*FLAGS.split(), "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]
        words += ["--moe-expert-rank-capacity-factor", str(factor)]
        plan = make_plan(parse_args(words, 64), 64, H100)
        costs = RecordingCosts(plan.args, H100, plan.vocab_rows, plan.num_microbatches, 3)
        times = [costs._operator_times(copy, line)["memory"] for line in (slots, "ops/permute.py:1 f")]
        seconds[factor] = [costs.collective(exchange) - H100.constants.latency, *times]
    for index, ratio in enumerate((2, 2, 1)):
        assert seconds[1][index] == pytest.approx(ratio * seconds[2][index]) and seconds[1][index] > 0


def test_casts_of_transformer_engine_take_what_the_plan_takes():
    words = [*FLAGS.split(), "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"]
    gemm = "aten::_scaled_mm_v2|r,float8_e4m3fn,8192x4096,1|r,float8_e4m3fn,4096x4096,1|o,bfloat16,8192x4096,1"
    cast = "triton::block_kernel|o,BFloat16,8192x4096,67108864|o,Byte,8192x4096,33554432"
    plain = gemm_seconds(find_hardware("gb200"), 8192, 4096, 4096, "fp8")
    for impl, casts in (("transformer_engine", 1), ("local", 2)):
        plan = make_plan(parse_args([*words, "--transformer-impl", impl], 64), 64, find_hardware("gb200"))
        recording = make_recording((OPERATOR, gemm, 1, "forward 0"), *[(OPERATOR, cast, 1, "forward 0")] * 2)
        recording["texts"] = [text.replace("a.py:1 f", "quantization/cast.py:1 f") for text in recording["texts"]]
        found = make_roofline(plan, dict.fromkeys((0, 1, 3), recording)).busiest
        memory = 8.0 * 1e12 * plan.hardware.constants.memory
        one = 8192 * 4096 * 4 / memory if impl == "transformer_engine" else (67108864 + 33554432) * 2 / memory
        assert found.kernels == (1 if impl == "transformer_engine" else 3), casts
        assert found.total - found.idle == pytest.approx(plain + casts * one, rel=0.3)


@pytest.mark.parametrize(
    "flags,counted",
    [("", (", of dispatch",)), ("--moe-expert-rank-capacity-factor 1.5", (", of experts", ", of dispatch"))],
    ids=["experts of TransformerEngine", "own experts"],
)
def test_only_casts_of_this_program_are_counted(flags, counted):
    """With a budget the experts leave TransformerEngine, and the linears do not; it casts nothing that is sent."""
    words = [*FLAGS.split(), *"--bf16 --fp8-format e4m3 --fp8-recipe mxfp8".split(), *flags.split()]
    words += "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep".split()
    plan = make_plan(parse_args(words, 64), 64, find_hardware("gb200"))
    cast = "triton::block_kernel|o,BFloat16,8192x4096,67108864|o,Byte,8192x4096,33554432"
    for caller in ("", ", of experts", ", of dispatch"):
        recording = make_recording((OPERATOR, cast, 1, "forward 0"))
        line = f"quantization/triton_quantize.py:1 f{caller}"
        recording["texts"] = [text.replace("a.py:1 f", line) for text in recording["texts"]]
        found = make_roofline(plan, dict.fromkeys((0, 1, 3), recording)).busiest
        assert found.kernels == (caller in counted), caller


def test_collective_round_trips_through_text():
    collective = Collective.of_text(PUBLISHED_RUNS)
    assert (collective.group, collective.size, collective.bytes) == (
        "ep",
        8,
        8192,
    ) and collective.as_text() == PUBLISHED_RUNS


def test_operators_in_cuda_graphs_have_no_launch_cost():
    words = [*FLAGS.split(), "--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "moe_router"]
    plan = make_plan(parse_args(words, 64), 64, H100)
    for part, launches in (("", H100.constants.launch), ("attn", H100.constants.launch), ("moe_router", 0.0)):
        found = make_roofline(plan, dict.fromkeys((0, 1, 3), make_recording((OPERATOR, FAST, 1, "forward 0", part))))
        assert found.busiest.idle == pytest.approx(launches)
    assert any("CUDA graphs" in note for note in found.notes)


def test_the_executed_step_has_the_vocabulary_of_the_plan():
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --eval-iters 0 --mock-data "
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
    ).split()
    args = parse_args([*flags, "deepseek-ai/DeepSeek-V3"], 2)
    # the NullTokenizer of the executed step adds a token
    assert executed_args(args, 2, 3).data.vocab_size + 1 == make_plan(args, 2, H100).vocab_rows == 129280
    words = "--preset mixtral_tiny --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model deepseek-ai/DeepSeek-V3"
    args = parse_args(words.split(), 2)
    assert executed_args(args, 2, 3).data.vocab_size + 1 == make_plan(args, 2, H100).vocab_rows == 129280
    with pytest.raises(ValueError, match="--vocab-size"):
        executed_args(parse_args([*flags, "mine"], 2), 2, 3)
    with pytest.raises(ValueError, match="--use-varlen-dataset needs lengths: give --length-histogram"):
        executed_args(parse_args([*flags, "deepseek-ai/DeepSeek-V3", "--use-varlen-dataset"], 2), 2, 3)


def test_attention_within_packed_sequences_has_the_flops_of_its_sequences():
    def flash(name, mask, shape):
        inputs = "|".join(f"r,bfloat16,{shape},512" for _ in range(4 if "backward" in name else 3))
        return read_operator(f"aten::_{name}{mask}|{inputs}|r,int32,3,12|o,bfloat16,{shape},512")

    for direction in ("forward", "backward"):
        whole = f"scaled_dot_product_flash_attention{'_backward' * (direction == 'backward')}"
        one = flash(whole, " causal", "1x2x16x8")
        packed = flash(f"flash_attention_{direction}", " causal", "32x2x8")
        two = packed.of_sequences([16, 16])
        assert (two.flops, two.queries, two.backward) == (2 * one.flops, 16, one.backward)
        assert two.compute(H100) == pytest.approx(2 * one.compute(H100))
        assert packed.of_sequences([31, 1]).flops == pytest.approx(one.flops * (31**2 + 1) / 16**2, rel=1e-6)
        windowed = flash(f"flash_attention_{direction}", " window=4", "32x2x8").of_sequences([32])
        assert windowed.flops == pytest.approx(one.flops * (32 * 4 - 8) / (16**2 / 2), rel=1e-6)
        assert windowed.of_sequences([1]) == windowed  # it has its lengths


def test_windows_have_the_flops_of_the_sequences_of_a_microbatch():
    args = parse_args([*FLAGS.split(), "--micro-batch-size", "2"], 64)
    plan, length = make_plan(args, 64, H100), args.data.seq_length
    shape = f"{2 * length}x2x8"
    text = f"aten::_flash_attention_forward window=4{f'|r,bfloat16,{shape},512' * 3}|o,bfloat16,{shape},512"
    event = [OPERATOR, 0, 1, 2, 1, 2, 2]
    costs = RecordingCosts(args, H100, plan.vocab_rows, 3, 3).costs(
        {"texts": [text, "a.py:1 f", ""], "events": [event]}
    )
    assert costs.lines["a.py:1 f"].flops == 2 * (length * 4 - 8) * 2 * 2 * (8 + 8)


def test_packed_microbatches_are_weighted_by_what_they_represent():
    args = parse_args(FLAGS.split(), 64)
    plan = make_plan(args, 64, H100)
    packs = [[1.0, 1, [16]], [2.5, 1, [8, 8]], [1.0, 1, [4]]]
    costs = RecordingCosts(args, H100, plan.vocab_rows, 5, 3, packs)
    assert [costs.weight(microbatch) for microbatch in range(4)] == [1.0, 1.0, 2.5, 1.0]
