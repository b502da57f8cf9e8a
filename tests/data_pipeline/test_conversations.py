"""Conversations: their text in every prompt format, ids and trained tokens against transformers, errors."""

import json
import os

import pytest
from data_pipeline.corpora import CHAT_TOKENS, data_args, write_chat_tokenizer

from moe_trainer.data import template_process
from moe_trainer.data.conversations import read_conversations, read_row, tokenize_conversation
from moe_trainer.data.template_process import LimitedTemplate, TemplateLimits
from moe_trainer.data.tokenizer import build_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m['content'] | trim }}<|im_end|>\n{% endif %}{% endfor %}"
)
LAST_ONLY = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last %}think {% endif %}{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


CONVERSATIONS = (
    turns(("user", "where is the fox?"), ("assistant", "over the lazy dog")),
    turns(
        ("system", " be brief /think "),
        ("user", "number 3\n"),
        ("assistant", " jumps \u4e2d\u6587 "),
        ("tool", "a river"),
        ("assistant", "and \U0001f600"),
        ("user", "quick"),
        ("assistant", "brown\n"),
    ),
)


def build(folder, template=CHATML, special_tokens=CHAT_TOKENS, **flags):
    folder = write_chat_tokenizer(folder, template, special_tokens)
    return build_tokenizer(data_args(tokenizer_type="SFTTokenizer", tokenizer_model=str(folder), **flags))


def build_by_template(folder, template):
    return build(folder, template, sft_tokenizer_prompt_format="assistant")


def test_turn_formats(tmp_path):
    """The formats of Megatron-LM's SFTTokenizer."""
    first, second = CONVERSATIONS
    flag = "sft_tokenizer_prompt_format"
    aligned = build(tmp_path / "a")
    assert aligned.format.write(first).text == (
        "<SPECIAL_11>User\nwhere is the fox?\n<SPECIAL_11>Assistant\nover the lazy dog\n"
    )
    assert _trained(aligned, first) == ["over the lazy dog\n"]
    assert _trained(aligned, second) == ["jumps \u4e2d\u6587\n", "and \U0001f600\n", "brown\n"]
    assert aligned.pad == aligned.token_id("<SPECIAL_233>") and aligned.eod == aligned.token_id("</s>")
    nano = build(tmp_path / "b", **{flag: "nemotron-nano-v2"})
    assert nano.format.write(second).text == (
        "<SPECIAL_10>System\nbe brief\n<SPECIAL_11>User\nnumber 3\n"
        "<SPECIAL_11>Assistant\njumps \u4e2d\u6587\n<SPECIAL_12>\n"
        "<SPECIAL_11>Assistant\nand \U0001f600\n<SPECIAL_12>\n<SPECIAL_11>User\nquick\n"
        "<SPECIAL_11>Assistant\nbrown\n<SPECIAL_12>\n"
    )
    assert _trained(nano, first) == ["over the lazy dog\n<SPECIAL_12>\n"]
    identity = build(tmp_path / "c", **{flag: "identity"})
    assert identity.format.write(first).text == "where is the fox?over the lazy dog"
    assert _trained(identity, first) == ["over the lazy dog"] and identity.pad == nano.pad


@pytest.mark.parametrize(
    "prompt_format, missing",
    [
        ("nemotron-h-aligned", "writes <SPECIAL_11>, for which"),
        ("nemotron-nano-v2", "writes <SPECIAL_11>, <SPECIAL_12>, for which"),
        ("identity", None),
        ("assistant", None),
    ],
)
def test_special_tokens_that_the_tokenizer_lacks_are_named(tmp_path, caplog, prompt_format, missing):
    tokens = [token for token in CHAT_TOKENS if token not in ("<SPECIAL_11>", "<SPECIAL_12>")]
    build(tmp_path / "all", sft_tokenizer_prompt_format=prompt_format)
    assert "<SPECIAL" not in caplog.text
    build(tmp_path / "some", special_tokens=tokens, sft_tokenizer_prompt_format=prompt_format)
    warnings = [record.getMessage() for record in caplog.records if "<SPECIAL" in record.getMessage()]
    assert len(warnings) == bool(missing) and all(missing in text for text in warnings)


def _trained(tokenizer, messages):
    text, ranges = tokenizer.format.write(messages)
    return [text[begin:end] for begin, end in ranges]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_masks_of_tokens_are_those_of_turns(tmp_path, messages):
    """Tokens of a format whose turns do not merge are those of its turns alone, as Megatron-LM finds them."""
    tokenizer = build(tmp_path / "a")
    row = tokenize_conversation(messages, tokenizer)
    expected_ids, expected_mask = [], []
    for message in messages:
        ids, _ = tokenizer.tokenize_with_offsets(tokenizer.format.write([message]).text)
        expected_ids += ids
        expected_mask += [message["role"] == "assistant"] * len(ids)
    assert row.ids.tolist() == expected_ids and row.loss_mask.tolist() == expected_mask


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_marked_template_equals_transformers(tmp_path, messages):
    transformers = pytest.importorskip("transformers")
    tokenizer = build(tmp_path / "a", MARKED, sft_tokenizer_prompt_format="assistant")
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "a")).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    row = tokenize_conversation(messages, tokenizer)
    assert row.ids.tolist() == reference["input_ids"]
    assert row.loss_mask.astype(int).tolist() == reference["assistant_masks"]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_unmarked_template_trains_what_turns_add(tmp_path, messages):
    transformers = pytest.importorskip("transformers")
    tokenizer = build(tmp_path / "a", sft_tokenizer_prompt_format="assistant")
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "a")).apply_chat_template(
        messages, tokenize=True, return_dict=True
    )
    row = tokenize_conversation(messages, tokenizer)
    assert row.ids.tolist() == reference["input_ids"]
    assert _trained(tokenizer, messages) == [
        f"{message['content']}<|im_end|>\n" for message in messages if message["role"] == "assistant"
    ]


