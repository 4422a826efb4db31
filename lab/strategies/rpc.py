"""An agent of torch.distributed.rpc in each rank, and calls that wait for the main thread."""

import atexit
import queue
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.futures import Future

from strategies.base.private import default_store

SCHEME = "apprentice"  # of an init_method that stands for the process group's store
SHUTDOWN_TIMEOUT = 10.0  # seconds for a graceful shutdown of all agents
PING_INTERVAL = 1.0  # seconds

_receiver: list[Any] = []  # this process's, if any: a remote call reaches a process, not an object


def receiver() -> Any:
    """Return the object in this process that remote calls are for."""
    return _receiver[0]


def start_agent(receiver: Any, timeout: float) -> None:
    """Start this rank's agent, unless an earlier fit has; collective.

    Args:
        receiver: what other ranks' calls find here.
        timeout: seconds that a call may take.
    """
    _receiver[:] = [receiver]
    if rpc._is_current_rpc_agent_set():
        rpc._set_rpc_timeout(timeout)
    else:
        with suppress(RuntimeError):  # it is registered already
            dist.register_rendezvous_handler(SCHEME, _process_groups_store)
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"{SCHEME}://", rpc_timeout=timeout)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's use of one
            rank, count = dist.get_rank(), dist.get_world_size()
            rpc.init_rpc(f"rank{rank}", rank=rank, world_size=count, rpc_backend_options=options)
        atexit.register(_stop_at_exit)


def _process_groups_store(*_args: Any, **_options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a rendezvous at the store that the ranks share: another address might be taken, or lead to dead ranks."""
    yield dist.PrefixStore("rpc", default_store()), dist.get_rank(), dist.get_world_size()


def stop_agent(graceful: bool = True) -> None:
    """Shut this rank's agent down, if it runs, with the others or at once; the process can't start another one."""
    if rpc.is_available() and rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful, timeout=SHUTDOWN_TIMEOUT if graceful else 0)


def _stop_at_exit() -> None:
    with suppress(RuntimeError):  # other agents may have gone
        stop_agent()


def forget_receiver() -> None:
    """Drop the object that remote calls were for, once no call comes."""
    _receiver.clear()


def wait(future: Any, rank: int) -> Any:
    """Return the result of a call to a rank, while signal handlers run; RuntimeError if it has gone or is too late."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    try:
        return future.wait()
    except RuntimeError as error:  # reworded such that `failures` recognises a peer that is late or has gone
        text = str(error)
        if "ran for more than set timeout" in text:
            raise RuntimeError(f"Timed out: no answer from rank {rank}") from error
        if "tensorpipe" in text:
            raise RuntimeError(f"Connection closed by rank {rank}") from error
        raise


class CallQueue:
    """Calls that arrive in RPC threads and wait for the main thread, with futures of results; time-out in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._calls: queue.SimpleQueue[tuple[Any, Future]] = queue.SimpleQueue()

    def put(self, call: Any) -> Future:
        """Add a call, in an RPC thread."""
        result: Future = Future()
        self._calls.put((call, result))
        return result

    def get(self, callers: Iterable[int]) -> tuple[Any, Future]:
        """Wait for the next call; RuntimeError if a rank that should call has gone, or is too late."""
        deadline, pings = time.monotonic() + self.timeout, dict[int, Future]()
        while True:
            with suppress(queue.Empty):
                return self._calls.get(timeout=PING_INTERVAL)
            for rank in callers:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Timed out: nothing from rank {rank}")
                if rank in pings and pings[rank].done():
                    wait(pings.pop(rank), rank)
                if rank not in pings:
                    pings[rank] = rpc.rpc_async(rank, torch.is_grad_enabled)
