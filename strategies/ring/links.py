"""Messages between two ranks."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

TAG = 2**31 - 1  # of a collective's messages; smaller ones are the user's
MESSENGERS_TIMEOUT = timedelta(0)  # wait for as long as the messenger itself does


class Message(NamedTuple):
    """A message on its way; an empty one is not sent, and has no work."""

    work: dist.Work | None
    timeout: timedelta

    def wait(self) -> None:
        """Wait until the tensor has been received, or may be changed again; RuntimeError if the other rank fails."""
        if self.work is not None:
            self.work.wait(self.timeout)


class Links:
    """A rank's links to the others of a group; in the ring, its neighbours are the next rank and the previous one.

    Messages from one rank to another arrive in the order in which they were sent. The messenger is gloo's process
    group, or an object with its `send` and `recv`. `sent` counts the bytes that this rank has sent.
    """

    def __init__(self, messenger: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.next, self.previous = (rank + 1) % size, (rank - 1) % size
        self.sent, self.timeout = 0, MESSENGERS_TIMEOUT
        self._messenger = messenger

    def send(self, x: Tensor, to: int) -> Message:
        """Start to send a contiguous tensor, which must not change until then."""
        self.sent += x.nbytes
        return Message(self._messenger.send([x], to, TAG) if x.numel() else None, self.timeout)

    def receive(self, x: Tensor, source: int) -> Message:
        """Start to receive into a contiguous tensor."""
        return Message(self._messenger.recv([x], source, TAG) if x.numel() else None, self.timeout)


def wait_all(messages: Iterable[Message]) -> None:
    """Wait for all of them."""
    for message in messages:
        message.wait()