def test_default_format_trains_everything(tmp_path):
    """As Megatron-LM, also conversations without an assistant."""
    tokenizer = build(tmp_path / "a", sft_tokenizer_prompt_format="default")
    row = tokenize_conversation(turns(("user", "the fox")), tokenizer)
    assert row.loss_mask is None and len(row.ids) > 3 and tokenizer.pad == tokenizer.token_id("<pad>")


def test_tokens_across_a_border_are_trained(tmp_path):
    """In the identity format a token may hold the end of a prompt and the beginning of the answer."""
    tokenizer = build(tmp_path / "a", sft_tokenizer_prompt_format="identity")
    row = tokenize_conversation(turns(("user", "the quick"), ("assistant", " brown fox")), tokenizer)
    whole = tokenize_conversation(turns(("user", "the qu"), ("assistant", "ick brown fox")), tokenizer)
    assert row.ids.tolist() == whole.ids.tolist()
    assert row.loss_mask.sum() == 2 and whole.loss_mask.sum() == 3
    followed = tokenize_conversation(
        turns(("user", "the"), ("assistant", " qu"), ("user", "ick"), ("assistant", " brown fox")), tokenizer
    )
    assert followed.ids.tolist() == row.ids.tolist() and followed.loss_mask.tolist() == [False, True, True, True]


def test_template_files_and_flags(tmp_path):
    folder = write_chat_tokenizer(tmp_path / "a", None)

    def write(**flags):
        flags |= {"tokenizer_type": "SFTTokenizer", "sft_tokenizer_prompt_format": "assistant"}
        return build_tokenizer(data_args(**flags, tokenizer_model=str(folder))).format.write(CONVERSATIONS[0]).text

    for given, problem in (
        ({}, "has no chat template; give --chat-template"),
        ({"chat_template": "no_such_file"}, "--chat-template no_such_file: cannot be read"),
        ({"chat_template": "{% for %}"}, r"the chat template is not valid \(.*line 1\)"),
    ):
        with pytest.raises(ValueError, match=problem):
            write(**given)
    (tmp_path / "mine.jinja").write_text(CHATML)
    texts = [write(chat_template=given) for given in (CHATML, str(tmp_path / "mine.jinja"))]
    (folder / "chat_template.jinja").write_text(CHATML)
    texts.append(write())
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    texts.append(write())
    assert len(set(texts)) == 1 and "<|im_start|>" in texts[0]


