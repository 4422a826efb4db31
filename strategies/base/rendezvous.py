"""Where ranks meet before they train: one store for those that are here now, whatever was left there before.

A store may outlive the ranks that filled it: a file on a disk does, and so does the one that torchrun keeps for its
workers over restarts. Read as it is, it sends ranks to the addresses of dead ones. So rank 0 draws a token for each
meeting and gives it to those who ask now; all that follows is kept below that token.
"""

import secrets
import socket
import time

import torch.distributed as dist

from strategies.base import stores

PAUSE = 0.02  # seconds between two looks
FAREWELL = 1.0  # seconds in which others hear why a meeting has failed, before the store goes


class StartedTwiceError(ConnectionError):
    """This rank is there already, and perhaps nobody else will notice."""


def meet(
    method: str | None,
    address: tuple[str, int],
    rank: int,
    world_size: int,
    timeout: float,
    listening: socket.socket | None = None,
) -> dist.Store:
    """The store that all ranks share, once all of them have come.

    Args:
        method: an init_method; None and env:// stand for `address`.
        address: host and port of rank 0, as the launcher tells them.
        rank: of this process.
        world_size: how many ranks there are.
        timeout: seconds in which all have to come.
        listening: rank 0's socket, where it has one already.

    Raises:
        TimeoutError: nobody answers, or someone has not come.
        ConnectionError: the port or the file can't be used, or a rank is there twice.
    """
    deadline = time.monotonic() + timeout
    try:
        store = stores.reach(method, address, rank, timeout, listening)
        token = (
            _receive(store, world_size, deadline, timeout)
            if rank == 0
            else _ask(store, rank, world_size, deadline, timeout)
        )
    except dist.DistError:
        told = "expected rank 0 to stay until all ranks have come; it has gone"
        raise ConnectionError(f"--trainer.strategy.timeout {timeout:g}: {told}") from None
    return dist.PrefixStore(f"meeting/{token}", store)


def _receive(store: dist.Store, world_size: int, deadline: float, timeout: float) -> str:
    """Rank 0's part: give the token to whoever asks, until all are here; those that asked in vain before are dead."""
    token, asked = secrets.token_hex(8), dict[int, str]()
    missing = list(range(1, world_size))
    fault: OSError | None = None
    while missing and fault is None:
        time.sleep(PAUSE)
        for rank in range(1, world_size):
            request = _read(store, f"request/{rank}")
            if request is not None and request != asked.get(rank):
                asked[rank] = request
                store.set(f"answer/{request}", token)
        here = {rank: int(_read(store, f"here/{token}/{rank}") or 0) for rank in range(1, world_size)}
        missing = [rank for rank, times in here.items() if not times]
        if twice := [rank for rank, times in here.items() if times > 1]:
            fault = ConnectionError(_twice(twice[0], world_size))
        elif missing and time.monotonic() > deadline:
            fault = TimeoutError(_late(missing, world_size, timeout))
    store.set(f"outcome/{token}", "" if fault is None else f"{type(fault).__name__} {fault}")
    if fault is not None:
        time.sleep(FAREWELL)
        raise fault
    return token


def _twice(rank: int, world_size: int) -> str:
    return f"rank {rank}: expected each of the {world_size} ranks once; this one was started twice"


def _late(missing: list[int], world_size: int, timeout: float) -> str:
    names = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
    return f"--trainer.strategy.timeout {timeout:g}: expected {world_size} ranks within that time; {names} not come"


def _ask(store: dist.Store, rank: int, world_size: int, deadline: float, timeout: float) -> str:
    """Another rank's part: ask for the token, tell that it is here, and wait for all."""
    request = secrets.token_hex(8)
    while (token := _read(store, f"answer/{request}")) is None:
        if _read(store, f"request/{rank}") != request:
            store.set(f"request/{rank}", request)  # again, where another one of this number has put its own there
        _pause(deadline, timeout)
    if store.add(f"here/{token}/{rank}", 1) > 1:  # the first one may be under way already
        raise StartedTwiceError(_twice(rank, world_size))
    while (outcome := _read(store, f"outcome/{token}")) is None:
        _pause(deadline + 2 * FAREWELL, timeout)  # rank 0 knows better who is missing
    if outcome:
        kind, _, told = outcome.partition(" ")
        raise (TimeoutError if kind == "TimeoutError" else ConnectionError)(told)
    return token


def _read(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _pause(deadline: float, timeout: float) -> None:
    if time.monotonic() > deadline:
        told = "expected an answer of rank 0 within that time; it has not come, or has all its ranks"
        raise TimeoutError(f"--trainer.strategy.timeout {timeout:g}: {told}")
    time.sleep(PAUSE)
