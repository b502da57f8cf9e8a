"""Supervised fine-tuning on a few conversations: of all weights, and of adapters, packed and with masked prompts."""

import json

import pytest
import torch
from data_pipeline.corpora import write_chat_tokenizer
from data_pipeline.test_conversations import CHATML
from training.forked import pretrain
from training.layouts import MODEL

from arguments.lora import is_adapter

ANSWERS = ("the quick brown fox", "over the lazy dog", "the river and the dog", "jumps over the fox")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Flags of fine-tuning, with a folder that has conversations, a chat tokenizer and a pretrained checkpoint."""
    folder = tmp_path_factory.mktemp("base")
    chats = [
        {"messages": [{"role": "user", "content": f"what is {number}?"}, {"role": "assistant", "content": answer}]}
        for number, answer in enumerate(ANSWERS)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer = write_chat_tokenizer(folder / "tokenizer", CHATML)
    model = [word for word in MODEL if word != "--mock-data"]
    model += "--num-layers 2 --save-interval 2 --seq-length 64 --max-position-embeddings 64 --log-interval 1 --vocab-size 400".split()
    pretrain([*model, "--mock-data", "--train-iters", "2", "--save", "saved"], folder)
    chat = (
        "--sft --sft-tokenizer-prompt-format assistant --tokenizer-type SFTTokenizer --calculate-per-token-loss".split()
    )
    chat += ["--tokenizer-model", str(tokenizer), "--data-path", str(folder / "chats.jsonl"), "--split", "1,0,0"]
    return [
        *model, *chat, "--load", str(folder / "saved"), "--finetune", "--global-batch-size", "4", "--micro-batch-size", "1",
        "--max-seqlen-per-dp-cp-rank", "128", "--train-iters", "25", "--moe-token-dispatcher-type", "alltoall",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--lr 5e-3", 1),
        ("--lr 2e-2 --lora-dim 8", 1),
        ("--lr 2e-2 --lora-dim 8 --tensor-model-parallel-size 2 --sequence-parallel --lora-dropout 0.05", 2),
    ],
)
def test_loss_of_answers_falls(base, flags, ranks, tmp_path):
    records, weights = pretrain([*base, *flags.split()], tmp_path, ranks)
    losses = [record["lm loss"] for record in records]
    # adapters of a random model cannot change its head
    assert losses[-1] < (0.7 if "--lora-dim" in flags else 0.25) * losses[0], losses
    assert any(map(is_adapter, weights)) == ("--lora-dim" in flags)
    assert all(torch.isfinite(weight).all() for weight in weights.values())
