"""The RPC agent of this process: its start and end, and answers that are waited for."""

import atexit
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.distributed_c10d import _get_default_store

SCHEME = "apprentice"  # of an init_method that stands for the store in which ranks have met
PATIENCE = 10.0  # seconds in which all are done who end together
ROUND = 1.0  # seconds after which those who are waited for are asked whether they are still there


def check(name: str) -> None:
    """Raise ValueError where this torch has no RPC; `name` is the strategy's."""
    if not rpc.is_available():
        expected = "expected a torch with torch.distributed.rpc, which this one was built without"
        raise ValueError(f"strategy {name}: {expected}")


def start(rank: int, ranks: int, timeout: float) -> None:
    """Start this rank's agent, where it is not running yet; every rank has to, once there is a process group.

    Args:
        rank: of this process.
        ranks: how many there are.
        timeout: seconds that a call may take.
    """
    if rpc._is_current_rpc_agent_set():
        rpc._set_rpc_timeout(timeout)
        return
    with suppress(RuntimeError):  # it is registered already
        dist.register_rendezvous_handler(SCHEME, _where_ranks_have_met)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{SCHEME}://", rpc_timeout=timeout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # it is torch's own use of one
        rpc.init_rpc(name(rank), rank=rank, world_size=ranks, rpc_backend_options=options)
    atexit.register(_stop_at_last)


def _where_ranks_have_met(*_args: Any, **_options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """The process group's store: another address might be taken by now, or be that of ranks that are dead."""
    yield dist.PrefixStore("rpc", _get_default_store()), dist.get_rank(), dist.get_world_size()


def stop(graceful: bool = True) -> None:
    """End this rank's agent, if there is one: with the others, or at once, where they may have gone.

    A process can't have another one afterwards: torch's remote references stay with the first.
    """
    if rpc.is_available() and rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful, timeout=PATIENCE if graceful else 0)


def _stop_at_last() -> None:
    with suppress(RuntimeError):  # others may have gone by now
        stop()


def name(rank: int) -> str:
    """A rank's name among the agents."""
    return f"rank{rank}"


def answered(future: Any, rank: int) -> Any:
    """What a rank has answered, waited for such that signals are heard meanwhile.

    Raises:
        RuntimeError: it has gone, or is too late.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    with lost(f"rank {rank}"):
        return future.wait()


@contextmanager
def lost(who: str) -> Iterator[None]:
    """Inside, an error of RPC is raised as one that `roll_call` knows, which then finds who is missing."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "ran for more than set timeout" in text:
            raise RuntimeError(f"Timed out: no answer from {who}") from error
        if "tensorpipe" in text:
            raise RuntimeError(f"Connection closed by {who}") from error
        raise


class Watch:
    """Asks ranks that are waited for whether they are still there.

    Args:
        timeout: seconds they have.
    """

    def __init__(self, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout
        self._asked: dict[int, Any] = {}

    def look(self, missing: Iterable[int]) -> None:
        """To be called every `ROUND` seconds.

        Raises:
            RuntimeError: one has gone, or time is up.
        """
        for rank in missing:
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"Timed out: nothing from rank {rank}")
            if rank in self._asked and self._asked[rank].done():
                answered(self._asked.pop(rank), rank)
            if rank not in self._asked:
                self._asked[rank] = rpc.rpc_async(name(rank), torch.is_grad_enabled)
