"""The collectives as messages between two ranks, and the reductions of two tensors to one.

All n ranks call a function at the same time, with flat, contiguous tensors of the same sizes. N is the size of the
whole data in bytes; the figures are the bytes that one rank sends. Large tensors are sent in pieces, so that a rank
adds or forwards one piece while the next is on its way.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apprentice.errors import BadInput

Combine = Callable[[Tensor, Tensor], object]  # adds the second to the first, or the like
PIECE = 2**20  # bytes: a few fit into a core's cache, and a message's overhead is small
AHEAD = 3  # pieces on their way to a rank before it has combined one
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


def all_reduce(links: Links, x: Tensor, combine: Combine) -> None:
    """Combine `x` of all ranks on all ranks: 2 (n - 1) / n N (Patarasu and Yuan 2009).

    Each chunk goes around the ring once to be combined, and once more to be copied.
    """
    chunks = x.tensor_split(links.size)
    reduce_scatter(links, chunks, combine)
    all_gather(links, chunks)


def unchunked_all_reduce(links: Links, x: Tensor, combine: Combine) -> None:
    """Reduce as the distributed tutorial does: all of every rank's data goes around the ring: (n - 1) N."""
    passing, arriving = x.clone(), torch.empty_like(x)
    for _ in range(links.size - 1):
        wait_all([links.receive(arriving, links.previous), links.send(passing, links.next)])
        combine(x, arriving)
        passing, arriving = arriving, passing


def reduce_scatter(links: Links, chunks: Sequence[Tensor], combine: Combine) -> None:
    """Combine `chunks[rank]` of all ranks; overwrites the other chunks: (n - 1) / n N.

    Chunk c starts on rank c + 1, each rank adds its part, and it ends on rank c.
    """
    largest = max(chunks, key=len)
    buffers = [largest.new_empty(len(_pieces(largest)[0])) for _ in range(AHEAD)]
    for step in range(links.size - 1):
        leaving, coming = (chunks[(links.rank - step - back) % links.size] for back in (1, 2))
        sends = [links.send(piece, links.next) for piece in _pieces(leaving)]
        local = _pieces(coming)
        received = [buffers[i % AHEAD][: len(piece)] for i, piece in enumerate(local)]
        receives = [links.receive(piece, links.previous) for piece in received[:AHEAD]]
        for i, (piece, other) in enumerate(zip(local, received, strict=True)):
            receives[i].wait()
            combine(piece, other)
            if i + AHEAD < len(received):  # into the buffer that is free now
                receives.append(links.receive(received[i + AHEAD], links.previous))
        wait_all(sends)


def all_gather(links: Links, chunks: Sequence[Tensor]) -> None:
    """Send `chunks[rank]` of each rank to all ranks: (n - 1) / n N of all chunks."""
    for step in range(links.size - 1):
        leaving, coming = (chunks[(links.rank - step - back) % links.size] for back in (0, 1))
        messages = [links.receive(piece, links.previous) for piece in _pieces(coming)]
        messages += [links.send(piece, links.next) for piece in _pieces(leaving)]
        wait_all(messages)


def broadcast(links: Links, x: Tensor, root: int) -> None:
    """Send the root's `x` to all ranks, along a chain: N, but nothing from its last rank."""
    place = (links.rank - root) % links.size  # in the chain
    pieces = _pieces(x)
    coming = [links.receive(piece, links.previous) for piece in pieces] if place > 0 else []
    sends = []
    for i, piece in enumerate(pieces):
        wait_all(coming[i : i + 1])
        if place < links.size - 1:
            sends.append(links.send(piece, links.next))
    wait_all(sends)


