"""The benchmarks of language models run on a tiny one."""

import json
from pathlib import Path

import pytest

from benchmarks import lm_speed, teacher_top_k
from tests import with_transformers
from tests.benchmarks import forked
from tests.language_parts import save_llama


def _write_parts(folder: Path) -> tuple[str, str]:
    """A teacher's folder, and a file of conversations."""
    save_llama(folder / "teacher", max_position_embeddings=512)
    lines = [{"question": f"the fox {i}", "answer": "lazy dog " * (i + 1)} for i in range(9)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "teacher"), str(folder / "data.jsonl")


@pytest.mark.slow
@pytest.mark.extras("transformers")
def test_students_are_timed_in_processes_of_their_own(tmp_path: Path) -> None:
    with_transformers.call(_time, tmp_path)


def _time(folder: Path) -> None:
    forked.start_forks(pytest.MonkeyPatch())
    teacher, data = _write_parts(folder)
    sides = [lm_speed.OURS, lm_speed.FOUR, lm_speed.STORED, lm_speed.WRITING]
    flags = ["--teacher", teacher, "--data", data, "--blocks", "0", "3", "--out", str(folder / "out.json")]
    sizes = ["--steps", "1", "--batch_size", "2", "--new_tokens", "3", "--repeat", "1", "--threads", "1"]
    lm_speed.main([*flags, *sizes, "--only", *sides])
    record = json.loads((folder / "out.json").read_text())
    assert record["ratios"].keys() == {"four", "four cpu"}
    assert record["tokens"][lm_speed.WRITING] == 2 * 3
    assert len({record["tokens"][side] for side in sides[:3]}) == 1
    assert all(value > 0 for figures in record["figures"].values() for value in figures.values())


@pytest.mark.slow
@pytest.mark.extras("transformers")
def test_students_are_trained_by_what_is_stored(tmp_path: Path) -> None:
    lines = with_transformers.call(_train_by_stored, tmp_path).splitlines()
    rows = [line.split(" | ") for line in lines if line.count(" | ") == 2]
    assert [row[0] for row in rows] == ["untrained", *map(str, teacher_top_k.FORMS)]


def _train_by_stored(folder: Path) -> None:
    teacher_top_k.main([*_write_parts(folder), "--train", "2", "--texts", "1", "--blocks", "0", "3"])
