"""Parquet files and data sets of Hugging Face hold the conversations that JSON lines do."""

import os
import warnings
from pathlib import Path

import pytest

from datamodules import Chat
from tests.chats import rows, write_lines
from tests.commands import bad_input
from tests.processes import Run

pytestmark = pytest.mark.extras("datasets")


def test_other_files_hold_the_same_conversations(tmp_path: Path) -> None:
    run = Run(_check, tmp_path, log=tmp_path / "log")
    assert run.wait() == 0, run.output


def _check(folder: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    import datasets

    lines = rows(30)
    train, test = datasets.Dataset.from_list(lines), datasets.Dataset.from_list(lines[:4])
    train.to_parquet(folder / "chat.parquet")
    datasets.DatasetDict(train=train, test=test).save_to_disk(folder / "saved")
    (folder / "files").mkdir()
    for name, split in (("train", train), ("test", test)):
        split.to_parquet(folder / "files" / f"{name}.parquet")

    def tokens(path: Path, **options: object) -> list[bytes]:
        data = Chat(path, validation_size=3, **{"test_size": 4} | options)
        return [data.split(part).file.tokens[:].tobytes() for part in ("train", "test")] + [
            data.split(part).places.numpy().tobytes() for part in ("train", "validation", "test")
        ]

    expected = tokens(write_lines(folder / "chat.jsonl", lines))
    assert tokens(folder / "chat.parquet") == expected
    held_out = tokens(folder / "chat.jsonl", test_path=write_lines(folder / "test.jsonl", lines[:4]))
    assert tokens(folder / "saved") == tokens(folder / "files") == held_out

    (folder / "damaged.parquet").write_bytes(b"PAR1")
    assert "a file of Parquet; it says" in bad_input(Chat(folder / "damaged.parquet").setup)
    (folder / "plain.txt").write_text("text")
    assert "`data Text` reads plain text" in bad_input(Chat(folder / "plain.txt").setup)
    assert "it is not there" in bad_input(Chat(folder / "no.jsonl").setup)
    (folder / "none").mkdir()
    assert "or a data set of Hugging Face" in bad_input(Chat(folder / "none").setup)
    datasets.DatasetDict(other=train).save_to_disk(folder / "other")
    assert "a split train; it has other" in bad_input(Chat(folder / "other").setup)
