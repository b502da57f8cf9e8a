"""Parameter counts against published ones, and against models counted by hand."""

import pytest
import torch

import arguments
from moe_trainer.checkpoint.hf.config import read_config, write_config
from moe_trainer.checkpoint.hf.names import tensor_mappings
from moe_trainer.estimate.parameters import count_parameters, params_report

# Source: public checkpoints and their reports; total without multi-token prediction, active with embedding and head.
PUBLISHED = {
    "deepseek_v2": (235_741_434_880, 0, 21_375_800_320, 20_851_512_320, 23_592_960),
    "deepseek_v2_lite": (15_706_484_224, 0, 2_661_150_208, 2_451_435_008, 8_650_752),
    "moonlight_16b": (15_960_108_544, 0, 2_914_774_528, 2_579_230_208, 8_650_752),
    "deepseek_v3": (671_026_404_352, 11_610_067_968, 37_552_282_624, 36_625_603_584, 44_040_192),
    "deepseek_v3_2": (671_877_929_216, 11_610_067_968 + 13_959_424, 38_403_807_488, 37_477_128_448, 44_040_192),
    "kimi_k2": (1_026_408_209_408, 0, 32_861_477_888, 31_687_072_768, 44_040_192),
    "mimo_v2_flash": (308_778_768_832, 0, 15_445_924_288, 14_820_972_992, 25_165_824),
    "kimi_linear_48b_a3b": (49_122_675_072, 0, 3_484_453_248, 3_106_965_888, 7_077_888),
    "ling_3_0_flash": (124_414_191_072, 3_072_193_536, 5_505_672_672, 5_103_281_632, 5_898_240),
    "qwen2_57b_a14b": (57_408_658_944, 0, 14_249_270_784, 13_704_732_160, 27_525_120),
    "qwen3_30b_a3b": (30_532_122_624, 0, 3_353_032_704, 3_041_867_776, 4_718_592),
    "qwen3_235b_a22b": (235_093_634_560, 0, 22_190_763_520, 21_568_433_664, 18_874_368),
    "qwen3_next_80b_a3b": (79_674_391_296, 1_650_471_424, 3_874_929_408, 3_563_764_480, 3_145_728),
    "qwen3_5_35b_a3b": (34_660_610_688, 844_640_768, 3_454_988_928, 2_946_429_568, 3_145_728),
    "nemotron_3_nano_30b_a3b": (31_577_937_344, 0, 3_580_073_408, 3_227_751_872, 9_977_856),
    "glm_4_5": (352_797_814_784, 0, 33_632_251_904, 32_856_305_664, 23_592_960),
    "glm_4_5_air": (106_852_245_504, 0, 13_424_123_904, 12_803_366_912, 17_301_504),
    "dots_llm1": (142_774_373_888, 0, 14_016_581_120, 13_393_726_976, 17_301_504),
    "glm_4_7_flash": (29_943_390_976, 0, 3_896_763_136, 3_579_568_896, 9_437_184),
    "glm_5": (743_911_199_232, 0, 41_784_709_632, 40_833_126_912, 37_748_736),
    "minimax_m2": (228_689_748_992, 0, 11_030_537_216, 10_415_940_608, 14_155_776),
    "hunyuan_a13b": (80_393_183_232, 0, 12_747_448_320, 12_747_448_320, 37_748_736),
    "solar_open_100b": (102_651_793_408, 0, 12_054_827_008, 11_249_520_640, 15_728_640),
    "ernie_4_5_21b_a3b": (21_825_436_160, 0, 3_352_148_480, 3_352_148_480, 11_796_480),
    "deepseek_moe_16b": (16_375_728_128, 0, 2_828_650_496, 2_618_935_296, 8_650_752),
    "olmoe_1b_7b": (6_919_161_856, 0, 1_282_017_280, 1_178_994_688, 6_291_456),
    "phi_3_5_moe": (41_873_153_344, 0, 6_640_999_744, 6_509_665_600, 78_643_200),
    "granite_3_1_3b_a800m": (3_298_793_472, 0, 882_874_368, 882_874_368, 2_359_296),
    "llama_4_scout": (107_769_861_120, 0, 17_172_894_720, 16_138_408_960, 125_829_120),
    "llama_4_maverick": (400_711_848_960, 0, 17_184_691_200, 16_150_205_440, 125_829_120),
    "mistral_small_4": (118_972_826_624, 0, 6_632_588_288, 6_095_717_376, 25_165_824),
    "trinity_mini": (26_123_970_560, 0, 3_474_728_960, 3_064_735_744, 6_291_456),
    "flex_olmo_7x7b": (33_270_665_216, 0, 24_613_621_760, 24_202_579_968, 135_266_304),
    "gpt_oss_20b": (20_914_757_184, 0, 4_187_440_704, 3_608_307_264, 24_891_840),
    "gpt_oss_120b": (116_829_156_672, 0, 5_711_982_912, 5_132_849_472, 24_891_840),
    "mixtral_8x7b": (46_702_792_704, 0, 12_879_925_248, 12_748_853_248, 176_160_768),
    "mixtral_8x22b": (140_630_071_296, 0, 39_161_468_928, 38_960_142_336, 301_989_888),
}
ATTENTION = {
    "deepseek_v3": 187_107_328,
    "deepseek_v3_2": 187_107_328 + 13_959_424,
    "deepseek_v2": 149_227_520,
    "deepseek_v2_lite": 13_763_072,
    "kimi_k2": 101_124_096,
    "qwen3_30b_a3b": 18_874_624,
    "qwen3_235b_a22b": 71_303_424,
    "gpt_oss_20b": 26_550_144,
    "qwen3_next_80b_a3b": 27_263_488,  # of a layer with softmax attention
    "kimi_linear_48b_a3b": 29_114_880,  # likewise
    "ling_3_0_flash": 31_965_696,  # likewise
}


