"""An experiment's command line, called here or in a fork, refused, killed, and what it leaves."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from apprentice.errors import BadInput
from experiments import kd
from harness.runs import folders
from tests.processes import Run

Refusal = Callable[..., str]  # the fixture `refusal` of conftest.py: (main, *flags) -> the line


# These tell what they train or measure before they look closer.
RUNS = ("kd: ", "gpt: ", "quantize: ", "hardware: ", "attention: ", "comm: ", "pipeline: ", "predict: ", "export: ")
TIMES = {"step_ms", "fit_seconds", "students_fit_seconds", "teacher_fit_seconds", "tokens_per_second"}
OF_A_CALL = {"out", "resume", "devices", "checkpoint_every", "tune_wave"}
SHOWN = {"scalars": "value", "images": "encoded_image_string", "tensors": "tensor_proto"}
# Values differ between runs, steps don't.
MEASURED = {"training_cost/step_ms", "train/samples_per_sec", "train/peak_memory_mib"}


def results(out: Path) -> Any:
    return json.loads((out / "results.json").read_text())


def lasting(value: Any, *but: str) -> Any:
    """The value without times, what is of a call, and keys."""
    if isinstance(value, dict):
        left_out = TIMES | OF_A_CALL | {*but}
        return {key: lasting(part, *but) for key, part in value.items() if key not in left_out}
    return [lasting(part, *but) for part in value] if isinstance(value, list) else value


def nets(out: Path, pattern: str = "seed*/*") -> dict[str, torch.Tensor]:
    """The weights of a run's nets, as seed0/kd.NAME."""
    paths = sorted(out.glob(f"{pattern}/weights.pt"))
    assert paths
    states = {path.parent.relative_to(out): torch.load(path, weights_only=True) for path in paths}
    return {f"{folder}.{name}": tensor for folder, state in states.items() for name, tensor in state.items()}


def curves(out: Path) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """What TensorBoard shows but for times: steps and values by run and tag, each step once."""
    found = {}
    for folder in {path.parent for path in out.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(SHOWN, 0))
        events.Reload()
        for kind, value in SHOWN.items():
            for tag in events.Tags()[kind]:
                points = [(event.step, getattr(event, value)) for event in getattr(events, kind.capitalize())(tag)]
                points = [(step, tag in MEASURED or value) for step, value in points]
                steps = [step for step, _ in points]
                assert steps == sorted(set(steps)), (folder, tag, steps)
                found[str(folder.relative_to(out)), tag] = points
    return found


def start(
    out: Path, *flags: str, before: Callable[[], object] | None = None, main: Callable[[Sequence[str]], None] = kd.main
) -> Run:
    """The experiment in a fork, which calls `before` first."""

    def call() -> None:
        if before is not None:
            before()
        main([*flags, "--out", str(out)])

    return Run(call, log=out.with_suffix(".log"))


def run_of(script: Any, *flags: str) -> Any:
    """A fixture, the folder of a run that a module's tests look at."""

    @pytest.fixture(scope="module")
    def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
        torch.set_num_threads(1)
        out = tmp_path_factory.mktemp("run") / "run"
        script.main([*flags, "--out", str(out)])
        return out

    return run


def kill_at(owner: Any, name: str, call: int, after: bool = False, since: Path | None = None) -> Callable[[], None]:
    """Have the main process killed at the n-th call of a function in rank zero, or right after it.

    Calls count from when a file exists: those of each fit's ranks, which are forked afresh, count for themselves.
    """

    def arm() -> None:
        main, function, torch_save, calls = os.getpid(), getattr(owner, name), torch.save, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            if since is not None and not since.exists():
                return function(*args, **kwargs)
            calls.append(None)
            if len(calls) == call and not after:
                if function is torch_save:
                    Path(args[1]).write_bytes(b"half a checkpoint")
                die(main)
            result = function(*args, **kwargs)
            if len(calls) == call and after:
                die(main)
            return result

        setattr(owner, name, counted)

    def die(main: int) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.kill(main, signal.SIGKILL)
        time.sleep(60)

    return arm


def refuse(
    main: Callable[[Sequence[str]], None],
    flags: Sequence[str | Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """The one line with which the command ends, after "error: ". Without --out it leaves nothing of a run."""
    capsys.readouterr()
    out = [] if {"--out", "--sample"} & {*flags} else ["--out", tmp_path / "refused"]
    with pytest.raises(SystemExit) as stop:
        main([str(flag) for flag in (*flags, *out)])
    shown, error = capsys.readouterr()
    assert (stop.value.code, error[:7], error.count("\n")) == (2, "error: ", 1), error
    assert shown == "" or shown.startswith(RUNS), shown
    assert not [*tmp_path.glob("refused/seed*"), *tmp_path.glob("refused/results*")]
    return error.removeprefix("error: ").rstrip("\n")


def refused(
    main: Callable[[Sequence[str]], None],
    flags: Sequence[str],
    begins: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refuse(main, flags, tmp_path, capsys)
    assert line.startswith(begins), line
    assert says in line


def left_by_overwriting(out: Path, tmp_path: Path) -> set[str]:
    """What a run with --overwrite true finds of this one in its folder, where the user's own files are left alone."""
    copy = shutil.copytree(out, tmp_path / "overwritten")
    foreign = {copy / name for name in ("seeds.txt", "seed_notes/a.txt", "float32/mine.txt", "trace_mine.json")}
    foreign |= {folder / name for folder in (copy, *copy.glob("seed*/**/")) for name in ("mine.txt", "mine.pt")}
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with folders.open_folder(copy, overwrite=True):
        left = {path for path in copy.rglob("*") if path.is_file() and (path.parent != copy or path.name[0] != ".")}
    assert {path for path in left if path in foreign and path.read_text() == "mine"} == foreign
    return {str(path.relative_to(copy)) for path in left - foreign}


def refused_elsewhere(
    main: Callable[[Sequence[str]], None],
    out: Path,
    changes: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run, had it been measured on hardware with these changes, does not go on here, and stays as it was."""
    copy = shutil.copytree(out, tmp_path / "elsewhere")
    measured = results(copy)
    now = {key: measured["hardware"][key] for key in changes}
    (copy / "results.json").write_text(json.dumps(measured | {"hardware": measured["hardware"] | changes}))
    before = {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix}
    differ = "; ".join(f"{key} {changes[key]}, not {now[key]}" for key in changes)
    expected = f"the machine on which the rows in {copy} were measured: {differ}; or take another --out"
    line = refuse(main, ["--out", copy, "--resume", "true"], tmp_path, capsys)
    assert line == f"--resume true: expected {expected}"
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix} == before


def bad_input(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The one line of the `BadInput` that a call raises."""
    with pytest.raises(BadInput) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
    return str(error.value)
