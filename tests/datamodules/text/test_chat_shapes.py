"""Files of chats as people have them: each shape, as text in, tokens and learned marks out."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import Chat
from datamodules.text.marked_turns import END, MARKS
from datamodules.text.near_prompts import ALIKE, count_near, sign
from tests import with_transformers
from tests.chats import WORDS, write_lines
from tests.commands import bad_input
from tests.language_parts import save_tokenizer

SYSTEM, USER, ASSISTANT, TOOL = (MARKS[role] for role in ("system", "user", "assistant", "tool"))
Row = Mapping[str, Any]


def turn(role: str, content: str, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def said(speaker: str, value: str, **more: Any) -> Row:
    return {"from": speaker, "value": value, **more}


def marked(data: Chat, place: int = 0) -> str:
    """A conversation's text, with ⟦ and ⟧ around what is learned; the end of a turn as |."""
    tokens, learned = data._texts("train").text(place)
    pieces = np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(learned)) + 1)
    texts = [(data.vocabulary.decode(tokens[piece]), learned[piece[0]]) for piece in pieces]
    return "".join(f"⟦{text}⟧" if on else text for text, on in texts).replace(END, "|").replace(USER, "Q:")


def read(path: Path, rows: Sequence[Row], **options: Any) -> Chat:
    data = Chat(write_lines(path / "chat.jsonl", rows), **{"validation_size": 0, "test_size": 1} | options)
    data.setup()
    return data


