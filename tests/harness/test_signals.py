"""A signal ends a run wherever it comes, also where an exception would be lost."""

import os
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from experiments import kd
from harness.runs import nets, signals
from tests.processes import CONTEXT, Run


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)  # the handler comes now


class Referred:
    """May be referred to."""


class Deleted:
    """Is told when it goes."""

    def __del__(self) -> None:
        stop()


def in_a_weak_reference() -> None:
    referred = Referred()
    kept = weakref.ref(referred, lambda _: stop())
    del referred
    assert kept() is None


def in_a_finalizer() -> None:
    Deleted()


def in_an_except() -> None:
    with suppress(BaseException):  # as somebody's code has it
        stop()


PLACES = [in_a_weak_reference, in_a_finalizer, in_an_except]


@pytest.mark.parametrize("place", PLACES)
def test_no_signal_is_lost(place: Callable[[], None], tmp_path: Path) -> None:
    def main() -> None:
        with signals.handle_signals(), signals.advise_at_stop("go on so\n"):
            print("before")
            place()
            print("after")

    assert Run(main, log=tmp_path / "log").check(128 + signal.SIGTERM) == "before\ngo on so\n"


def test_a_run_says_how_it_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def main() -> None:
        nets.save_net.__globals__["write_spec"] = lambda *_: in_a_weak_reference()
        flags = ["--seeds", "1", "--trainer.max_epochs", "1", "--teacher", "LightNN"]
        kd.main([*flags, "--out", str(out), "--export", "the files"])

    output = Run(main, log=tmp_path / "log").check(128 + signal.SIGTERM)
    again = f"python experiments/kd.py --out {out} --resume true --export 'the files'"  # which no folder of a run holds
    assert output.endswith(f"stopped; go on with: {again}\n")
    assert (out / "seed0" / "teacher.ckpt").exists()
    assert not (out / "seed0" / "teacher.json").exists()


def test_a_notebook_lives_on(tmp_path: Path) -> None:
    def main() -> None:
        sys.ps1 = ">>> "
        with pytest.raises(signals.Interrupted), signals.handle_signals():
            stop()
        print("alive")

    assert Run(main, log=tmp_path / "log").check() == "alive\n"


def test_nothing_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def main() -> None:
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # a fork's exit functions are cleared
        with signals.handle_signals(), tempfile.TemporaryDirectory():
            CONTEXT.Process(target=time.sleep, args=[300]).start()
            stop()

    Run(main, log=tmp_path / "log").check(128 + signal.SIGTERM)  # no process is left, too
    assert not any((tmp_path / "temporary").iterdir())
