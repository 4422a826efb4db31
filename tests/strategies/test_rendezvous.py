"""Rank 0's store needs no name, and gloo's network interface is checked where ranks are on several hosts."""

import socket

import pytest

from strategies.base import rendezvous


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
