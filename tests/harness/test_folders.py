"""A run's folder: what is the run's in it, and what a run that is to go on there asks of it."""

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice.errors import BadInput
from experiments import kd
from harness import cli
from harness.reports.hparams import log_run
from harness.runs import folders
from harness.runs.files import atomic, atomic_folder, check_output, list_recorded, write_text
from harness.runs.tensorboard import RunsLogger
from tests.commands import Refusal, run_of
from tests.processes import Run

TINY = [
    "--data", "Digits",
    "--data.train_size", "40", "--data.test_size", "20", "--data.validation_size", "20", "--seeds", "1",
]  # fmt: skip
TINY += ["--only", "ce", "--trainer.max_epochs", "1"]


def files(out: Path) -> set[str]:
    names = (path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    return {name for name in names if name not in {".lock", ".pid", ".job", ".files"}}


def run(out: Path) -> None:
    """What a run writes, in every way that there is."""
    with folders.open_folder(out):
        write_text(out / "config.yaml", "data: Digits")
        (out / "seed0").mkdir()
        write_text(out / "seed0" / "teacher.json", "{}")
        logger = RunsLogger(out / "seed0", ["kd"], "kd")
        logger.log_metrics({"loss": 1.0}, 0)
        logger.finalize("success")
        log_run(out / "seed0" / "kd", {}, {"test/acc": 1.0}, "acc")


def test_overwriting_deletes_what_was_recorded_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out)
    written = files(out)
    assert len(written) == 4  # two of them of events
    mine = {"seeds.txt", "seed_notes/a", "float32/a", "seed0/mine.txt", "seed0/kd/events.mine", "trace_x.json"}
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()
    with pytest.raises(BadInput, match=r"this one holds config.yaml; or `resume true`, `overwrite true`"):
        run(out)
    with folders.open_folder(out, overwrite=True):
        assert files(out) == mine