def preset(name, *flags):
    return arguments.parse_args(["--preset", name, "--mock-data", *flags])


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_preset_counts_are_the_published_ones(name):
    check_counts(name, PUBLISHED[name])


def check_counts(name, published):
    counts = count_parameters(preset(name))
    found = (counts.total, counts.mtp, counts.active, counts.active_no_embedding, counts.per_expert)
    assert found == published
    if name in ATTENTION:
        assert counts.attention_per_layer == ATTENTION[name]
    report = params_report(preset(name))
    assert report == dict(zip(("total", "mtp", "active", "active_no_embedding"), found, strict=False))


def test_counts_of_a_hybrid_model_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    family, config = write_config(preset("nemotron_3_nano_30b_a3b").as_dict(), 131072)
    model_class = getattr(transformers, family.architecture)
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(config))
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED["nemotron_3_nano_30b_a3b"][0]


def test_counts_of_ling_are_those_of_transformers_and_of_the_published_files():
    """Tensors in the files, experts one by one: 62,230 of the model and 1,553 of its prediction layer."""
    transformers = pytest.importorskip("transformers")
    args = preset("ling_3_0_flash").as_dict()
    family, config = write_config(args, 157184)
    with torch.device("meta"):
        model = transformers.BailingHybridForCausalLM(transformers.BailingHybridConfig())
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED["ling_3_0_flash"][0]
    flags = read_config(config)[1] | {"rows": 157184}
    sources = {ref.name for mapping in tensor_mappings(family.names, flags) for ref in mapping.sources}
    assert (len(sources), sum("layers.42." in name for name in sources)) == (62230 + 1553, 1553)


def test_mixtral_8x22b_parameters_with_the_older_vocabulary():
    assert count_parameters(preset("mixtral_8x22b"), padded_vocab_size=32000).total == 140_620_634_112


def small(*flags):
    base = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 16 --micro-batch-size 1"
    recipe = "--train-iters 1 --lr 1e-3 --eval-interval 1 --mock-data --tokenizer-type NullTokenizer"
    vocabulary = "--vocab-size 10 --make-vocab-size-divisible-by 4"
    return arguments.parse_args([*base.split(), *recipe.split(), *vocabulary.split(), *flags])


def test_parameters_of_gpt2_with_biases_tied_head_and_learned_positions():
    counts = count_parameters(small())
    layer = (24 * 8 + 24) + (8 * 8 + 8) + (32 * 8 + 32) + (8 * 32 + 8) + 2 * 16
    assert counts.total == 12 * 8 + 16 * 8 + 2 * layer + 16
    assert counts.active == counts.total
    assert counts.active_no_embedding == counts.total - 16 * 8  # the tied table is the head too
    assert (counts.num_dense_layers, counts.num_moe_layers, counts.per_expert) == (2, 0, 0)


def test_moe_with_biases_counts_experts_and_router_biases():
    moe = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 6 --moe-layer-freq 2"
    counts = count_parameters(small(*moe.split()))
    expert = (6 * 8 + 6) + (8 * 6 + 8)
    assert counts.per_expert == expert
    assert counts.moe_ffn_per_layer == 4 * expert + 4 * 8 + 4
    assert (counts.num_dense_layers, counts.num_moe_layers) == (1, 1)
    assert counts.total - counts.active == 2 * expert


def test_mtp_parameters_are_a_layer_a_projection_and_three_norms():
    flags = "--position-embedding-type rope --normalization RMSNorm --disable-bias-linear --swiglu --ffn-hidden-size 16"
    one, two = (count_parameters(small(*flags.split(), "--mtp-num-layers", depth)) for depth in "12")
    layer = 24 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert one.mtp == layer + 2 * 8 * 8 + 3 * 8
    assert two.mtp == 2 * one.mtp
    assert one.total == count_parameters(small(*flags.split())).total


def test_unknown_vocabulary_is_an_error_and_an_empty_report():
    args = arguments.parse_args(
        [*"--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --max-position-embeddings 16".split()]
        + [
            *"--micro-batch-size 1 --train-iters 1 --lr 1e-3 --eval-interval 1 --tokenizer-type HuggingFaceTokenizer".split()
        ]
        + [*"--tokenizer-model somewhere --data-path somewhere".split()]
    )
    with pytest.raises(ValueError, match="--vocab-size"):
        count_parameters(args)
    assert set(params_report(args).values()) == {None}
    assert params_report(args, padded_vocab_size=12)["total"] > 0
