"""What a command prints to: streams that lack characters, pipes and terminals that close."""

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from experiments import compare, kd
from harness import start
from harness.reports.tables import Table
from harness.runs import session, signals
from harness.runs.files import write_json
from harness.runs.safepoints import SafePoints
from harness.runs.signals import handle_signals
from harness.start import console
from tests.bake_off_facts import results
from tests.launching import ROOT, TINY, by_hand, free_port
from tests.processes import Run
from tests.terminal import on_terminal


def test_characters_that_stdout_lacks_are_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    with console():
        print("Δ ± — … µs T² \udcff 漢")
        print(Table(["a", "Δ, points"], [["x", "1.0 ± 0.5"], ["y", "—"]]).plain())
    lines = stdout.buffer.getvalue().decode().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == "diff +- - ... us T2 ? ?"
    assert lines[1:] == ["a  diff, points", "-  ------------", "x    1.0 +- 0.5", "y             -"]
    assert stdout.errors == "strict"


def test_a_table_elsewhere_has_its_own_characters() -> None:
    assert Table(["a", "Δ"], [["x", "±"]]).plain() == "a  Δ\n-  -\nx  ±"


def closed_early(function: Callable[[], Any], log: Path) -> Run:
    """The call with a stdout that nobody reads."""

    def main() -> None:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        os.close(write)
        sys.stdout = os.fdopen(1, "w")
        function()

    return Run(main, log=log)


def test_help_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "results.json", results().to_json())
    for number, call in enumerate(
        (partial(kd.main, ["--help"]), partial(compare.main, [str(tmp_path / "run"), "--out", str(tmp_path / "both")]))
    ):
        assert closed_early(call, tmp_path / f"{number}.log").check(141) == ""


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_whose_output_is_closed_ends_and_goes_on(devices: int, tmp_path: Path) -> None:
    flags = [*TINY, "--trainer.logger", "false", "--trainer.devices", str(devices), "--out", str(tmp_path / "run")]

    def main() -> None:
        session.notice = lambda line: None  # type: ignore[attr-defined]  # the first line that fails is the epoch's
        kd.main([*flags, "--checkpoint_every", "1e-9"])

    assert "Traceback" not in closed_early(main, tmp_path / "log").check(141)
    assert (tmp_path / "run" / "seed0" / "teacher.ckpt").exists()


@pytest.mark.parametrize("ignored", [False, True], ids=["", "nohup"])
def test_a_hangup_saves_unless_it_is_ignored(ignored: bool, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def main() -> None:
        step, seen = SafePoints.on_train_batch_start, []
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

        def counted(*args: Any) -> None:
            seen.append(1)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGHUP)
            step(*args)

        SafePoints.on_train_batch_start = counted  # type: ignore[method-assign]
        kd.main([*TINY, "--trainer.logger", "false", "--out", str(out)])

    output = Run(main, log=tmp_path / "log").check(0 if ignored else 128 + signal.SIGHUP)
    assert (out / "results.json").exists() is ignored
    assert (out / "seed0" / "teacher.ckpt").exists() is not ignored
    assert (f"--out {out} --resume true" in output) is not ignored


def test_a_terminal_that_is_gone_is_left(tmp_path: Path) -> None:
    def main() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup, around the tests, ignores
        master, slave = pty.openpty()
        os.dup2(slave, 1)
        os.close(slave)
        with handle_signals():
            signals.State.deferring = True
            os.close(master)
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0)
            os.write(1, b"a line")  # without a terminal this would be an OSError

    Run(main, log=tmp_path / "log").check()


def test_what_is_printed_to_a_stream_that_is_closed_goes_nowhere(tmp_path: Path) -> None:
    def main() -> None:
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python has it after `>&-`
        start.script()
        print("to nobody")
        os.write(1, b"by a library")
        with (tmp_path / "file").open("w") as file:
            assert file.fileno() > 2

    assert Run(main, log=tmp_path / "log").check() == ""
    assert (tmp_path / "file").read_text() == ""


def test_an_interrupt_during_the_imports_is_quiet(tmp_path: Path) -> None:
    script = "from harness import start; start.script(); import os; os.kill(os.getpid(), 2); import time; time.sleep(9)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def prepare() -> None:
    start.script()
    start.loaded()


def test_a_terminal_shows_at_once_that_imports_go_on() -> None:
    assert on_terminal(prepare).lines == ["loading torch and Lightning"]


def test_an_interrupt_that_a_shell_has_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        start.script()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
        start.loaded()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_nothing_is_imported_from_a_script_s_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ROOT)
    for first in (ROOT / "experiments", tmp_path):  # as Python sets it; as with -P
        monkeypatch.setattr(sys, "path", [str(first), "others"])
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "link" / "experiments" / "kd.py")])
        start.script()
        start.loaded()
        assert sys.path == [*([str(tmp_path)] if first == tmp_path else []), "others"]


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise KeyError", 1)])
def test_a_script_ends_with_its_threads_exit_functions_and_output(end: str, code: int) -> None:
    script = f"""
import atexit, threading, time
from harness import start

def main():
    atexit.register(print, "exit function")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    print("main")
    {end}

start.script()
start.run(main)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.split("\n")) == (code, ["main", "thread", "exit function", ""])
    assert done.stderr.endswith({1: "KeyError\n"}.get(code, ""))
    assert bool(done.stderr) == (code == 1)


@pytest.mark.parametrize("end", ["", "raise SystemExit(2)"])
def test_a_profiler_writes_its_file_after_the_script(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from harness import start\n\ndef main():\n    print(1)\n    {end}\n\nstart.run(main)\n")
    command = [sys.executable, "-m", "cProfile", "-o", tmp_path / "profile", script]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=not end)
    assert (tmp_path / "profile").stat().st_size


@pytest.mark.slow
def test_a_lost_rank_zero_is_one_line_of_the_others(tmp_path: Path) -> None:
    """Fresh processes, as torch reads its log level when it is loaded."""
    out, flags = tmp_path / "run", [*TINY, "--trainer.max_epochs", "3000", "--trainer.devices", "2"]
    running, logs = [], [tmp_path / "0.log", tmp_path / "1.log"]
    for given, log in zip(by_hand(2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()), logs, strict=True):
        with log.open("w") as file:
            words = [sys.executable, ROOT / "experiments" / "kd.py", *flags, "--out", out]
            env = os.environ | {key: str(value) for key, value in given.items()}
            env.pop("TORCH_CPP_LOG_LEVEL", None)
            running.append(subprocess.Popen(words, stdout=file, stderr=file, env=env))
    try:
        deadline = time.monotonic() + 120
        while "epoch 2/" not in logs[0].read_text():
            assert time.monotonic() < deadline, "".join(log.read_text() for log in logs)
            time.sleep(0.1)
        running[0].kill()
        assert running[1].wait(60) == 2
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert logs[1].read_text() == "error: rank 0 has gone; its own message, if there is one, is above\n"
