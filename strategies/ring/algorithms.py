"""The collectives, over messages: what each rank sends to whom.

Each function is called by all n ranks of the links at the same time, with flat, contiguous tensors of the same sizes.
"N" is the size of the whole data in bytes; the figures are what one rank sends.

Large tensors travel in pieces, so that a rank adds up or passes on one piece while the next is under way.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strategies.ring.links import Links, arrived

Combine = Callable[[Tensor, Tensor], object]  # changes the first: adds the second to it, or the like
PIECE = 2**20  # bytes: a few fit into a core's own cache, and the cost of a message is small beside that of its content
AHEAD = 3  # pieces that may be under way to a rank before it has combined one


def all_reduce(links: Links, x: Tensor, combine: Combine) -> None:
    """`x` of all ranks combined, on all ranks: 2 (n - 1) / n N (Patarasu and Yuan 2009).

    Each chunk travels once around the ring and is combined on its way, then once more, as it is.
    """
    chunks = x.tensor_split(links.size)
    reduce_scatter(links, chunks, combine)
    all_gather(links, chunks)


def unchunked_all_reduce(links: Links, x: Tensor, combine: Combine) -> None:
    """The same as the distributed tutorial has it: the whole of every rank's data goes around the ring: (n - 1) N."""
    passing, arriving = x.clone(), torch.empty_like(x)
    for _ in range(links.size - 1):
        arrived([links.receive(arriving, links.previous), links.send(passing, links.next)])
        combine(x, arriving)
        passing, arriving = arriving, passing


def reduce_scatter(links: Links, chunks: Sequence[Tensor], combine: Combine) -> None:
    """`chunks[rank]` of all ranks combined; the other chunks are used up: (n - 1) / n N.

    Chunk c starts on rank c + 1, and each rank that it comes to adds its own part; it ends on rank c.
    """
    buffers = _buffers(chunks, links)
    for step in range(links.size - 1):
        leaving, coming = (chunks[(links.rank - step - back) % links.size] for back in (1, 2))
        sent = [links.send(piece, links.next) for piece in _pieces(leaving)]
        own = _pieces(coming)
        theirs = [buffers[i % AHEAD][: len(piece)] for i, piece in enumerate(own)]
        messages = [links.receive(piece, links.previous) for piece in theirs[:AHEAD]]
        for i, (mine, piece) in enumerate(zip(own, theirs, strict=True)):
            messages[i].wait()
            combine(mine, piece)
            if i + AHEAD < len(theirs):  # into the buffer that has become free
                messages.append(links.receive(theirs[i + AHEAD], links.previous))
        arrived(sent)


def all_gather(links: Links, chunks: Sequence[Tensor]) -> None:
    """`chunks[r]` of each rank r, on all ranks; at first `chunks[rank]` is there: (n - 1) / n N of all chunks."""
    for step in range(links.size - 1):
        leaving, coming = (chunks[(links.rank - step - back) % links.size] for back in (0, 1))
        messages = [links.receive(piece, links.previous) for piece in _pieces(coming)]
        messages += [links.send(piece, links.next) for piece in _pieces(leaving)]
        arrived(messages)


def broadcast(links: Links, x: Tensor, root: int) -> None:
    """The root's `x`, on all ranks: N, down a chain along the ring, but nothing on its last rank."""
    place = (links.rank - root) % links.size  # in the chain
    pieces = _pieces(x)
    coming = [links.receive(piece, links.previous) for piece in pieces] if place > 0 else []
    sent = []
    for i, piece in enumerate(pieces):
        arrived(coming[i : i + 1])
        if place < links.size - 1:
            sent.append(links.send(piece, links.next))
    arrived(sent)


def reduce(links: Links, x: Tensor, combine: Combine, root: int) -> None:
    """`x` of all ranks combined, on the root; others keep theirs: N along a chain that ends there, the root nothing."""
    place = (links.rank - root - 1) % links.size
    pieces = _pieces(x)
    theirs = _pieces(torch.empty_like(x)) if place > 0 else []
    coming = [links.receive(piece, links.previous) for piece in theirs]
    sent = []
    for i, piece in enumerate(pieces):
        arrived(coming[i : i + 1])
        if links.rank == root:
            for other in theirs[i : i + 1]:
                combine(piece, other)
        elif place == 0:
            sent.append(links.send(piece, links.next))
        else:
            combine(theirs[i], piece)
            sent.append(links.send(theirs[i], links.next))
    arrived(sent)


def gather(links: Links, x: Tensor, parts: Sequence[Tensor], root: int) -> None:
    """Each rank's `x`, on the root in `parts`; others have none: each but the root sends its own to it."""
    if links.rank == root:
        parts[root].copy_(x)
        arrived([links.receive(part, rank) for rank, part in enumerate(parts) if rank != root])
    else:
        links.send(x, root).wait()


def scatter(links: Links, x: Tensor, parts: Sequence[Tensor], root: int) -> None:
    """The root's `parts[rank]`, on each rank in `x`: the root sends all parts but its own."""
    if links.rank == root:
        x.copy_(parts[root])
        arrived([links.send(part, rank) for rank, part in enumerate(parts) if rank != root])
    else:
        links.receive(x, root).wait()


def all_to_all(links: Links, received: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """`parts[r]` to each rank r, where it is `received[rank]`: all parts but its own.

    Rank 0 does not hear from everyone first: each begins with its neighbour, and goes on from there.
    """
    received[links.rank].copy_(parts[links.rank])
    messages = []
    for distance in range(1, links.size):
        before, after = (links.rank - distance) % links.size, (links.rank + distance) % links.size
        messages += [links.receive(received[before], before), links.send(parts[after], after)]
    arrived(messages)


def barrier(links: Links) -> None:
    """Return when all ranks have called it: a byte to one rank in each of log2(n) rounds (Hensgen et al. 1988).

    After the round of distance d a rank knows of the 2 d - 1 ranks before it that they are here.
    """
    sent, received = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    distance = 1
    while distance < links.size:
        before, after = (links.rank - distance) % links.size, (links.rank + distance) % links.size
        arrived([links.receive(received, before), links.send(sent, after)])
        distance *= 2


def _pieces(x: Tensor) -> Sequence[Tensor]:
    return x.split(max(1, PIECE // x.element_size()))


def _buffers(chunks: Sequence[Tensor], links: Links) -> list[Tensor]:
    """Where pieces arrive that are then combined with a rank's own."""
    if links.size == 1:
        return []
    largest = max(chunks, key=len)
    size = len(_pieces(largest)[0])
    return [largest.new_empty(size) for _ in range(AHEAD)]
