"""The stores in which ranks find each other: in a file, or served by rank 0, or by torchrun, at an address."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist

FLAG = "--trainer.strategy.init_method"
BY_ENVIRONMENT = {None, "env://"}  # MASTER_ADDR and MASTER_PORT say where
SHAPES = "expected env://, tcp://HOST:PORT or file:///PATH"
PAUSE = 0.2  # seconds between two attempts to connect


def check(method: str | None) -> None:
    """Raise ValueError where an init_method is none of env://, tcp://HOST:PORT and file:///PATH."""
    if method is None or method in BY_ENVIRONMENT:
        return
    try:
        parts = urlsplit(method)
        fits = {"tcp": bool(parts.hostname and parts.port), "file": not parts.netloc and len(parts.path) > 1}
    except ValueError:  # a port that is no number, or too large
        fits = {}
    if not fits.get(method.partition("://")[0], False):
        raise ValueError(f"init_method {method}: {SHAPES}")


def listen(host: str, port: int = 0, where: str = "") -> socket.socket:
    """A socket that listens on a port, on any free one for 0; held from now on, no other process can take it.

    Raises:
        ConnectionError: the port can't be had; the message begins with `where`.
    """
    local = host in {"127.0.0.1", "localhost"}
    dual = not local and socket.has_dualstack_ipv6()
    listening = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        if dual:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if port:  # connections of a run that has just ended don't keep the next one out
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host if local else "", port))
        listening.listen(4096)
    except OSError as error:
        listening.close()
        raise ConnectionError(f"{where}: expected a port that is free; {os.strerror(error.errno or 0)}") from None
    return listening


def reach(
    method: str | None, address: tuple[str, int], rank: int, timeout: float, listening: socket.socket | None = None
) -> dist.Store:
    """The store that an init_method stands for; what others have left in it is there, too.

    Args:
        method: an init_method; None and env:// stand for `address`.
        address: host and port of rank 0, as the launcher tells them.
        rank: of this process.
        timeout: seconds in which rank 0 has to answer.
        listening: rank 0's socket, where it has one already.

    Raises:
        TimeoutError: nobody answers.
        ConnectionError: the port or the file can't be used.
    """
    if method is None or method in BY_ENVIRONMENT:
        return _tcp(address, f"MASTER_ADDR {address[0]} MASTER_PORT {address[1]}", rank, timeout, listening)
    parts = urlsplit(method)
    if parts.scheme == "file":
        return _file(method, Path(parts.path))
    return _tcp((str(parts.hostname), int(parts.port or 0)), f"{FLAG} {method}", rank, timeout, None)


def _file(method: str, path: Path) -> dist.Store:
    if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConnectionError(f"{FLAG} {method}: expected a file that can be written, in a folder that is there")
    return dist.FileStore(str(path), -1)  # -1: it is never removed, so no late rank can lose it


def _tcp(
    address: tuple[str, int], where: str, rank: int, timeout: float, listening: socket.socket | None
) -> dist.TCPStore:
    """Rank 0 serves, unless torchrun does; the others are let in as soon as it listens."""
    host, port = address
    serves = rank == 0 and not _served_by_agent(address)
    if not serves:
        _await(address, where, timeout)
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    own = listening or listen(host, port, where)
    _use_interface(host)
    return dist.TCPStore(
        "127.0.0.1" if listening is None else host,  # this process itself: a name need not resolve
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,  # others in this process, as RPC, can share the port
        master_listen_fd=os.dup(own.fileno()),
    )


def _served_by_agent(address: tuple[str, int]) -> bool:
    given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and given == (address[0], str(address[1]))


def _await(address: tuple[str, int], where: str, timeout: float) -> None:
    """Wait until someone listens there; torch's own client complains in many lines meanwhile."""
    deadline, why = time.monotonic() + timeout, "nobody did"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=left) as connection:
                _use_interface(connection.getsockname()[0])
                return
        except socket.gaierror as error:
            why = str(error.strerror)
        except OSError:
            why = "nobody did"
        time.sleep(min(PAUSE, max(left, 0)))
    limit = f"within {timeout:g} s (--trainer.strategy.timeout)"
    raise TimeoutError(f"{where}: expected rank 0 to answer there {limit}; {why}")


def _use_interface(address: str) -> None:
    """Have gloo use the network interface that leads to rank 0: left to itself it may take the loopback one."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        import fcntl

        mine = socket.inet_aton(socket.gethostbyname(address))
    except (ImportError, OSError):  # on Windows, or with IPv6 alone: gloo's own choice
        return
    get_address = 0x8915  # SIOCGIFADDR
    for _, name in socket.if_nameindex() if mine[0] != 127 else []:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                found = fcntl.ioctl(any_socket, get_address, name.encode().ljust(256, b"\0"))
            except OSError:  # it has no address
                continue
        if found[20:24] == mine:
            os.environ["GLOO_SOCKET_IFNAME"] = name