ONE, OTHER = f"{SYSTEM}s|Q:q|{ASSISTANT}⟦a|⟧", f"Q:q|{ASSISTANT}⟦a|⟧"
# Of each shape a row, what it becomes, and what is said of it.
SHAPES: dict[str, tuple[Row, str, str]] = {
    "OpenAI": (
        {"messages": [turn("system", "s"), turn("user", "q"), turn("assistant", "a")], "id": 1},
        ONE, "reads messages; not read: id",
    ),
    "ShareGPT": ({"conversations": [said("human", "q"), said("gpt", "a")]}, OTHER, "reads conversations"),
    "ShareGPT, a system's column": (
        {"system": "s", "conversations": [said("Human", "q"), said("Assistant", "a")], "tools": ""},
        ONE, "reads conversations, system, tools",
    ),
    "Gemma": ({"conversation": [turn("user", "q"), turn("model", "a", name="b")]}, OTHER,
              "reads conversation; not read: name"),
    "Alpaca": (
        {"instruction": "q", "input": "", "output": "a"}, OTHER, "reads instruction and input as prompt, output as",
    ),
    "Alpaca with an input": ({"instruction": "q", "input": "i", "output": "a"}, OTHER.replace("q", "q\ni"), ""),
    "TRL": ({"prompt": "q", "completion": "a"}, OTHER, "reads prompt as prompt, completion as response"),
    "TRL, lists": (
        {"prompt": [turn("system", "s"), turn("user", "q")], "completion": [turn("assistant", "a")]}, ONE, "",
    ),
    "OpenAI's weight": (
        {"messages": [turn("user", "p"), turn("assistant", "b", weight=0), turn("user", "q"),
                      turn("assistant", "a", weight=1)]},
        f"Q:p|{ASSISTANT}b|{OTHER}", "",
    ),
    "LLaMA-Factory's loss": (
        {"system": "s", "conversations": [said("human", "q"), said("gpt", "a"), said("human", "p"),
                                          said("gpt", "b", loss=False)]},
        f"{ONE}Q:p|{ASSISTANT}b|", "",
    ),
    "a system's turn and column": (
        {"system": "t", "messages": [turn("system", "s"), turn("user", "q"), turn("assistant", "a", name=None)]},
        ONE, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_rows(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, expected, line = SHAPES[shape]
    text = json.dumps(row)
    rows = [json.loads(text.replace('"q"', f'"{letter}"')) for letter in "qrs"]
    data = read(tmp_path, rows)
    assert marked(data) == expected
    assert line in capsys.readouterr().err
    (tmp_path / "chat.json").write_text(json.dumps(rows, indent=1))
    array = Chat(tmp_path / "chat.json", validation_size=0, test_size=1)
    for part in ("tokens", "learned", "index"):
        assert np.array_equal(getattr(array._texts("train").file, part), getattr(data._texts("train").file, part))


def test_the_last_turn_alone_is_learned_if_asked(tmp_path: Path) -> None:
    turns = [turn("user", "p"), turn("assistant", "b"), turn("user", "q"), turn("assistant", "a")]
    rows = [{"messages": [turn("user", str(i)), *turns[1:]]} for i in range(3)]
    assert marked(read(tmp_path, rows, learn="last")) == f"Q:0|{ASSISTANT}b|{OTHER}"
    assert marked(read(tmp_path, rows)) == f"Q:0|{ASSISTANT}⟦b|⟧{OTHER}"  # other tokens, not those of before


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% MARK %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% END %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS_OF_TOOLS: dict[str, Row] = {
    "OpenAI": {"tools": TOOLS, "messages": [turn("user", "q"), {"role": "assistant", "tool_calls": [CALL]}]},
    "as JSON": {
        "tools": json.dumps(TOOLS),
        "messages": [turn("user", "q"), {
            "role": "assistant", "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        }],
    },
    "ShareGPT": {
        "tools": json.dumps(TOOLS),
        "conversations": [said("human", "q"), said("function_call", json.dumps(CALL["function"]))],
    },
}  # fmt: skip


def _marks(template: str) -> str:
    """The same template with the assistant's turns marked, which renders the same text."""
    head, _, rest = template.partition("{% MARK %}")
    body, _, tail = rest.partition("{% END %}")
    start = "{% if m.role == 'assistant' %}{% generation %}"
    return f"{head}{start}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}{tail}"


@pytest.mark.extras("datasets", "transformers")
@with_transformers.in_fork
def test_tools_reach_the_template_and_calls_are_learned(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    import datasets

    tokenizer = save_tokenizer(tmp_path / "words")
    plain, with_marks = WITH_TOOLS.replace("{% MARK %}", "").replace("{% END %}", ""), _marks(WITH_TOOLS)
    messages = [turn("user", "q"), turn("assistant", "", tool_calls=[CALL])]
    options = {"tools": TOOLS, "chat_template": with_marks, "return_assistant_tokens_mask": True, "return_dict": True}
    expected = tokenizer.apply_chat_template(messages, **options)
    subtract = {"type": "function", "function": {"name": "sub", "arguments": {"b": 2, "c": "d"}}}
    other = {"messages": [turn("user", "r"), turn("assistant", "b", tool_calls=[subtract])], "tools": TOOLS}
    for name, row in ROWS_OF_TOOLS.items():
        for number, template in enumerate((plain, with_marks)):
            folder = tmp_path / f"{name} {number}"
            folder.mkdir()
            (folder / "t.jinja").write_text(template)
            rows = [row, _asks(row, "r"), _asks(row, "s")]
            chosen = {"tokenizer": str(tmp_path / "words"), "template": folder / "t.jinja"}
            data = read(folder, rows, **chosen)
            tokens, learned = data._texts("train").text(0)
            assert tokens.tolist() == expected["input_ids"], name
            assert learned.tolist() == [bool(x) for x in expected["assistant_masks"]], name
    arrow = [ROWS_OF_TOOLS["OpenAI"], other, _asks(ROWS_OF_TOOLS["OpenAI"], "s")]
    datasets.Dataset.from_list(arrow).to_parquet(tmp_path / "calls.parquet")  # each call has the keys a, b and c
    data = Chat(tmp_path / "calls.parquet", validation_size=0, test_size=1, **chosen)
    assert data._texts("train").text(0)[0].tolist() == expected["input_ids"]
    rows = [ROWS_OF_TOOLS["OpenAI"], other]
    assert "the built-in one writes none" in bad_input(read, tmp_path, rows)
    without = {"tokenizer": str(tmp_path / "words")}
    assert "one that writes tools" in bad_input(read, tmp_path, rows, **without)
    assert "shows the contents of turns" in bad_input(
        read, tmp_path, [{**row, "tools": None} for row in rows], **without
    )
    judge = {"messages": [turn("judge", "q"), turn("assistant", "a")]}
    assert "data.messages judge: expected a role that the template knows" in bad_input(
        read, tmp_path, [judge], **without
    )
    half = {
        "messages": [turn("user", "q"), turn("assistant", "b", train=False), turn("user", "r"), turn("assistant", "a")]
    }
    data = read(tmp_path, [_asks(half, letter) for letter in "qrs"], **chosen)
    assert marked(data).count("⟦") == 1
    assert "⟦a<|im_end|>⟧" in marked(data)


def _asks(row: Row, letter: str) -> Any:
    return json.loads(json.dumps(row).replace('"q"', f'"{letter}"'))


@pytest.mark.extras("datasets")
@with_transformers.in_fork
def test_sets_of_hugging_face(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    import datasets

    def rows(first: str, count: int) -> Any:
        texts = [{"prompt": f"{first} {WORDS[i]}", "completion": "b"} for i in range(count)]
        return datasets.Dataset.from_list(texts)

    def sizes(name: str) -> tuple[str, dict[str, int]]:
        data = Chat(tmp_path / name, validation_size=2, cache_dir=tmp_path / "cache")
        lines: list[str] = []
        data.say = lines.append  # type: ignore[method-assign]
        data.setup()
        return lines[0].partition(name)[2], data.sizes

    splits = {"train_sft": rows("a", 9), "train_gen": rows("a", 4), "test_sft": rows("b", 3), "test_gen": rows("b", 2)}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "chats")
    read_as = ": reads prompt as prompt, completion as response"
    expected = {"train": 7, "validation": 2, "test": 3}
    assert sizes("chats") == (f" (train_sft, not train_gen, test_gen){read_as}", expected)
    rows("a", 9).save_to_disk(tmp_path / "one")
    assert sizes("one") == (f" (train){read_as}", {"train": 5, "validation": 2, "test": 2})
    datasets.DatasetDict(train_a=rows("a", 3), train_b=rows("b", 3)).save_to_disk(tmp_path / "two")
    assert "one of train_a, train_b" in bad_input(sizes, "two")


FAULTS: dict[str, tuple[Row, str]] = {
    "no role": ({"messages": [{"content": "a"}]}, "data.messages line 1: expected a list of messages"),
    "a weight": ({"messages": [turn("user", "q"), turn("assistant", "a", weight=0.5)]}, "0 or 1, true or false"),
    "a list as weight": ({"messages": [turn("assistant", "a", weight=[1])]}, "0 or 1, true or false"),
    "calls": ({"messages": [turn("assistant", "", tool_calls="{")]}, "JSON in its tool call; it is none"),
    "one call": ({"messages": [turn("assistant", "", tool_calls={"a": 1})]}, "a list of tool calls; it is a dict"),
    "a call": ({"messages": [turn("assistant", "", tool_calls=[1])]}, "tool calls that are objects; one is a int"),
    "tools": ({"messages": [turn("user", "q"), turn("assistant", "a")], "tools": "[1]"}, "or its JSON, as its `tools`"),
    "a system": ({"messages": [turn("user", "q")], "system": 3}, "data.path line 1: expected a text there"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_in_a_line(fault: str, tmp_path: Path) -> None:
    row, line = FAULTS[fault]
    assert line in bad_input(read, tmp_path, [row])


@pytest.mark.parametrize(("text", "line"), [
    ("[1, 2]", "an array of JSON objects; item 1 is a int"),
    ("[{", "an array of JSON objects; it is none"),
    ('[{"a": 1, "a": 2}]', "it has 'a' twice"),
])  # fmt: skip
def test_arrays_that_are_none(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(text)
    assert line in bad_input(Chat(tmp_path / "chat.json").setup)


def test_near_prompts_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def grams(text: str) -> set[str]:
        return {text[i : i + 5] for i in range(len(text) - 4)}

    def similarity(one: str, other: str) -> float:
        return len(grams(one) & grams(other)) / len(grams(one) | grams(other))

    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 80)) for _ in range(50)]
    near = [text.replace(text.split()[3], "Why", 1) for text in texts[:20]]
    far = [" ".join([*text.split()[:40], *rng.choice(WORDS, 40)]) for text in texts[20:40]]
    assert min(map(similarity, texts, near)) > ALIKE > max(map(similarity, texts[20:], far))
    signatures = np.stack([sign(text) for text in texts])
    tested = np.stack([sign(text) for text in near + far])
    assert 18 <= count_near(tested, signatures) <= 21
    assert count_near(tested[20:], signatures) <= 1
    assert count_near(np.stack([sign(text.upper() + " ") for text in texts]), signatures) == 50
    assert count_near(tested, signatures[:0]) == 0
    short = [np.stack([sign(text) for text in of]) for of in (["What is 1?", ""], ["What is 12?", "what  is 1?"])]
    assert [count_near(*short), count_near(*short[::-1])] == [1, 1]  # that which is equal but for case and spaces
    rows = [{"prompt": text, "response": "a"} for text in texts]
    test = write_lines(tmp_path / "test.jsonl", [{"prompt": text.upper(), "response": "a"} for text in texts[:4]])
    data = read(tmp_path, rows, test_path=test, test_size=None)
    assert "4 of 4 test prompts nearly equal one that trains" in capsys.readouterr().err
    assert data.sizes["train"] == 50