def test_overwriting_takes_what_a_killed_run_has_left_and_empty_folders(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with folders.open_folder(out):
        (out / "seed0" / "kd").mkdir(parents=True)
        (out / "seed1" / "mine").mkdir(parents=True)
        for seed in ("seed0", "seed1"):
            with pytest.raises(KeyboardInterrupt), atomic(out / seed / "teacher.ckpt") as temporary:
                raise KeyboardInterrupt
            temporary.write_bytes(b"half a checkpoint")
        write_text(out / "seed0" / "kd" / "net.yaml", "")
    with (out / ".files").open("a") as record:
        record.write('\n"seed0/mi')  # cut off when it was written
    with folders.open_folder(out, overwrite=True):
        write_text(out / "config.yaml", "")
        assert files(out) == {"config.yaml"}
        assert not (out / "seed0").exists()
        assert (out / "seed1" / "mine").exists()
    assert list_recorded(out) == [out / "config.yaml"]


def test_files_elsewhere_or_written_when_no_run_is_open_are_not_recorded(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with folders.open_folder(out):
        write_text(tmp_path / "elsewhere", "")
        write_text(out / "results.json", "")
    write_text(out / "later", "")
    assert list_recorded(out) == [out / "results.json"]
    assert "APPRENTICE_RUN" not in os.environ


@pytest.mark.parametrize("recorded", [True, False], ids=["beside a run", "alone"])
@pytest.mark.parametrize("name", ["results.md", "seed0/student.json", "seed12/students.ckpt", "environment.json"])
def test_what_may_be_a_runs_and_is_in_no_record_is_not_touched(name: str, recorded: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"
    if recorded:
        run(out)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = files(out)
    with pytest.raises(BadInput, match="this one holds"), folders.open_folder(out):
        pass
    with pytest.raises(BadInput, match=f"{name} is in no record: delete that by hand"):
        folders.open_folder(out, overwrite=True).__enter__()
    assert files(out) == before
    assert recorded or [path.name for path in out.iterdir()] == [name.partition("/")[0]]


def test_a_new_folder_may_hold_files_of_the_users(tmp_path: Path) -> None:
    for name in ("seeds.txt", "seed_notes/a.json", "float32/a", "seed0/mine.txt", "seeds/teacher.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = files(tmp_path)
    with folders.open_folder(tmp_path):
        pass
    assert before <= files(tmp_path)


@pytest.mark.parametrize("line", ["3", '"../mine"', '"{elsewhere}"', "\\udcff"])
def test_a_record_deletes_nothing_outside_of_its_folder(line: str, tmp_path: Path) -> None:
    out, mine = tmp_path / "run", tmp_path / "mine"
    mine.touch()
    run(out)
    with (out / ".files").open("ab") as record:
        record.write(f"\n{line}".format(elsewhere=mine).encode(errors="surrogateescape"))
    with folders.open_folder(out, overwrite=True):
        assert files(out) == set()
    assert mine.exists()


finished = run_of(kd, *TINY)


@pytest.mark.parametrize("name", ["seed0/teacher/weights.pt", "seed{seed}/teacher/weights.pt"])
def test_what_a_run_reads_is_not_overwritten(name: str, finished: Path, tmp_path: Path, refusal: Refusal) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    before = files(out)
    line = refusal(kd.main, *TINY, "--out", out, "--overwrite", "true", "--teacher_ckpt", out / name)
    assert line.startswith(f"--overwrite true: expected --teacher_ckpt outside of {out}, ")
    assert files(out) == before


CUT = {
    "missing": lambda text: None,
    "empty": lambda text: "",
    "only a comment": lambda text: "# nothing\n",
    "without its end": lambda text: text[: text.index("optimizer:")],
    "without its last line": lambda text: text[: text.rstrip().rindex("\n") + 1],
    "without its last character": lambda text: text[:-1],
    "cut off in a word": lambda text: text[: text.index("max_epochs") + 3],
}


@pytest.mark.parametrize("cut", CUT)
def test_a_run_without_its_settings_does_not_go_on(cut: str, finished: Path, tmp_path: Path, refusal: Refusal) -> None:
    out = shutil.copytree(finished, tmp_path / "run")
    text = CUT[cut]((out / "config.yaml").read_text())
    (out / "config.yaml").unlink()
    if text is not None:
        (out / "config.yaml").write_text(text)
    line = refusal(kd.main, *TINY, "--resume", "true", "--out", out, "--optimizer.lr", "0.01")
    begins = (
        "--resume true: expected config.yaml in " if cut == "missing" else f"--out {out / 'config.yaml'}: expected "
    )
    assert line.startswith(begins)


def test_a_new_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with folders.open_folder(tmp_path / "typo", resume=True):
        assert capsys.readouterr().err == f"{tmp_path / 'typo'} holds no run to go on with: a new one starts\n"
        write_text(tmp_path / "typo" / "config.yaml", "")
    with folders.open_folder(tmp_path / "typo", resume=True):
        assert capsys.readouterr().err == ""


def test_a_seeds_folder_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    out, disk = tmp_path / "run", tmp_path / "disk"
    out.mkdir()
    disk.mkdir()
    (out / "seed0").symlink_to(disk)
    with folders.open_folder(out):
        write_text(out / "seed0" / "teacher.json", "{}")
    assert (disk / "teacher.json").exists()
    with folders.open_folder(out, overwrite=True):
        assert not any(disk.iterdir())
    assert (out / "seed0").is_symlink()


@pytest.mark.parametrize(("make", "found"), [
    (lambda path: path.write_text("mine"), "a file"), (lambda path: path.symlink_to("nowhere"), "a broken link"),
    (lambda path: path.symlink_to(path.name), "a broken link"),
], ids=["file", "dangling", "loop"])  # fmt: skip
def test_a_seeds_folder_that_can_not_be_one_is_found_before_training(make: Any, found: str, tmp_path: Path) -> None:
    make(tmp_path / "seed0")
    with pytest.raises(BadInput, match=f"expected folders for seeds; {tmp_path / 'seed0'} is {found}"):
        folders.open_folder(tmp_path).__enter__()
    make(tmp_path / "other")
    with pytest.raises(BadInput, match=r"a folder that can be written \(this is a "):
        folders.open_folder(tmp_path / "other").__enter__()


@pytest.mark.parametrize("name", ["report.html", "data.json", "split.csv"])
def test_a_file_of_the_user_s_that_a_run_would_replace_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(BadInput, match=f"expected a new folder, as this one holds {name}"):
        folders.open_folder(tmp_path).__enter__()
    with pytest.raises(BadInput, match=f"{name} is in no record"):
        folders.open_folder(tmp_path, overwrite=True).__enter__()
    assert files(tmp_path) == {name}


def test_a_command_replaces_files_of_its_own_kind_alone(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("head and more")
    (tmp_path / "other").write_text("hea")
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("new", "a/new", "own"):
        check_output(tmp_path / name, "head", "one of ours")
    for name, expected in {
        "other": "a new file, or one of ours, which is replaced; this is another",
        "link": "a new file, or one of ours, which is replaced; this is another",
        ".": "a file; this is a folder",
        "other/new": "a file in a folder that can be written",
        f"{'x' * 300}/new": "a file in a folder that can be written",
    }.items():
        with pytest.raises(BadInput, match=f": expected {expected}$"):
            check_output(tmp_path / name, "head", "one of ours")
    assert files(tmp_path) == {"own", "other", "link"}


def test_files_of_a_folder_get_their_names_together(tmp_path: Path) -> None:
    def write(text: str) -> None:
        with atomic_folder(tmp_path / "out") as unfinished:
            for name in ("a", "b"):
                (unfinished / name).write_text(text)
            if text == "bad":
                raise ValueError(text)

    (tmp_path / "out" / ".unfinished-killed").mkdir(parents=True)  # of a process that was killed
    write("good")
    with pytest.raises(ValueError, match="bad"):
        write("bad")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"a": "good", "b": "good"}


@pytest.mark.parametrize("error", [
    OSError(errno.ENOSPC, "No space left on device"),
    RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
], ids=["write", "torch.save"])  # fmt: skip
def test_a_file_for_which_there_is_no_space_is_named(error: Exception, tmp_path: Path, refusal: Refusal) -> None:
    def main(_: Any) -> None:
        with cli.one_line_errors(), atomic(tmp_path / "file"):
            raise error

    what = "" if isinstance(error, OSError) else ", or it can't be written"
    assert refusal(main) == f"no space left on the disk{what}: {tmp_path / 'file'}; what was finished is kept"


@pytest.mark.slow
def test_a_full_folder_of_temporary_files_is_told_and_the_fit_is_kept(tmp_path: Path) -> None:
    def main() -> None:
        save = torch.save

        def full(content: Any, path: Any) -> None:
            if Path(path).name == "result.pt":
                raise OSError(errno.ENOSPC, "No space left on device")
            save(content, path)

        torch.save = full
        kd.main([*TINY, "--trainer.devices", "2", "--trainer.logger", "false", "--out", str(tmp_path / "run")])

    told = f"error: no space left on the disk: {tempfile.gettempdir()}; what was finished is kept"
    assert Run(main, log=tmp_path / "log").check(2).splitlines()[-1] == told
    assert (tmp_path / "run" / "seed0" / "teacher.ckpt").exists()
