"""What the tests of launchers share: callbacks, by import path, that end ranks at a certain step."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from experiments import kd
from harness.runs import signals
from tests import waiting
from tests.processes import Run
from tests.training import assert_same


class Fault(Callback):
    """Does something once before a step of the teacher's fit, in the ranks of a node; a file remembers that.

    Args:
        mark: the file.
        step: how many steps are done by then.
        rank: the number of the rank, or any.
        world_size: how many ranks there are, or any number.
        node: what the environment variable NODE says there, or anything.
    """

    def __init__(
        self, mark: str, step: int = 3, rank: int | None = None, world_size: int | None = None, node: str | None = None
    ) -> None:
        self.mark, self.step, self.rank, self.world_size, self.node = Path(mark), step, rank, world_size, node

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        here = self.rank in {None, trainer.global_rank} and self.world_size in {None, trainer.world_size}
        here = here and self.node in {None, os.environ.get("NODE")} and module.runs == [""]
        if here and trainer.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            self.happen()

    def happen(self) -> None:
        raise NotImplementedError


class Killed(Fault):
    """The rank is killed."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Left(Fault):
    """The rank is killed, and what has started it, as on a node that loses its power."""

    def happen(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Held(Fault):
    """The rank waits until it is told to stop, as it is when a node joins."""

    def happen(self) -> None:
        while signals.State.requested is None:
            time.sleep(0.02)


TINY = [
    "--data", "Digits",
    "--teacher", "LightNN", "--seeds", "1", "--trainer.max_epochs", "2", "--data.train_size", "150",
    "--data.test_size", "100", "--data.batch_size", "40", "--only", "ce", "kd",
]  # fmt: skip
ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A port below those that systems hand out, so that no other test's socket can take it before it is used."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", 20000 + secrets.randbelow(10000)))
            return free.getsockname()[1]


def weights(out: Path) -> dict[str, bytes]:
    """The files of weights of a finished run."""
    found = {path.parent.name: path.read_bytes() for path in out.glob("seed0/*/weights.pt")}
    assert (out / "results.json").exists()
    assert found.keys() == {"teacher", "ce", "kd"}
    return found


def assert_close(out: Path, other: Path) -> None:
    """The weights of two runs in float64 agree."""
    for path in sorted(out.glob("seed0/*/weights.pt")):
        assert_same(torch.load(path), torch.load(other / path.relative_to(out)), atol=1e-9)


class Command:
    """A command in a new session; its processes are known by a variable of their environment.

    Args:
        *words: program and arguments.
        log: file for its output.
        **variables: of the environment.
    """

    def __init__(self, *words: str | Path, log: Path, **variables: str) -> None:
        self.log, self.mark = log, f"{time.monotonic_ns()}"
        kept = {key: value for key, value in os.environ.items() if key not in {"MASTER_ADDR", "MASTER_PORT"}}
        given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "APPRENTICE_TEST": self.mark} | variables
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(word) for word in words], stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=kept | given,
                start_new_session=True, cwd=log.parent,
            )  # fmt: skip

    def wait(self, idle: float = 90) -> int:
        """The exit code; fails when it does not end and is idle for so many seconds, or leaves processes behind."""
        ended = waiting.wait(lambda: self.process.poll() is not None, self.processes, idle)
        left = [] if ended and waiting.wait(lambda: not self.processes(), self.processes, 10) else self.processes()
        self.end()
        code = self.process.returncode
        assert ended, f"idle for {idle} s:\n{self.output}"
        assert not left, f"left behind: {left}\n{self.output}"
        return code

    def end(self) -> None:
        """Kill it with what it has started."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[int]:
        """Those of its processes that are alive."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"APPRENTICE_TEST={self.mark}\0" in path.read_text(errors="replace"):
                    found.append(int(path.parent.name))
        return found

    @property
    def output(self) -> str:
        return self.log.read_text()


def torchrun(
    *words: str | Path, log: Path, flags: Sequence[str | Path] = TINY, within: str = "", **variables: str
) -> Command:
    """The main job under torchrun, in a network namespace if one is named."""
    start = [*(["ip", "netns", "exec", within] if within else []), sys.executable, "-m", "torch.distributed.run"]
    return Command(*start, *words, ROOT / "experiments" / "kd.py", *flags, log=log, **variables)


def faults(path: Path, *kinds: tuple[str, dict[str, Any]]) -> list[str]:
    """Flags for the callbacks above, by name with their options; each leaves its mark beside `path`."""
    lines = ["trainer:", "  callbacks:"]
    for kind, options in kinds:
        settings = {"mark": str(path.with_name(kind)), **options}
        lines.append(f"  - {{class_path: tests.launching.{kind}, init_args: {settings}}}")
    path.write_text("\n".join(lines))
    return ["--config", str(path)]


def ranks(
    environments: Sequence[Mapping[str, Any]],
    argv: Sequence[str | Path],
    log: Path,
    before: Callable[[int], None] | None = None,
) -> list[Run]:
    """Processes that someone has started, each with an environment of its own; forked, which spares the imports."""

    def main(rank: int) -> None:
        os.environ.update({key: str(value) for key, value in environments[rank].items()})
        if before is not None:
            before(rank)
        kd.main([str(word) for word in argv])

    return [Run(main, rank, log=log.with_suffix(f".{rank}")) for rank in range(len(environments))]


def by_hand(size: int, numbers: Sequence[int] | None = None, **variables: Any) -> list[dict[str, Any]]:
    """The environments of ranks that the user starts."""
    return [{"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, **variables} for rank in numbers or range(size)]


def until(happens: Callable[[], bool], *runs: Run | Command, idle: float = 90) -> None:
    """Wait for something that these runs do; fails, and ends them, when all are idle for so many seconds."""
    if not waiting.wait(happens, lambda: [pid for run in runs for pid in run.processes()], idle):
        for run in runs:
            run.end()
        raise AssertionError("".join(run.output for run in runs))


def ended(runs: Sequence[Run], idle: float = 90) -> str:
    """What ranks have said that ended well."""
    codes = [run.wait(idle) for run in runs]
    said = "".join(run.output for run in runs)
    assert set(codes) == {0}, said
    return said
