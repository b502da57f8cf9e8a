"""The models of bench_cpu.py, and a training step of each contender.

A builder takes a model and a dtype and returns step() -> loss, with a description. transformers and torchtitan are
imported by their builders alone.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@dataclass(frozen=True)
class Model:
    """Sizes of a Mixtral and of its batch.

    Attributes:
        together: several fit into memory at once.
    """

    layers: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    kv_heads: int
    seq: int
    micro: int
    heads: int = 8
    vocab: int = 8192
    together: bool = False

    @property
    def tokens(self) -> int:
        return self.seq * self.micro

    def flags(self) -> list[str]:
        """Return the command line of the model."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn} "
            f"--num-attention-heads {self.heads} --group-query-attention --num-query-groups {self.kv_heads} "
            f"--num-experts {self.experts} --moe-router-topk {self.topk} --moe-router-load-balancing-type aux_loss "
            "--moe-aux-loss-coeff 0.01 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
            "--normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
            f"--position-embedding-type rope --seq-length {self.seq} --max-position-embeddings {self.seq} "
            f"--micro-batch-size {self.micro} --global-batch-size {self.micro} --attention-dropout 0 "
            "--hidden-dropout 0 --lr 1e-4 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 "
            "--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --train-iters 1000000 --eval-iters 0 "
            f"--eval-interval 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size {self.vocab - 1} "
            "--transformer-impl local --logging-level 30"
        ).split()

    def flops_per_step(self) -> float:
        """Return the GEMM FLOPs of one forward and backward as Megatron counts them, the same for all contenders."""
        import arguments
        from moe_trainer.estimate.flops import training_flops

        return training_flops(arguments.parse_args(self.flags(), world_size=1), self.micro, self.seq, self.vocab)


MODELS = {
    "small": Model(layers=4, hidden=256, ffn=512, experts=8, topk=2, kv_heads=4, seq=256, micro=4, together=True),
    "wide": Model(layers=8, hidden=512, ffn=1024, experts=8, topk=2, kv_heads=8, seq=512, micro=8),
    "many": Model(layers=8, hidden=512, ffn=1024, experts=64, topk=8, kv_heads=8, seq=512, micro=8),
}


def make_batches(model: Model, device: str = "cpu"):
    """Yield endless random (tokens, labels), the same for all contenders."""
    import torch

    generator = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(0, model.vocab, (model.micro, model.seq + 1), generator=generator).to(device)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_ours(model: Model, dtype: str):
    """Return step() -> loss, and a description."""
    import torch

    import arguments
    from moe_trainer.data.loader import Batch
    from moe_trainer.parallel.state import ParallelState
    from moe_trainer.training.run import TrainState, with_batches
    from moe_trainer.training.step import train_step
    from moe_trainer.verification.training_trace import make_run

    args = arguments.parse_args(model.flags() + (["--bf16"] if dtype == "bf16" else []), world_size=1)
    positions, mask = torch.arange(model.seq).repeat(model.micro, 1), torch.ones(model.micro, model.seq)
    batches = (Batch(tokens, labels, mask, positions) for tokens, labels in make_batches(model))
    run = with_batches(make_run(args, 0, ParallelState.single(), 0), batches)
    state = TrainState()

    def step() -> float:
        result = train_step(run, state, 1)
        state.iteration += 1
        return result.losses["lm loss"]

    return step, "train_step"


def make_mixtral(model: Model, implementation: str, device: str = "cpu"):
    """Return MixtralForCausalLM of transformers in fp32; `implementation` says how it computes its experts."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        num_local_experts=model.experts,
        num_experts_per_tok=model.topk,
        max_position_embeddings=model.seq,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        attn_implementation="sdpa",
        use_cache=False,
        experts_implementation=implementation,
    )
    torch.manual_seed(1)
    with torch.device(device):
        return MixtralForCausalLM(config).train()


def build_transformers(model: Model, dtype: str, implementation: str, autocast: bool = False):
    """Return step() -> loss, and a description."""
    module = make_mixtral(model, implementation)
    if dtype == "bf16" and not autocast:
        module = module.bfloat16()

    def forward(tokens):
        output = module(input_ids=tokens)
        return output.logits, 0.01 * output.aux_loss

    step = make_their_step(module, forward, make_batches(model), autocast)
    return step, f"experts: {implementation}, attention: sdpa"


def build_torchtitan(model: Model, dtype: str, device: str = "cpu"):
    """Return step() -> loss, and a description."""
    import torch
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    head = model.hidden // model.heads
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=model.layers,
        dim=model.hidden,
        n_heads=model.heads,
        n_kv_heads=model.kv_heads,
        head_dim=head,
        moe_hidden_dim=model.ffn,
        num_experts=model.experts,
        top_k=model.topk,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=head, max_seq_len=model.seq, theta=1e4),
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.qk_norm = None
    embedding = {"weight": functools.partial(torch.nn.init.normal_, std=0.02)}
    with torch.device(device):
        module = qwen3.Qwen3Model.Config(
            vocab_size=model.vocab,
            dim=model.hidden,
            norm=qwen3._qwen3_norm(model.hidden),
            layers=layers,
            tok_embeddings=qwen3.Embedding.Config(
                num_embeddings=model.vocab, embedding_dim=model.hidden, param_init=embedding
            ),
            lm_head=qwen3.Linear.Config(in_features=model.hidden, out_features=model.vocab, param_init=embedding),
        ).build()
        torch.manual_seed(1)
        module.init_states()
    module = module.train()
    if dtype == "bf16":
        module = module.bfloat16()
    positions = torch.arange(model.seq, device=device).repeat(model.micro, 1)
    step = make_their_step(module, lambda tokens: (module(tokens, positions), 0.0), make_batches(model, device))
    return step, "experts: grouped_mm, attention: sdpa"


def make_their_step(module, forward, batches, autocast: bool = False):
    """Return a training step of another program's model. forward: tokens -> logits and what is added to the loss."""
    import torch
    import torch.nn.functional as F

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        tokens, labels = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits, extra = forward(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.view(-1))
        (loss + extra).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step
