"""Conversations as data: which tokens are learned, how rows are filled up, what is left out, and every fault's line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from datamodules import Chat, Text
from datamodules.text.marked_turns import END, MARKS
from tests.chats import chat, rows, write_lines

USER, ASSISTANT = MARKS["user"], MARKS["assistant"]


def learned(data: Chat, labels: torch.Tensor) -> str:
    return data.vocabulary.decode(labels[labels >= 0])


def test_a_label_is_the_next_token_where_that_is_of_a_response(tmp_path: Path) -> None:
    data = chat(tmp_path)
    for batch in data.train_dataloader():
        places = data.split("train").places[batch.index].tolist()
        longest = max(len(row["prompt"] + row["response"]) + 3 for row in (rows(40)[place] for place in places))
        assert batch.inputs.shape == batch.labels.shape == (len(places), longest)
        counting = int((batch.labels >= 0).sum())
        assert batch.label_weight == len(places) * longest / counting
        for inputs, labels, place in zip(batch.inputs, batch.labels, places, strict=True):
            prompt, response = rows(40)[place].values()
            text = USER + prompt + END + ASSISTANT + response + END
            assert data.vocabulary.decode(inputs[: len(text) - 1]) == text[:-1]
            assert not inputs[len(text) - 1 :].any()
            assert learned(data, labels) == response + END
            known = labels[:-1] >= 0
            assert torch.equal(labels[:-1][known], inputs[1:][known]) or labels[len(text) - 2] == ord(END)


def test_a_pad_that_is_the_end_token_is_learned_where_it_ends_a_turn(tmp_path: Path) -> None:
    data = chat(tmp_path)
    batch = next(iter(data.train_dataloader()))
    batch.inputs[batch.labels.cumsum(1).eq(-100 * torch.arange(1, batch.labels.shape[1] + 1))] = ord(END)
    assert (batch.labels == ord(END)).sum() == len(batch.labels)  # of each row once, whatever it is filled up with


def test_turns_of_the_assistant_are_learned_wherever_they_stand(tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "hi"), ("assistant", "yes?"), ("user", "why"), ("assistant", "so")]
    lines = [{"messages": [{"role": role, "content": text} for role, text in turns]}] * 2
    for number, line in enumerate(lines):
        lines[number] = json.loads(json.dumps(line).replace("hi", f"hi{number}"))
    data = Chat(write_lines(tmp_path / "chat.jsonl", lines * 3), validation_size=0, test_size=3, max_length=60)
    _, labels = data.split("train").take(torch.arange(1))
    assert learned(data, labels) == f"yes?{END}so{END}"
    assert data.vocabulary.decode(data.split("train").prompt(0)).endswith(f"{END}{ASSISTANT}")


def test_plain_texts_are_learned_whole_but_for_the_first_token(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "texts.jsonl", [{"text": f"text {i}"} for i in range(5)])
    data = Chat(path, validation_size=0, test_size=1, tokenizer="characters")
    _, labels = data.split("train").take(torch.tensor([2]))
    place = int(data.split("train").places[2])
    assert learned(data, labels) == f"ext {place}{END}"
    assert data.num_classes == len(set("text 01234")) + 5  # and the marks of the template


def test_no_prompt_is_in_two_parts(tmp_path: Path) -> None:
    lines = [{"prompt": f"p{i // 3}", "response": f"r{i}"} for i in range(60)]
    data = Chat(write_lines(tmp_path / "chat.jsonl", lines), validation_size=9, test_size=12)
    prompts = [
        {lines[place]["prompt"] for place in data.split(part).places} for part in ("train", "validation", "test")
    ]
    assert [len(p) for p in prompts] == [13, 3, 4]
    assert len(set.union(*prompts)) == 20
    assert data.sizes == {"train": 39, "validation": 9, "test": 12}


def test_prompts_of_a_test_file_do_not_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = write_lines(tmp_path / "test.jsonl", rows(7))
    path = write_lines(tmp_path / "chat.jsonl", rows(20))
    data = Chat(path, test_path=test, validation_size=3)
    assert data.sizes == {"train": 10, "validation": 3, "test": 7}
    assert "7 conversations do not train, as their prompts are in the test's" in capsys.readouterr().err


def test_what_has_no_token_to_learn_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        *rows(10), {"prompt": "x", "response": "  "}, {"prompt": "y" * 99, "response": "late"},
        {"prompt": "z", "response": "w" * 99}, {"prompt": "n", "response": None},
    ]  # fmt: skip
    data = Chat(write_lines(tmp_path / "chat.jsonl", lines), validation_size=0, test_size=2, max_length=90)
    assert data.sizes == {"train": 9, "validation": 0, "test": 2}
    said = capsys.readouterr().err
    assert "2 empty (line 11, line 14)" in said
    assert "1 cut off by max_length before the response (line 12)" in said
    assert "1 end at max_length" in said
    assert data.split("train").lengths.max() == 89


def test_tokens_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = chat(tmp_path)
    assert first.split("train").file.folder.parent == tmp_path / ".apprentice"
    monkeypatch.setattr("datamodules.text.chat.write_tokens", None)
    again = chat(tmp_path)
    assert again.fingerprint() == first.fingerprint()
    assert chat(tmp_path, seed=1).fingerprint() != first.fingerprint()
    with pytest.raises(TypeError):  # other tokens are made anew
        chat(tmp_path, max_length=99)
    (first.split("train").file.folder / "tokens.bin").write_bytes(b"short!")
    with pytest.raises(BadInput, match="delete it; files were cut short"):
        chat(tmp_path)


def test_tokens_of_data_that_must_not_change_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = write_lines(tmp_path / "data" / "chat.jsonl", rows(9))
    path.parent.chmod(0o555)
    data = Chat(path, validation_size=1, test_size=1)
    assert data.split("train").file.folder.parent == tmp_path / "cache" / "apprentice"
    path.parent.chmod(0o755)
    assert [file.name for file in path.parent.iterdir()] == ["chat.jsonl"]


@pytest.mark.parametrize("options", [{}, {"sort_lengths": True}, {"pack": True}], ids=str)
def test_an_epoch_goes_on_where_it_was_cut_off(options: dict[str, Any], tmp_path: Path) -> None:
    loader = chat(tmp_path, **options).train_dataloader()
    loader.sampler.set_epoch(2)
    whole = list(loader)
    loader.sampler._position = lambda: 3
    loader.sampler.set_epoch(2)
    rest = list(loader)
    assert len(whole) == len(loader) == 7
    assert len(rest) == 4
    for batch, other in zip(whole[3:], rest, strict=True):
        assert batch.step == other.step
        assert torch.equal(batch.inputs, other.inputs)
        assert torch.equal(batch.labels, other.labels)


def test_messages_of_a_column_of_prompts_are_not_learned(tmp_path: Path) -> None:
    def turns(last: str) -> list[dict[str, str]]:
        texts = {"user": "hi", "assistant": "yes?", "tool": last}
        return [{"role": role, "content": text} for role, text in texts.items()]

    lines = [{"prompt": turns(f"why {i}"), "response": "so"} for i in range(4)]
    lines[3]["prompt"] = turns("why 0")[1:]  # begins with the assistant
    data = Chat(write_lines(tmp_path / "chat.jsonl", lines), validation_size=0, test_size=1)
    _, labels = data.split("train").take(torch.arange(3))
    assert [learned(data, row) for row in labels] == [f"so{END}"] * 3
    assert data.vocabulary.decode(data.split("train").prompt(0)).count(ASSISTANT) == 2
    assert len(set(data.split("train").file.index["prompt"])) == 4  # prompts differ after the assistant's first turn


def test_bytes_are_those_of_tokens_that_are_learned(tmp_path: Path) -> None:
    lines = [{"prompt": "ab", "response": "ăăăă"}, {"prompt": "a", "response": "bc"}]
    path = write_lines(tmp_path / "chat.jsonl", lines)
    data = Chat(path, test_path=path, max_length=10, text="response")
    with pytest.raises(BadInput, match="none trains") as error:
        data.setup()
    assert error.value.argument == "data.test_path"
    data = Chat(path, validation_size=0, test_size=1, max_length=10)
    file = data.split("train").file
    assert file.index["learned"].tolist() == [5, 3]  # two letters and a half; two letters and an end
    assert file.index["bytes"].tolist() == [5, 2]


def test_conversations_that_the_assistant_begins_are_left_out_for_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [("assistant", "Hello"), ("user", "hi"), ("assistant", "b")]
    turns = [{"role": role, "content": text} for role, text in texts]
    lines = [{"messages": turns[n:]} for n in (1, 0, 1)]
    lines[2]["messages"] = [{"role": "user", "content": "ho"}, turns[2]]
    Chat(write_lines(tmp_path / "chat.jsonl", lines), validation_size=0, test_size=1).setup()
    assert "1 of which the assistant's turn is the first (line 2)" in capsys.readouterr().err


def test_a_fault_of_the_test_file_names_its_flag(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", rows(5))
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, expected in {"none": "not there", "bad": "line 1 is a list", "empty": "is empty"}.items():
        with pytest.raises(BadInput, match=expected) as error:
            Chat(path, test_path=tmp_path / f"{name}.jsonl").setup()
        assert error.value.argument == "data.test_path"


FAULTS: dict[str, tuple[bytes, dict[str, Any], str, str]] = {
    "empty": (b"\n\n", {}, "data.path", "this one is empty"),
    "no JSON": (b'{"prompt": "a", "response": "b"}\nhello\n', {}, "data.path", "line 2 is none"),
    "no object": (b"[1, 2]\n", {}, "data.path", "line 1 is a list"),
    "no UTF-8": (b'{"prompt": "\xff"}\n', {}, "data.path", "line 1 is not"),
    "columns": (b'{"a": "1", "b": "2"}\n', {}, "data.path", "it has a, b"),
    "no such": (b'{"a": "1"}\n', {"prompt": "q", "response": "a"}, "data.prompt", "a column of .*: a"),
    "half": (b"", {"prompt": "q"}, "data.prompt", "`data.prompt` and `data.response`"),
    "two kinds": (b"", {"text": "q", "messages": "m"}, "data.messages", "alone"),
    "a number": (b'{"prompt": "a", "response": 3}\n', {}, "data.response", "it is a int"),
    "no messages": (b'{"messages": [{"content": "a"}]}\n', {}, "data.messages", "each with a role"),
    "a role": (b'{"messages": [{"role": "judge", "content": "a"}, {"role": "assistant", "content": "b"}]}\n', {},
        "data.messages", "roles of the built-in template"),
    "marks": (b'{"prompt": "a\\u0003", "response": "b"}\n', {}, "data.path", "control characters"),
    "nothing": (b'{"prompt": "a", "response": ""}\n', {}, "data.path", "1 empty"),
    "length": (b"", {"max_length": 1}, "data.max_length", "at least 2"),
    "template": (b'{"prompt": "a", "response": "b"}\n', {"template": "none"}, "data.template", "No such file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told_in_a_line(fault: str, tmp_path: Path) -> None:
    content, options, argument, expected = FAULTS[fault]
    path = tmp_path / "chat.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=expected) as error:
        Chat(path, **options).setup()
    assert error.value.argument == argument
    assert not list(tmp_path.glob(".apprentice/.*"))  # nothing half-made is left


def test_a_text_of_json_lines_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chat.jsonl", rows(3))
    with pytest.raises(BadInput, match="`data Chat` reads JSON lines"):
        Text(path).setup()
