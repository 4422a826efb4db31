"""Rendezvous: how ranks find each other, in a file or at rank 0's address, and share one store.

A file and torchrun's store outlive the ranks that filled them, and old entries would send ranks to the addresses of
dead ones. So rank 0 draws a token for each rendezvous, under which its keys are, and gives it to whoever asks now.
"""

import os
import pickle
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment

from apprentice.errors import BadInput

BY_ENVIRONMENT = {None, "env://"}  # MASTER_ADDR and MASTER_PORT say where
HIGHEST_PORT = 65535
CONNECT_INTERVAL, POLL_INTERVAL = 0.2, 0.02  # seconds
GRACE = 1.0  # seconds in which other ranks read why a rendezvous has failed, before the store goes


class RankTimeoutError(BadInput, TimeoutError):
    """Ranks have not come in time."""


class RankConnectionError(BadInput, ConnectionError):
    """Ranks can't meet there, or in that time."""


class StartedTwiceError(ConnectionError):
    """This rank is there already, and perhaps no other rank notices."""


def check_init_method(method: str) -> None:
    """Raise BadInput where an init_method is none of env://, tcp://HOST:PORT and file:///PATH."""
    if method in BY_ENVIRONMENT:
        return
    try:
        parts = urlsplit(method)
        fits = {"tcp": bool(parts.hostname and parts.port), "file": not parts.netloc and len(parts.path) > 1}
    except ValueError:  # a port that is no number, or too large
        fits = {}
    if not fits.get(method.partition("://")[0], False):
        raise BadInput("init_method", method, "env://, tcp://HOST:PORT or file:///PATH")


def bind(host: str, port: int = 0, where: tuple[str, str] = ("", "")) -> socket.socket:
    """Listen on a port, or on any free one for 0; RankConnectionError of `where`, argument and value, if taken."""
    local = host in {"127.0.0.1", "localhost"}
    dual = not local and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server((host if local else "", port), family=family, backlog=4096, dualstack_ipv6=dual)
    except OSError as error:
        raise RankConnectionError(*where, f"a port that is free; {os.strerror(error.errno or 0)}") from None


def main_port(environment: ClusterEnvironment) -> int:
    """Return rank 0's port; BadInput where MASTER_PORT, which most environments read, is none."""
    _master_port()
    return environment.main_port


def _master_port() -> int:
    """Return MASTER_PORT, or 0 where it is not set; BadInput if it is no port."""
    value = os.environ.get("MASTER_PORT", "0")
    if not value.isdecimal() or int(value) > HIGHEST_PORT:
        raise BadInput("", f"MASTER_PORT {value}", f"a port, 1 to {HIGHEST_PORT}")
    return int(value)


def bind_master_port(environment: ClusterEnvironment) -> socket.socket:
    """Bind MASTER_PORT, or a free port, and tell the environment and sub-processes its number."""
    chooses = type(environment).main_port is LightningEnvironment.main_port  # a port that was free some time ago
    port = _master_port() if chooses else main_port(environment)
    bound = bind(environment.main_address, port, ("", f"MASTER_PORT {port}"))
    os.environ["MASTER_PORT"] = str(bound.getsockname()[1])
    if isinstance(environment, LightningEnvironment):
        environment._main_port = bound.getsockname()[1]  # it caches the last launch's
    return bound


def check_interface(host: str) -> None:
    """Raise RankConnectionError if gloo, which listens where this host's name leads, can't be reached from `host`."""
    local = _address(socket.gethostname())
    if local.startswith("127.") and not _address(host).startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        fault = f"without it gloo uses {local}, the address of {socket.gethostname()}"
        expected = f"the network interface that leads to the other machines, such as eth0; {fault}"
        raise RankConnectionError("", "GLOO_SOCKET_IFNAME", expected)


