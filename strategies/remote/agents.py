"""The RPC agent of this process: its start and end, and answers that are waited for."""

import os
import threading
import warnings
from typing import Any

import torch
from torch.distributed import rpc

GRACE = 10.0  # seconds that a caller waits longer: who is asked finds out first, and knows whom it waited for itself


def check(name: str) -> None:
    """Raise ValueError where this torch has no RPC; `name` is the strategy's."""
    if not rpc.is_available():
        expected = "expected a torch with torch.distributed.rpc, which this one was built without"
        raise ValueError(f"strategy {name}: {expected}")


def start(rank: int, ranks: int, timeout: float) -> None:
    """Start this rank's agent; every rank has to, once there is a process group.

    Args:
        rank: of this process.
        ranks: how many there are.
        timeout: seconds that a call may take.
    """
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=address, rpc_timeout=timeout + GRACE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # it is torch's own use of one
        rpc.init_rpc(name(rank), rank=rank, world_size=ranks, rpc_backend_options=options)


def stop(graceful: bool = True) -> None:
    """End this rank's agent, if there is one: with the others, or at once, where they may have gone."""
    if rpc.is_available() and rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful)


def name(rank: int) -> str:
    """A rank's name among the agents."""
    return f"rank{rank}"


def answered(future: Any, rank: int) -> Any:
    """What a rank has answered, waited for such that signals are heard meanwhile.

    Raises:
        RuntimeError: it has gone, or is too late; or, with its own words, it has failed.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    done.wait()
    try:
        return future.wait()
    except RuntimeError as error:
        raise RuntimeError(told(error, rank)) from error


def told(error: BaseException, rank: int) -> str:
    """One line for an error that came instead of a rank's answer."""
    text = str(error)
    if "ran for more than set timeout" in text:
        return f"Timed out: rank {rank} did not answer"
    return f"Connection closed by rank {rank}"


def ask(rank: int) -> Any:
    """A future that fails once a rank has gone."""
    return rpc.rpc_async(name(rank), torch.is_grad_enabled)
