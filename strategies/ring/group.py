"""What torch.distributed calls: a process group in Python, and its entry among the backends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from strategies.ring import algorithms
from strategies.ring.links import OWN, TAG, Links
from strategies.ring.queue import Collective, Queue
from strategies.ring.reductions import Reduction, reduction

NAME = "ring"
UNCHUNKED = "ring_unchunked"
Options = Any  # torch's AllreduceOptions and the like
ProcessGroup: Any = (
    dist.ProcessGroup
)  # its methods have overloads and older names, which differ from version to version


class RingGroup(ProcessGroup):
    """The ranks of a group, whose collectives are those of `algorithms`, over gloo's send and recv.

    Method names and arguments are those by which torch calls it: the older ones of 2.11 stand beside the newer ones.

    Args:
        store: where the ranks find each other.
        rank: this one's number in the group.
        size: how many there are.
        timeout: how long to wait for a message.

    Attributes:
        links: to the other ranks.
    """

    name_of_backend = NAME

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        messenger = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, size, timeout)
        self._messenger = cast("Any", messenger)  # its messages are not in torch's type hints
        self.links = Links(self._messenger, rank, size)
        self._queue = Queue()
        self._timeout = OWN
        self._group_name = ""

    # About it

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """Its name."""
        return self.name_of_backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name that torch finds it by."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """That name."""
        return self._group_name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def _get_backend(self, device: torch.device) -> Any:
        """What torch asks whether messages can be joined: they can't."""
        return self._messenger

    def set_timeout(self, timeout: timedelta) -> None:
        """Wait for so long from now on."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the thread."""
        self._queue.close()

    abort = shutdown

    # Messages

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Gloo's own."""
        return self._messenger.send(tensors, dst, _users(tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Gloo's own."""
        return self._messenger.recv(tensors, src, _users(tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Gloo's own."""
        return self._messenger.recv_anysource(tensors, _users(tag))

    recvAnysource = recv_anysource  # noqa: N815

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> dist.Work:
        """Every tensor combined over the ranks, in place."""
        found = reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors[0])

        def run() -> None:
            with flat(tensors) as xs:
                for x in xs:
                    self._all_reduce(self.links, x, found.combine)
                    self._finish(x, found)

        return self._add("all_reduce", run, tensors, opts)

    allreduce_coalesced = allreduce
    _all_reduce = staticmethod(algorithms.all_reduce)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> dist.Work:
        """The root's tensors, in place."""

        def run() -> None:
            with flat(tensors) as xs:
                for x in xs:
                    algorithms.broadcast(self.links, x, opts.rootRank)

        return self._add("broadcast", run, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Options) -> dist.Work:
        """The tensor combined over the ranks, in place of the root's."""
        found = reduction(opts.reduceOp, tensors[0])

        def run() -> None:
            with flat(tensors) as (x,):
                algorithms.reduce(self.links, x, found.combine, opts.rootRank)
                if self.links.rank == opts.rootRank:
                    self._finish(x, found)

        return self._add("reduce", run, tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        """Each rank's tensor."""
        (parts,), (own,) = outputs, inputs
        self._check("all_gather", parts, own)

        def run() -> None:
            parts[self.links.rank].copy_(own)
            with flat(parts) as chunks:
                algorithms.all_gather(self.links, chunks)

        return self._add("all_gather", run, parts, opts, inputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        """Each rank's tensors: `outputs[rank][i]`."""
        for own, *parts in zip(inputs, *outputs, strict=True):
            self._check("all_gather", parts, own)

        def run() -> None:
            for own, *parts in zip(inputs, *outputs, strict=True):
                parts[self.links.rank].copy_(own)
                with flat(parts) as chunks:
                    algorithms.all_gather(self.links, chunks)

        return self._add("all_gather", run, [x for parts in outputs for x in parts], opts, inputs)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> dist.Work:
        """Each rank's tensors, one after the other in each output."""
        for whole, own in zip(outputs, inputs, strict=True):
            self._check("all_gather_into_tensor", [whole], own, self.links.size)

        def run() -> None:
            with flat(outputs) as wholes:
                for whole, own in zip(wholes, inputs, strict=True):
                    chunks = whole.tensor_split(self.links.size)
                    chunks[self.links.rank].copy_(own.flatten())
                    algorithms.all_gather(self.links, chunks)

        return self._add("all_gather_into_tensor", run, outputs, opts, inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Options = None) -> dist.Work:
        """Each rank's tensor, one after the other."""
        return self.all_gather_single_coalesced([output], [own], opts)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> dist.Work:
        """The inputs' part of this rank's number, combined over the ranks."""
        (output,), (parts,) = outputs, inputs
        found = reduction(opts.reduceOp, output)
        self._check("reduce_scatter", parts, output)

        def run() -> None:
            self._reduce_scatter(output, [part.flatten().clone() for part in parts], found)

        return self._add("reduce_scatter", run, outputs, opts, parts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options) -> dist.Work:
        """The part of each input that has this rank's number, combined over the ranks."""
        found = reduction(opts.reduceOp, outputs[0])
        for output, x in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter_tensor", [x], output, self.links.size)

        def run() -> None:
            for output, x in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, x.flatten().clone().tensor_split(self.links.size), found)

        return self._add("reduce_scatter_tensor", run, outputs, opts, inputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Options) -> dist.Work:
        """The input's part of this rank's number, combined over the ranks."""
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, chunks: Sequence[Tensor], found: Reduction) -> None:
        algorithms.reduce_scatter(self.links, chunks, found.combine)
        mine = chunks[self.links.rank]
        self._finish(mine, found)
        output.copy_(mine.view_as(output))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> dist.Work:
        """Each rank's tensor, on the root."""
        parts = outputs[0] if outputs else []
        self._check("gather", parts, inputs[0])

        def run() -> None:
            with flat(inputs) as (own,), flat(parts) as chunks:
                algorithms.gather(self.links, own, chunks, opts.rootRank)

        return self._add("gather", run, parts, opts, inputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> dist.Work:
        """The root's part of this rank's number."""
        parts = inputs[0] if inputs else []
        self._check("scatter", parts, outputs[0])

        def run() -> None:
            with flat(outputs) as (own,), flat(parts) as chunks:
                algorithms.scatter(self.links, own, chunks, opts.rootRank)

        return self._add("scatter", run, outputs, opts, parts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        """A part from each rank."""
        self._check("all_to_all", [outputs[self.links.rank]], inputs[self.links.rank])

        def run() -> None:
            with flat(outputs) as received, flat(inputs) as parts:
                algorithms.all_to_all(self.links, received, parts)

        return self._add("all_to_all", run, outputs, opts, inputs)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options = None
    ) -> dist.Work:
        """A part from each rank, one after the other; sizes count rows, and none stand for equal ones."""
        coming, leaving = self._numbers(output, output_sizes), self._numbers(x, input_sizes)
        if coming[self.links.rank] != leaving[self.links.rank] or output.dtype != x.dtype:
            raise ValueError("backend ring: expected the part that stays here to have one size in all_to_all_single")

        def run() -> None:
            with flat([output]) as (whole,), flat([x]) as (own,):
                algorithms.all_to_all(self.links, whole.split(coming), own.split(leaving))

        return self._add("all_to_all_single", run, [output], opts, [x])

    alltoall_base = all_to_all_single

    def _numbers(self, x: Tensor, rows: Sequence[int]) -> list[int]:
        """How many numbers each part has."""
        row = x.numel() // max(len(x), 1)
        counts = rows or [len(x) // self.links.size] * self.links.size
        if sum(counts) != len(x):
            raise ValueError(f"backend ring: expected {len(x)} rows in all for all_to_all_single, got {sum(counts)}")
        return [count * row for count in counts]

    def barrier(self, opts: Options = None) -> dist.Work:
        """Done when all ranks have called it."""
        return self._add("barrier", partial(algorithms.barrier, self.links), [], opts)

    # Running

    def _check(self, name: str, parts: Sequence[Tensor], own: Tensor, share: int = 1) -> None:
        """Raise ValueError where a part is not of a rank's size, so many times, and type: messages carry neither."""
        for part in parts:
            if part.numel() != share * own.numel() or part.dtype != own.dtype:
                expected = f"expected {share * own.numel()} x {own.dtype} for {name}"
                raise ValueError(f"backend ring: {expected}, got {part.numel()} x {part.dtype}")

    def _add(
        self, name: str, run: Callable[[], None], outputs: list[Tensor], opts: Options, inputs: Sequence[Tensor] = ()
    ) -> dist.Work:
        for x in (*outputs, *inputs):
            if x.device.type != "cpu" or x.layout != torch.strided:
                raise ValueError(
                    f"backend ring: expected dense tensors on a CPU for {name}, got {x.layout} on {x.device}"
                )
        timeout = self._timeout if opts is None or opts.timeout < OWN else opts.timeout

        def within_time() -> None:
            self.links.timeout = timeout
            run()

        collective = Collective(name, within_time, outputs)
        if torch.autograd._profiler_enabled():  # a profile shows it from its call to its end, as it shows gloo's
            with record_function(f"ring:{name}") as span:
                span._call_end_callbacks_on_future(collective.get_future())
        return self._queue.add(collective, at_once=opts is not None and not opts.asyncOp)

    def _finish(self, x: Tensor, found: Reduction) -> None:
        if found.averages:
            x.div_(self.links.size)


class UnchunkedGroup(RingGroup):
    """The tutorial's ring, to compare with."""

    name_of_backend = UNCHUNKED
    _all_reduce = staticmethod(algorithms.unchunked_all_reduce)


@contextmanager
def flat(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat, contiguous views of tensors, or copies that are copied back at the end."""
    xs = [x.contiguous().view(-1) for x in tensors]
    yield xs
    for tensor, x in zip(tensors, xs, strict=True):
        if tensor.data_ptr() != x.data_ptr():
            tensor.copy_(x.view(tensor.shape))


def _users(tag: int) -> int:
    if tag == TAG:
        raise ValueError(f"tag {tag}: expected a smaller one, as collectives use it")
    return tag


def register() -> None:
    """Put `ring` and `ring_unchunked` among the backends that `init_process_group` and `new_group` know."""
    for group in (RingGroup, UnchunkedGroup):
        if group.name_of_backend not in dist.Backend.backend_list:
            dist.Backend.register_backend(group.name_of_backend, group, devices=["cpu"])