@pytest.mark.parametrize(
    "template, problem",
    [
        ("{{ raise_exception('roles must alternate') }}", r"rejects it \(roles must alternate\)"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", r"fails \(TypeError"),
        ("{{ 1 / 0 }}", r"fails \(ZeroDivisionError"),
        (LAST_ONLY, "does not write turn 2 alike .* mark them with"),
        ("{{ messages[0]['content'] }}{% generation %}{% endgeneration %}", "no token of the conversation would be"),
    ],
)
def test_templates_that_fail(tmp_path, template, problem):
    messages = turns(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(ValueError, match=problem):
        tokenize_conversation(messages, build_by_template(tmp_path / "a", template))


@pytest.mark.parametrize(
    "template, problem",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 s"),
        ("{{ 10 ** (10 ** 9) }}", "takes more than 1 s"),  # when it is compiled
        ("{% set ns = namespace(x='ab') %}{% for n in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", "MiB"),
        ("{{ 'ab'.center(100000000000) }}", "needs more than 300 MiB"),
        ("{{ 'ab' * 1000 }}", "writes 2000 characters; at most 1000"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "is nested too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("\ud800{{ messages[0].content }}", "writes U.D800, half of a surrogate pair"),
    ],
)
def test_templates_have_limits(template, problem):
    seconds = 1 if "takes more than" in problem else 60  # on a slow machine no limit is met before the tested one
    limits = TemplateLimits(seconds=seconds, memory=300 << 20, characters=1000)
    with pytest.raises(ValueError, match=f"--chat-template bad: the chat template .*{problem}"):
        LimitedTemplate("--chat-template bad", template, {}, True, limits).write(turns(("user", "a")))


def test_last_words_of_a_template_process_that_ends_are_in_the_message(monkeypatch):
    monkeypatch.setattr(template_process, "_COMMAND", "import sys; sys.exit('a warning\\nno sandbox here')")
    with pytest.raises(ValueError, match=r"ends its process \(exit code 1\): no sandbox here$"):
        LimitedTemplate("--chat-template x", "", {}, True)


def test_a_template_continues_after_an_error_and_in_a_fork():
    template = LimitedTemplate("", "{% if messages[0].content == 'x' %}{% for n in range(99999) %}{{ 2 ** 9999 }}{% endfor %}{% endif %}"
                               "{{ messages[0].content }}", {}, True, TemplateLimits(seconds=1))  # fmt: skip
    assert template.write(turns(("user", "a"))).text == "a"
    with pytest.raises(ValueError, match="the chat template"):
        template.write(turns(("user", "x")))
    assert template.write(turns(("user", "b"))).text == "b"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if template.write(turns(("user", "c"))).text == "c" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert template.write(turns(("user", "d"))).text == "d"


def test_messages_cannot_mark_what_is_trained(tmp_path):
    tokenizer = build_by_template(tmp_path / "a", CHATML)
    for mark in ("\ufdd0", "\ufdd1"):
        with pytest.raises(ValueError, match="a message has U.FDD0 or U.FDD1"):
            tokenize_conversation(turns(("user", f"a{mark}b"), ("assistant", "c")), tokenizer)


def test_conversations_that_teach_nothing(tmp_path):
    tokenizer = build(tmp_path / "a")
    for messages, problem in (
        (turns(("system", "a"), ("user", "b")), "has no turn of the assistant"),
        (turns(("user", "a"), ("assistant", " \n")), "turn 2 of the conversation is of the assistant and empty"),
        (turns(("assistant", "a")), "turn 1 .* follows nothing: it must answer"),
        (turns(("user", "a"), ("assistant", "b"), ("assistant", "c")), "turn 3 .* follows assistant"),
    ):
        with pytest.raises(ValueError, match=problem):
            tokenize_conversation(messages, tokenizer)


def test_a_first_token_alone_teaches_nothing(tmp_path):
    """No label comes before it, so it is the label of none."""
    answer = "{% for m in messages if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    messages = turns(("user", "a"), ("assistant", "b"))
    end = "{% generation %} the fox{% endgeneration %}{% endfor %}"
    assert tokenize_conversation(messages, build_by_template(tmp_path / "a", answer + end)).loss_mask.all()
    with pytest.raises(ValueError, match="no token of the conversation would be trained"):
        tokenize_conversation(messages, build_by_template(tmp_path / "b", answer + " the fox{% endfor %}"))


def test_rows_of_every_kind():
    """The four kinds of Megatron-LM's varlen_dataset.py; a conversation begins with a system message."""
    system = {"role": "system", "content": ""}
    chat = [system, *turns(("user", "q"), ("assistant", "a"))]
    assert read_row({"text": "abc", "id": 3}) == "abc" and read_row({"text": ""}) == ""
    assert read_row({"messages": [{"role": "User", "content": "q", "name": "x"}, *chat[2:]]}) == chat
    assert read_row({"messages": turns(("system", "s"), ("user", None))}) == turns(("system", "s"), ("user", ""))
    sharegpt = [{"from": "Human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert read_row({"conversations": sharegpt, "messages": None, "text": "x"}) == chat
    assert read_row({"instruction": "q", "output": "a"}) == chat
    with_context = [system, *turns(("user", "q\n\nc"), ("assistant", "a"))]
    assert read_row({"prompt": "", "question": "q", "context": "c", "answer": "a"}) == with_context


def test_a_system_message_begins_a_conversation():
    row = {"messages": turns(("user", "a"), ("assistant", "b"), ("system", "s"), ("user", "c"), ("assistant", "d"))}
    first, second = read_conversations(row)
    assert first == turns(("user", "a"), ("assistant", "b"))
    assert second == turns(("system", "s"), ("user", "c"), ("assistant", "d"))


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"id": 1}, 'needs "messages", "conversations", "text".*; found id'),
        ({}, "found nothing"),
        ({"text": 5}, '"text" must be a text, found int'),
        ({"messages": []}, '"messages" must be a list of turns, found an empty list'),
        ({"messages": "hello"}, "must be a list of turns, found str"),
        ({"messages": ["hello"]}, 'turn 1 of "messages" has no "role"'),
        ({"messages": [{"content": "a"}]}, 'turn 1 of "messages" has no "role"'),
        ({"messages": turns(("user", "a"), ("robot", "b"))}, 'turn 2 .* has the role "robot"; known are system'),
        ({"messages": turns(("user", [{"type": "image"}]))}, '"content" must be a text, found list; images'),
        ({"instruction": ["a"], "output": "b"}, '"instruction" must be a text, found list'),
    ],
)
def test_bad_rows(row, problem):
    with pytest.raises(ValueError, match=problem):
        read_row(row)
    if "messages" not in row:
        with pytest.raises(ValueError, match='"messages" must be a list of turns, found nothing'):
            read_conversations(row)
