"""Values that follow from several flags and are no flags: for --report, under Megatron-LM's names."""

from arguments.rules.derived_sizes import as_list, derive_sizes, positive, quotient
from arguments.rules.optimizer import is_layer_wise
from arguments.settings import Settings
from arguments.vocabulary import padded_vocab_size


def derived(s: Settings, world_size: int | None) -> dict[str, object]:
    """Return derived values of resolved settings; None if the number of ranks or a size is not known."""
    f = derive_sizes(s, world_size)
    microbatches = None
    if f.dp is not None and positive(s.micro_batch_size):
        microbatches = quotient(s.global_batch_size, s.micro_batch_size * f.dp)
    padded = s.padded_vocab_size
    if padded is None and positive(s.vocab_size) and positive(s.make_vocab_size_divisible_by):
        padded = padded_vocab_size(s.vocab_size, s.make_vocab_size_divisible_by, f.tp, s.pad_vocab_size)
    return {
        "data_parallel_size": f.dp,
        "expert_data_parallel_size": f.edp,
        "virtual_pipeline_model_parallel_size": f.vpp,
        "num_microbatches": microbatches,
        "query_groups": s.num_query_groups if s.group_query_attention else s.num_attention_heads,
        "params_dtype": "torch.bfloat16" if s.bf16 else "torch.float16" if s.fp16 else "torch.float32",
        "encoder_seq_length": s.seq_length,
        "padded_vocab_size": padded,
        "use_dist_ckpt": s.ckpt_format != "torch",
        # the layer-wise optimizer is the distributed one with another layout; Megatron-LM treats it separately
        "use_layer_wise_distributed_optimizer": is_layer_wise(s),
        "use_distributed_optimizer": s.use_distributed_optimizer and not is_layer_wise(s),
        "bias_activation_fusion": s.bias_swiglu_fusion if s.swiglu else s.bias_gelu_fusion,
        "recompute_modules": as_list(s.recompute_modules) or ["core_attn"],
        "num_moe_layers": None if f.moe_layers is None else sum(f.moe_layers),
    }
