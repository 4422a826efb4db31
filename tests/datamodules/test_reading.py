"""Files are read if they are files, folders and columns once, and workers are as many as there is work for."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS

from apprentice.errors import BadInput
from apprentice.weights import read_saved
from datamodules import MNIST, Chat, InMemoryData, LabelledText
from datamodules.files import AGAIN, NO_FILE, check_file, read_csv, walk
from datamodules.preparation import Preparation
from datamodules.splits import Split
from datamodules.streams import SampleStream
from datamodules.text.conversation_files import open_sources
from deploy.predict.inputs import read_inputs
from deploy.predict.raw import RawImages
from tests.commands import bad_input
from tests.training import net


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_a_folder_that_links_lead_to_again_is_read_once(tmp_path: Path) -> None:
    for name in ("x/a.png", "y/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "x/around").symlink_to(tmp_path)
    (tmp_path / "y/x").symlink_to(tmp_path / "x")
    (tmp_path / "y/broken.png").symlink_to(tmp_path / "nowhere")
    pipe(tmp_path / "x/pipe.png")
    skipped = Counter[str]()
    found = [path.relative_to(tmp_path).as_posix() for path in walk(tmp_path, skipped)]
    assert found == ["x/a.png", "y/b.png", "y/broken.png"]
    assert skipped == {AGAIN: 2, NO_FILE: 1}
    preparation = Preparation(kind="images", shape=(3, 8, 8), mean=(0.0,) * 3, std=(1.0,) * 3)
    inputs = read_inputs(tmp_path, preparation, ["x", "y"])
    assert (inputs.names, inputs.skipped) == (found, skipped)
    assert ".png" in IMG_EXTENSIONS


def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    fifo, zero = pipe(tmp_path / "pipe"), Path("/dev/zero")
    texts = Preparation(kind="bytes", shape=(8,))
    for path in (fifo, zero):
        expected = f"inputs {path}: expected a folder, a file, or a table in CSV; this is a pipe or a device"
        assert bad_input(read_inputs, path, texts, ["a"]) == expected
        assert "it is no file" in bad_input(RawImages(path.parent, [path.name], (3, 8, 8)).decode, 0)
    line = f"data.path {tmp_path / 'p.jsonl'}: expected a file with conversations; this is a pipe or a device"
    assert bad_input(open_sources, str(pipe(tmp_path / "p.jsonl")), None) == line
    assert "this is a pipe or a device" in bad_input(read_csv, fifo, "data.root")
    assert bad_input(check_file, tmp_path, "out") == f"out {tmp_path}: expected a file; this is a folder"
    (tmp_path / "set").mkdir()
    pipe(tmp_path / "set/a.txt")
    assert bad_input(LabelledText(tmp_path / "set").read).endswith("at least 2 classes; there are 0")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("text,label,text\na,b,c\n")
    line = f"data.root {table}: expected a name of its own for each column; 1 and 3 are both 'text'"
    assert bad_input(read_csv, table, "data.root") == line


@pytest.mark.extras("datasets")
def test_two_columns_of_one_name_in_parquet_are_refused(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), path)
    assert "1 and 2 are both 'text'" in bad_input(Chat(path).setup)


@pytest.mark.parametrize(("line", "why"), [
    ('{"prompt": "a", "prompt": "b"}', "line 2 is none: it has 'prompt' twice"),
    ("[" * 200_000, "line 2 is nested too deep"),
])  # fmt: skip
def test_odd_lines_are_named(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": "a", "response": "b"}) + f"\n{line}\n")
    assert bad_input(lambda: list(open_sources(str(path), None)[0].rows())).endswith(why)


@pytest.mark.parametrize("name", ["no/such/file", "./chats", "~/chats", "chats.txt", "chats.jsonl.gz"])
def test_a_missing_file_is_no_data_set_of_a_hub(name: str) -> None:
    line = f"data.path {name}: expected a file with conversations, or a data set of Hugging Face; there is none"
    assert bad_input(open_sources, name, None) == line


def test_a_name_is_a_file_that_is_not_there_or_a_data_set_that_needs_a_package(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    line = bad_input(open_sources, "chats", None)
    assert line.startswith(
        "data.path chats: expected a file of JSON lines or Parquet, and there is none; or a data set"
    )
    assert "datasets: expected it installed" in line


def test_samples_of_several_labels_are_drawn_as_if_of_one_class() -> None:
    class Own(InMemoryData):
        class_names = ("a", "b")
        input_shape = (3,)
        parts = 2

        def read(self) -> Any:
            labels = torch.arange(60).view(20, 3) % 2
            return tuple(Split(torch.arange(60, dtype=torch.uint8).view(20, 3), labels) for _ in range(self.parts))

    class Undivided(Own):
        parts = 1

    for kind, sizes in ((Own, [18, 2, 20]), (Undivided, [14, 1, 4])):
        data = kind(train_size=sizes[0])
        data.setup()
        assert [len(data.split(part).labels) for part in ("train", "validation", "test")] == sizes
        assert data.split("test").labels.shape[1:] == (3,)
    line = bad_input(Own(labelled=4).setup)
    assert line == "data.labelled 4: not allowed, as a sample has 3 labels, not one"


def test_a_root_within_the_data_set_is_named(tmp_path: Path) -> None:
    inside = tmp_path / "MNIST" / "raw"
    inside.mkdir(parents=True)
    for root in (tmp_path / "MNIST", inside):
        line = f"data.root {root}: expected {tmp_path}, the folder that holds MNIST"
        assert bad_input(MNIST(root).prepare_data) == line


def test_a_loader_has_no_more_workers_than_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def loader(_: Any, *, num_workers: int, **options: Any) -> list[Any]:
        asked.append(num_workers)
        return []

    monkeypatch.setattr("datamodules.streams.DataLoader", loader)
    samples = SampleStream(Split(torch.zeros(4, 1), torch.zeros(4)), 9)
    list(samples.read([torch.arange(2), torch.arange(2)]))
    list(samples.read(torch.arange(4).split(1)))
    assert asked == [2, 4]


def test_a_pickled_module_is_told_what_to_save(tmp_path: Path) -> None:
    torch.save(net(), tmp_path / "net.pt")
    with pytest.raises(BadInput, match=r"it is more than a state_dict: it would run code; save net\.state_dict\(\)$"):
        read_saved(tmp_path / "net.pt", "teacher_ckpt")
