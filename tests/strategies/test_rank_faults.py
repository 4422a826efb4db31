"""A rank that dies or hangs ends the whole run soon, with the error that matters first; how ranks find each other."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.multiprocessing.spawn import ProcessContext

from harness import cli
from harness.runs.quiet import quiet
from lab.strategies import AllReduce, DDPRing, ParamServer
from strategies import DDP, FSDP, DataParallel, PipelineStrategy, ZeRO1
from strategies.base import failures, rendezvous
from tests.grids import mostly_slow
from tests.processes import Run
from tests.training import assert_same, classifier, digits, fit, trainer, weights


class At(Callback):
    def __init__(self, does: Callable[[], Any]) -> None:
        self.does = does

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and dist.get_rank() == 1:
            self.does()


def bug() -> None:
    raise LookupError("a bug of rank 1's")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def start(does: Callable[[], Any], log: Path, devices: int = 3, **options: Any) -> Run:
    def main() -> None:
        with cli.one_line_errors():
            fit(classifier(), digits(), devices, callbacks=[At(does)], max_epochs=3, **options)

    return Run(main, log=log)


PAIRS = [(bug, DDP, None), (killed, DDP, None), (killed, PipelineStrategy, None), (bug, FSDP, None)]
DIES = [
    *PAIRS, (killed, DDP, 8), (bug, DDPRing, None), (killed, AllReduce, None), (bug, ZeRO1, None), (killed, FSDP, None),
    (bug, PipelineStrategy, None),
]  # fmt: skip


@pytest.mark.parametrize(("does", "strategy", "exact"), mostly_slow(DIES, *PAIRS))
def test_a_rank_that_dies_ends_the_run(
    does: Callable[[], Any], strategy: type[DataParallel], exact: int | None, tmp_path: Path
) -> None:
    run = start(does, tmp_path / "log", strategy=strategy(timeout=100, **({"exact": exact} if exact else {})))
    assert run.wait(30) != 0
    told = "LookupError: a bug of rank 1's" if does is bug else "rank 1 was killed by SIGKILL"
    assert told in run.output
    others = [word for word in ("Connection closed", "has gone", "kept the others") if word in run.output]
    assert not others, run.output


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = ProcessContext._join_procs_with_timeout
    monkeypatch.setattr(ProcessContext, "_join_procs_with_timeout", lambda context, _: join(context, 2))  # of 30 s
    run = start(stopped, tmp_path / "log", strategy=DDP(timeout=6))  # for a slow start, too
    assert run.wait(6 + 30) == 2
    lines = [line for line in run.output.splitlines() if line.startswith("error: ")]
    expected = "expected every rank to come within that time; rank 1 kept the others waiting"
    assert lines == [f"error: --timeout 6: {expected}"]


class StopsAlone(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or (trainer.global_step, trainer.global_rank) == (2, 1)


def stops_alone(strategy: DataParallel) -> None:
    fit(classifier(), digits(), 2, callbacks=[StopsAlone()], max_epochs=3, strategy=strategy)


def stops_alone_and_leaves(strategy: DataParallel) -> None:
    """A plain module's ranks have no collective after the last step, so one leaves while the other trains."""
    with quiet():
        trainer(2, callbacks=[StopsAlone()], limit_val_batches=0, strategy=strategy).fit(BoringModel())


STOPS: dict[str, tuple[Callable[[DataParallel], None], type[DataParallel]]] = {
    **{strategy.__name__: (stops_alone, strategy) for strategy in (DDP, FSDP, PipelineStrategy, ParamServer)},
    "leaves": (stops_alone_and_leaves, DDP),
}


@pytest.mark.parametrize("name", mostly_slow(STOPS, "DDP", "leaves"))
def test_a_rank_that_stops_alone_is_named(name: str, tmp_path: Path) -> None:
    does, strategy = STOPS[name]

    def main() -> None:
        with cli.one_line_errors():
            does(strategy(timeout=5))

    run = Run(main, log=tmp_path / "log")
    assert run.wait(40) != 0
    expected = "expected it on all ranks after the same step, or on none"
    assert f"trainer.should_stop: {expected}; it is set on rank 1 alone" in run.output
    assert "not attached" not in run.output


def test_a_sub_process_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise TimeoutError

    strategy = DDP(start_method="popen")
    launcher: Any = trainer(2, strategy=strategy).strategy.launcher
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(signal.SIGSTOP)
    launcher.procs.append(child)
    strategy.on_exception(RuntimeError("of another kind"))
    assert child.poll() is None
    monkeypatch.setattr(failures, "raise_for_missing", absent)
    with pytest.raises(TimeoutError):
        strategy.on_exception(RuntimeError("timed out"))
    assert child.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_rank_that_is_slow_changes_nothing() -> None:
    slow = fit(classifier(), digits(), 2, callbacks=[At(lambda: time.sleep(2))], strategy=DDP(timeout=30))
    assert_same(weights(slow), weights(fit(classifier(), digits(), 2)))


def test_rank_zero_serves_a_name_that_does_not_resolve() -> None:
    """Only the other ranks need to resolve the address of rank 0."""
    with rendezvous.bind("127.0.0.1") as free:
        port = free.getsockname()[1]
    store = rendezvous.rendezvous(f"tcp://rank0.invalid:{port}", ("", 0), 0, 1, 5.0)
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(("own", "host", "refused"), [
    ("127.0.1.1", "192.0.2.1", True), ("127.0.1.1", "127.0.1.1", False), ("192.0.2.2", "192.0.2.1", False),
    (None, "192.0.2.1", True), ("127.0.1.1", None, False),
])  # fmt: skip
def test_gloo_needs_an_interface_that_others_reach(
    monkeypatch: pytest.MonkeyPatch, own: str | None, host: str | None, refused: bool
) -> None:
    """A host name that leads to the loopback address, or nowhere, is refused in one line that names the variable."""

    def resolve(name: str) -> str:
        address = host if name == "first" else own
        if address is None:
            raise socket.gaierror
        return address

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if refused:
        with pytest.raises(ConnectionError, match="GLOO_SOCKET_IFNAME: expected the network interface"):
            rendezvous.check_interface("first")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    rendezvous.check_interface("first")