def _address(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:  # for this host's name gloo takes the loopback interface, too
        return "127.0.0.1"


def rendezvous(
    method: str | None, address: tuple[str, int], rank: int, world_size: int, timeout: float,
    bound: socket.socket | None = None,
) -> dist.Store:  # fmt: skip
    """Return the store that all ranks share, once all of them have come, in `timeout` seconds.

    The init_methods None and env:// stand for `address`, rank 0's, which may have `bound` a socket to it.

    Raises:
        RankTimeoutError: rank 0 or another is missing.
        ConnectionError: the port or file can't be used, or a rank was started twice.
    """
    deadline = time.monotonic() + timeout
    try:
        store = _connect(method, address, rank, timeout, bound)
        exchange = _TokenExchange(store, rank, world_size, deadline, timeout)
        token = exchange.lead() if rank == 0 else exchange.follow()
    except dist.DistError:
        expected = "rank 0 to stay until all ranks have come; it has gone"
        raise RankConnectionError("timeout", f"{timeout:g}", expected) from None
    return dist.PrefixStore(f"rendezvous/{token}", store)


def _connect(
    method: str | None, address: tuple[str, int], rank: int, timeout: float, bound: socket.socket | None
) -> dist.Store:
    parts = urlsplit(method or "")
    if parts.scheme == "file":
        path = Path(parts.path)
        if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise RankConnectionError("init_method", method, "a file that can be written, in a folder that is there")
        return dist.FileStore(str(path), -1)  # -1: never removed, so that no late rank can lose it
    (host, port), where = address, ("", f"MASTER_ADDR {address[0]} MASTER_PORT {address[1]}")
    if parts.scheme == "tcp":
        host, port, where = str(parts.hostname), int(parts.port or 0), ("init_method", str(method))
    agent = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and agent == (host, str(port))
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
    if rank > 0 or served_by_agent:
        _wait_for_server(host, port, where, timeout)
        return dist.TCPStore(host, port, is_master=False, **options)
    fd = bind(host, port, where).detach() if bound is None else os.dup(bound.fileno())
    # Rank 0 connects to itself: a name need not resolve. Others in this process, such as RPC, can share the port.
    return dist.TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True, master_listen_fd=fd, **options)


def _wait_for_server(host: str, port: int, where: tuple[str, str], timeout: float) -> None:
    """Wait until rank 0 listens; torch's client would log many lines meanwhile."""
    deadline, why = time.monotonic() + timeout, "nobody did"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
            return
        except OSError as error:
            why = str(error.strerror) if isinstance(error, socket.gaierror) else "nobody did"
        time.sleep(min(CONNECT_INTERVAL, max(left, 0)))
    raise RankTimeoutError(*where, f"rank 0 to answer there within {timeout:g} s, the timeout; {why}")


@dataclass
class _TokenExchange:
    store: Any  # a dist.Store, whose hints know no bytes
    rank: int
    world_size: int
    deadline: float
    timeout: float

    def lead(self) -> str:
        """Give the token to each request, until all ranks are here: rank 0's part. Old requests have no reader."""
        token, answered = secrets.token_hex(8), set[str]()
        missing = list(range(1, self.world_size))
        error: OSError | None = None
        while missing and error is None:
            time.sleep(POLL_INTERVAL)
            for rank in range(1, self.world_size):
                request = self._get(f"request/{rank}")
                if request is not None and request not in answered:
                    answered.add(request)
                    self.store.set(f"answer/{request}", token)
            starts = {rank: int(self._get(f"here/{token}/{rank}") or 0) for rank in range(1, self.world_size)}
            missing = [rank for rank, count in starts.items() if not count]
            if twice := [rank for rank, count in starts.items() if count > 1]:
                error = ConnectionError(self._twice(twice[0]))
            elif missing and time.monotonic() > self.deadline:
                late = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} have"
                expected = f"{self.world_size} ranks within that time; {late} not come"
                error = RankTimeoutError("timeout", f"{self.timeout:g}", expected)
        self.store.set(f"outcome/{token}", pickle.dumps(error))
        if error is not None:
            time.sleep(GRACE)
            raise error
        return token

    def follow(self) -> str:
        """Ask for the token, count this rank, and wait for all: every other rank's part."""
        request = secrets.token_hex(8)
        while (token := self._get(f"answer/{request}")) is None:
            if self._get(f"request/{self.rank}") != request:
                self.store.set(f"request/{self.rank}", request)  # again, if another process of this rank replaced it
            self._wait(self.deadline)
        if self.store.add(f"here/{token}/{self.rank}", 1) > 1:  # the first one may be training already
            raise StartedTwiceError(self._twice(self.rank))
        while not self.store.check([f"outcome/{token}"]):
            self._wait(self.deadline + 2 * GRACE)  # rank 0 knows who is missing
        if (error := pickle.loads(self.store.get(f"outcome/{token}"))) is not None:
            raise error
        return token

    def _get(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _wait(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            expected = "an answer of rank 0 within that time; it has not come, or has all its ranks"
            raise RankTimeoutError("timeout", f"{self.timeout:g}", expected)
        time.sleep(POLL_INTERVAL)

    def _twice(self, rank: int) -> str:
        return f"rank {rank}: expected each of the {self.world_size} ranks once; this one was started twice"
