"""The conversations that come with Python: questions about its names, and what its documentation says."""

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from apprentice.errors import BadInput
from datamodules import Chat
from datamodules.data_hooks import LIMITS
from datamodules.text.python_help import PythonHelp


def test_a_response_is_the_first_sentence_of_the_documentation() -> None:
    rows = {row["prompt"]: row["response"] for _, row in PythonHelp().rows()}
    assert rows["What does str.isupper do?"] == " ".join(str.isupper.__doc__.split("\n\n")[0].split())
    assert rows["What does len do?"] == "Return the number of items in a container."
    assert rows["What is ValueError?"] == ValueError.__doc__
    assert rows["What does math.cos do?"] == "Return the cosine of x (measured in radians)."
    assert all(text.isascii() and text[-1] in ".!?" and "\n" not in text for text in rows.values())
    assert len(rows) > 500
    assert len({*rows.values()}) == len(rows)


def test_nothing_that_is_tested_on_is_nearly_equal_to_what_was_learned(tmp_path: Path) -> None:
    data, rows, groups = Chat(cache_dir=tmp_path), [*PythonHelp().rows()], PythonHelp().groups()
    data.setup()
    parts = {part: data.split(part).places.tolist() for part in LIMITS}
    responses = {part: [rows[place][1]["response"] for place in places] for part, places in parts.items()}
    for one, other in (("test", "train"), ("test", "validation"), ("validation", "train")):
        for response in responses[one]:
            assert not difflib.get_close_matches(response, responses[other], 1, 0.9)
        assert not {groups[rows[place][0]] for place in parts[one]} & {groups[rows[place][0]] for place in parts[other]}
    for alike in (("str.isupper", "bytes.removeprefix", "bytearray.isupper"), ("math.cos", "cmath.cos", "math.gcd")):
        assert len({groups[name] for name in alike}) == 1
    assert groups["len"] != groups["sorted"]


def test_it_is_the_same_in_any_process() -> None:
    shell = "import builtins; from os.path import join; builtins.input = join"  # Jupyter's has one of its own
    code = (
        f"{shell}; import asyncio, sqlite3; from datamodules.text import python_help as x; print(x.PythonHelp().key())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == [PythonHelp().key()]


def test_chat_reads_it_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = Chat()
    data.setup()
    assert sum(data.sizes.values()) == len([*PythonHelp().rows()])
    assert [path.name for path in tmp_path.iterdir()] == ["apprentice"]  # its tokens, and nothing elsewhere
    text = bytes(data.split("test").text(0)[0].tolist()).decode()
    assert text == "\x02What is ArithmeticError?\x03\x04Base class for arithmetic errors.\x03"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    again = Chat(cache_dir=tmp_path / "given")
    assert again.fingerprint() == data.fingerprint()
    assert (tmp_path / "given").is_dir()
    assert not (tmp_path / "other").exists()


def test_other_columns_are_refused_and_other_conversations_test(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="a column of Python's documentation: prompt, response"):
        Chat(text="question", cache_dir=tmp_path).setup()
    (tmp_path / "test.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    data = Chat(test_path=tmp_path / "test.jsonl", cache_dir=tmp_path)
    data.setup()
    assert data.sizes["test"] == 1
