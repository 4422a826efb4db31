"""A teacher's outputs kept on disk: read by later runs, with the same bits; damage and full disks change nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_modules.distillation import Distillation
from strategies import DDP
from tests.training import assert_same, digits, distillation, fit, weights

Run = Callable[..., tuple[dict[str, Tensor], list[int]]]
ONCE, FIRST = [37, 37, 27], [37]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    calls: list[int] = []
    ask = Distillation.ask_teacher

    def counted(self: Distillation, images: Tensor, *purpose: Any) -> Any:
        calls.append(len(images))
        return ask(self, images, *purpose)

    def fitted(folder: Path | None, devices: int = 1, **data: Any) -> tuple[dict[str, Tensor], list[int]]:
        module = distillation(["kd", "hint"], teacher_cache_dir=folder)
        calls.clear()
        strategy = DDP(timeout=60) if devices > 1 else "auto"
        return weights(fit(module, digits(**data), devices, strategy=strategy)), list(calls)

    monkeypatch.setattr(Distillation, "ask_teacher", counted)
    return fitted


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_outputs_are_computed_once_and_read_later(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    plain, asked = run(None)
    assert asked == ONCE
    folder = tmp_path / "a" / "b"
    kept, asked = run(folder)
    assert asked == FIRST + ONCE
    (file,) = files(folder)
    assert f"teacher's outputs kept in {folder / file}" in capfd.readouterr().out
    read, asked = run(folder)
    assert asked == FIRST
    assert f"teacher's outputs read from {folder / file}" in capfd.readouterr().out
    assert_same(plain, kept)
    assert_same(plain, read)


@pytest.mark.slow
def test_three_processes_read_and_write_the_same_file(run: Run, tmp_path: Path) -> None:
    run(tmp_path)
    (file,) = files(tmp_path)
    before = contents(tmp_path / file)
    read, _ = run(tmp_path, 3)
    assert_same(read, run(None, 3)[0])
    assert files(tmp_path) == [file]
    shutil.rmtree(tmp_path / file)
    run(tmp_path, 3)
    assert contents(tmp_path / file) == before


def test_another_teacher_or_other_data_has_a_file_of_its_own(run: Run, tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, train_size=100)
    run(tmp_path, std=[0.4])
    names = set(files(tmp_path))
    assert len(names) == 3
    module = distillation(["kd"], teacher_cache_dir=tmp_path)  # reads no feature
    fit(module, digits())
    assert len(set(files(tmp_path)) - names) == 1
    changed = distillation(["kd", "hint"])
    with torch.no_grad():
        next(changed.teacher.parameters()).view(-1)[0] += 1
    students = {name: (student.net, student.objective) for name, student in changed.students.items()}
    fit(Distillation(changed.teacher, students, (1, 8, 8), teacher_cache_dir=tmp_path), digits())
    assert len(files(tmp_path)) == 5


def test_a_damaged_file_is_made_anew(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    expected, _ = run(tmp_path)
    (folder,) = tmp_path.iterdir()
    file = folder / "0.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    capfd.readouterr()
    found, asked = run(tmp_path)
    assert asked == FIRST + ONCE
    told = capfd.readouterr().out
    assert f"teacher's outputs are computed anew: teacher_cache_dir {file}: expected a whole file of tensors" in told
    assert_same(expected, found)
    assert file.read_bytes() == whole


def test_a_folder_that_is_not_written_costs_no_result(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found, asked = run(tmp_path / "file" / "folder")
    assert asked == FIRST + ONCE
    assert f"teacher's outputs are not kept in {tmp_path}/file/folder: " in capfd.readouterr().out
    assert_same(found, run(None)[0])
    capfd.readouterr()
    run(Path("/dev/full"))
    assert "teacher's outputs are not kept in /dev/full: " in capfd.readouterr().out
