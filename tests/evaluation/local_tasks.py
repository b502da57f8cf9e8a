"""A small world of animals and their sounds: text to train on, a tokenizer, and benchmark tasks of three types as local files."""

import json
import random
from pathlib import Path

import yaml
from data_pipeline.corpora import train_byte_level_bpe

SOUNDS = {
    "cat": "meow", "dog": "bark", "fox": "yip", "owl": "hoot", "hen": "cluck",
    "cow": "moo", "pig": "oink", "bee": "buzz", "ant": "click", "bat": "squeak",
}  # fmt: skip
TASKS = "sound_choice,sound_text,sound_answer"


def write_text(path: Path, documents: int = 400) -> list[str]:
    """Write a JSONL file of documents with five lines each; return their texts."""
    draw = random.Random(1)
    texts = []
    for _ in range(documents):
        pairs = (draw.sample(list(SOUNDS), 2) for _ in range(5))
        texts.append("".join(f"The {a} says {SOUNDS[a]}. The {b} says {SOUNDS[b]}.\n" for a, b in pairs))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Write a Hugging Face folder with a byte-level BPE."""
    folder.mkdir()
    train_byte_level_bpe(texts, ["<|end|>"]).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


def write_tasks(folder: Path) -> Path:
    """Write three tasks: multiple choice, with an example before each question; perplexity of texts longer than the model's 64 positions; answers that are generated."""
    folder.mkdir()
    draw = random.Random(2)
    rows = []
    for animal, sound in SOUNDS.items():
        for _ in range(2):
            others = [SOUNDS[other] for other in draw.sample(sorted(SOUNDS), 6) if other != animal]
            choices = [*others[: draw.choice((2, 3))], sound]
            draw.shuffle(choices)
            first = draw.choice(sorted(SOUNDS))
            question = f"The {first} says {SOUNDS[first]}. The {animal} says"
            rows.append({"question": question, "choices": choices, "answer": choices.index(sound), "sound": sound})
    texts = [{"text": "".join(f"The {row['sound']} cat says meow.\n" for row in rows[at : at + 12])} for at in range(6)]
    _write_task(folder, "sound_choice", rows, output_type="multiple_choice", doc_to_text="{{question}}",
                doc_to_choice="choices", doc_to_target="answer", fewshot_split="test", num_fewshot=1,
                metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}])  # fmt: skip
    _write_task(folder, "sound_text", texts, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="text",
                metric_list=[{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")])  # fmt: skip
    _write_task(folder, "sound_answer", rows, output_type="generate_until", doc_to_text="{{question}}",
                doc_to_target=" {{sound}}", generation_kwargs={"until": ["."], "max_gen_toks": 8},
                metric_list=[{"metric": "exact_match"}])  # fmt: skip
    return folder


def _write_task(folder: Path, name: str, rows: list[dict], **fields) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **source, **fields}))