def reduce(links: Links, x: Tensor, combine: Combine, root: int) -> None:
    """Combine `x` of all ranks on the root, along a chain that ends there: N, but nothing from the root."""
    place = (links.rank - root - 1) % links.size
    pieces = _pieces(x)
    theirs = _pieces(torch.empty_like(x)) if place > 0 else []
    coming = [links.receive(piece, links.previous) for piece in theirs]
    sends = []
    for i, piece in enumerate(pieces):
        wait_all(coming[i : i + 1])
        if place > 0:
            combine(theirs[i], piece)
        combined = theirs[i] if place > 0 else piece
        if links.rank == root:
            piece.copy_(combined)
        else:
            sends.append(links.send(combined, links.next))
    wait_all(sends)


def gather(links: Links, x: Tensor, parts: Sequence[Tensor], root: int) -> None:
    """Send each rank's `x` to the root, into `parts`; other ranks have no parts."""
    if links.rank == root:
        parts[root].copy_(x)
        wait_all([links.receive(part, rank) for rank, part in enumerate(parts) if rank != root])
    else:
        links.send(x, root).wait()


def scatter(links: Links, x: Tensor, parts: Sequence[Tensor], root: int) -> None:
    """Send the root's `parts[rank]` to each rank, into `x`."""
    if links.rank == root:
        x.copy_(parts[root])
        wait_all([links.send(part, rank) for rank, part in enumerate(parts) if rank != root])
    else:
        links.receive(x, root).wait()


def all_to_all(links: Links, received: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Send `parts[r]` to each rank r, into `received[rank]`; each rank starts with its neighbour."""
    received[links.rank].copy_(parts[links.rank])
    messages = []
    for distance in range(1, links.size):
        before, after = (links.rank - distance) % links.size, (links.rank + distance) % links.size
        messages += [links.receive(received[before], before), links.send(parts[after], after)]
    wait_all(messages)


def barrier(links: Links) -> None:
    """Return when all ranks have called it: a byte to one rank in each of log2(n) rounds (Hensgen et al. 1988).

    After the round of distance d a rank knows that the 2 d - 1 ranks before it are here.
    """
    sent, received = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    distance = 1
    while distance < links.size:
        before, after = (links.rank - distance) % links.size, (links.rank + distance) % links.size
        wait_all([links.receive(received, before), links.send(sent, after)])
        distance *= 2


class Reduction(NamedTuple):
    """One of torch's; one that averages divides the result by the number of ranks."""

    combine: Combine
    averages: bool = False


REDUCTIONS = {
    dist.ReduceOp.SUM: Reduction(Tensor.add_),
    dist.ReduceOp.AVG: Reduction(Tensor.add_, averages=True),
    dist.ReduceOp.PRODUCT: Reduction(Tensor.mul_),
    dist.ReduceOp.MAX: Reduction(lambda x, y: torch.maximum(x, y, out=x)),
    dist.ReduceOp.MIN: Reduction(lambda x, y: torch.minimum(x, y, out=x)),
    dist.ReduceOp.BAND: Reduction(Tensor.bitwise_and_),
    dist.ReduceOp.BOR: Reduction(Tensor.bitwise_or_),
    dist.ReduceOp.BXOR: Reduction(Tensor.bitwise_xor_),
}


def reduction(op: object, dtype: torch.dtype) -> Reduction:
    """Return the reduction for an operation of torch's; BadInput if only NCCL has it, or not for this type.

    It fails before any message is sent, which the next collective would receive.
    """
    known = next((known for known in REDUCTIONS if op == known), None)
    if known is None:
        raise BadInput("backend", "ring", f"one of the operations {', '.join(op.name for op in REDUCTIONS)}")
    result = REDUCTIONS[known]
    try:
        if result.averages and not (dtype.is_floating_point or dtype.is_complex):
            raise RuntimeError("integers have no mean of their type")
        result.combine(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))
    except RuntimeError as error:  # NotImplementedError is one
        raise BadInput("backend", "ring", f"another operation than {known.name} for {dtype}: {error}") from None
    return result


def _pieces(x: Tensor) -> Sequence[Tensor]:
    return x.split(max(1, PIECE // x.element_size()))
