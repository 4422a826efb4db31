"""Messages from one rank to another."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

TAG = 2**31 - 1  # of a collective's messages; the smaller ones are the user's
OWN = timedelta(0)  # waits for as long as the messenger itself does


class Messenger(Protocol):
    """What carries messages: gloo's process group, or anything that has its calls."""

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803 - torch's names
        """Begin to send; returns what can be waited for."""

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803
        """Begin to receive; returns what can be waited for."""


class Message:
    """One that is under way.

    Args:
        work: of the messenger; None for one without content, which is not sent.
        timeout: how long to wait for it.
    """

    def __init__(self, work: dist.Work | None, timeout: timedelta) -> None:
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        """Return when the tensor has been received, or may be changed again.

        Raises:
            RuntimeError: it has not within the time, or the other rank has gone.
        """
        if self._work is not None:
            self._work.wait(self._timeout)


class Links:
    """A rank's links to the others of a group, of which the next and the one before are its neighbours in the ring.

    Messages from one rank to another arrive in the order in which they were sent.

    Args:
        messenger: carries them.
        rank: this one's number in the group.
        size: how many there are.

    Attributes:
        sent: bytes that this rank has sent so far.
        timeout: how long to wait for a message; 0 for as long as the messenger does.
    """

    def __init__(self, messenger: Messenger, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = 0
        self.timeout = OWN
        self._messenger = messenger

    @property
    def next(self) -> int:
        """The rank that this one sends to in a ring."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """The rank that this one receives from in a ring."""
        return (self.rank - 1) % self.size

    def send(self, x: Tensor, to: int) -> Message:
        """Begin to send a contiguous tensor, which must not change before it has gone."""
        self.sent += x.nbytes
        return Message(self._messenger.send([x], to, TAG) if x.numel() else None, self.timeout)

    def receive(self, x: Tensor, source: int) -> Message:
        """Begin to receive into a contiguous tensor, which must not be used before it is there."""
        return Message(self._messenger.recv([x], source, TAG) if x.numel() else None, self.timeout)


def arrived(messages: Iterable[Message]) -> None:
    """Wait for all of them."""
    for message in messages:
        message.wait()
