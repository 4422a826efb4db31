"""This process's RPC agent: start and shutdown, and waiting for other agents."""

import atexit
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc
from torch.distributed.distributed_c10d import _get_default_store

SCHEME = "apprentice"  # of an init_method that stands for the process group's store
SHUTDOWN_TIMEOUT = 10.0  # seconds for a graceful shutdown of all agents


def start(rank: int, world_size: int, timeout: float) -> None:
    """Start this rank's agent, unless it is running, with a time-out for calls; after joining the process group."""
    if rpc._is_current_rpc_agent_set():
        rpc._set_rpc_timeout(timeout)
        return
    with suppress(RuntimeError):  # it is registered already
        dist.register_rendezvous_handler(SCHEME, _process_groups_store)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{SCHEME}://", rpc_timeout=timeout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own use of one
        rpc.init_rpc(worker_name(rank), rank=rank, world_size=world_size, rpc_backend_options=options)
    atexit.register(_stop_at_exit)


def _process_groups_store(*_args: Any, **_options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """A rendezvous at the store that the ranks share: another address might be taken, or lead to dead ranks."""
    yield dist.PrefixStore("rpc", _get_default_store()), dist.get_rank(), dist.get_world_size()


def stop(graceful: bool = True) -> None:
    """Shut this rank's agent down, if it runs, with the others or at once; the process can't start another one."""
    if rpc.is_available() and rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful, timeout=SHUTDOWN_TIMEOUT if graceful else 0)


def _stop_at_exit() -> None:
    with suppress(RuntimeError):  # other agents may have gone
        stop()


def worker_name(rank: int) -> str:
    """A rank's name in RPC."""
    return f"rank{rank}"


def wait(future: Any, rank: int) -> Any:
    """The result of a call to a rank; RuntimeError if it has gone or is too late. Signal handlers run meanwhile."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    with peer_errors(f"rank {rank}"):
        return future.wait()


@contextmanager
def peer_errors(peer: str) -> Iterator[None]:
    """Reword RPC's errors inside such that `missing_ranks` recognises a peer that is late or has gone."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "ran for more than set timeout" in text:
            raise RuntimeError(f"Timed out: no answer from {peer}") from error
        if "tensorpipe" in text:
            raise RuntimeError(f"Connection closed by {peer}") from error
        raise
