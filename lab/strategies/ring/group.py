"""The process group `ring`, and its registration as a backend of torch.distributed."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from apprentice.errors import BadInput
from lab.strategies.ring import algorithms
from lab.strategies.ring.algorithms import MESSENGERS_TIMEOUT, TAG, Links, Reduction, reduction
from lab.strategies.ring.queue import Collective, Queue

NAME = "ring"
UNCHUNKED = "ring_unchunked"
Tensors = list[Tensor]
Options = Any  # torch's AllreduceOptions and the like
ProcessGroup: Any = dist.ProcessGroup  # its methods have overloads and older names, which differ between versions
Run = Callable[[Tensors, Tensors], None]  # a collective, given its outputs and inputs as flat tensors


class RingGroup(ProcessGroup):
    """A process group over gloo's send and recv, whose collectives run one after the other in a thread.

    torch gives the names and arguments of the methods; the older names of 2.11 stand beside the newer ones.
    """

    name_of_backend = NAME
    _all_reduce = staticmethod(algorithms.all_reduce)

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        # Any, as its messages are not in torch's type hints.
        self._messenger: Any = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, size, timeout)
        self.links = Links(self._messenger, rank, size)
        self._queue, self._timeout, self._group_name = Queue(), MESSENGERS_TIMEOUT, ""

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return self.name_of_backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def _get_backend(self, device: torch.device) -> Any:
        """Return the group that torch asks whether messages can be joined: gloo's can't."""
        return self._messenger

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._queue.close()

    abort = shutdown

    # Messages are gloo's

    def send(self, tensors: Tensors, dst: int, tag: int) -> dist.Work:
        return self._messenger.send(tensors, dst, _check_tag(tag))

    def recv(self, tensors: Tensors, src: int, tag: int) -> dist.Work:
        return self._messenger.recv(tensors, src, _check_tag(tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        return self._messenger.recv_anysource(tensors, _check_tag(tag))

    recvAnysource = recv_anysource  # noqa: N815

    # Collectives

    def allreduce(self, tensors: Tensors, opts: Options = None) -> dist.Work:
        op = reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors[0].dtype)

        def run(xs: Tensors, _: Tensors) -> None:
            for x in xs:
                self._all_reduce(self.links, x, op.combine)
                self._finish(x, op)

        return self._add("all_reduce", run, tensors, [], opts)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Options) -> dist.Work:
        return self._add(
            "broadcast", lambda xs, _: algorithms.broadcast(self.links, xs[0], opts.rootRank), tensors, [], opts
        )

    def reduce(self, tensors: Tensors, opts: Options) -> dist.Work:
        op = reduction(opts.reduceOp, tensors[0].dtype)

        def run(xs: Tensors, _: Tensors) -> None:
            algorithms.reduce(self.links, xs[0], op.combine, opts.rootRank)
            if self.links.rank == opts.rootRank:
                self._finish(xs[0], op)

        return self._add("reduce", run, tensors, [], opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Options = None) -> dist.Work:
        """Gather each rank's tensors into `outputs[rank][i]`; a single one's into `outputs[0][rank]`."""
        parts = [x for of_rank in outputs for x in of_rank]
        for i, x in enumerate(inputs):
            self._check("all_gather", parts[i :: len(inputs)], x)

        def run(parts: Tensors, inputs: Tensors) -> None:
            for i, x in enumerate(inputs):
                chunks = parts[i :: len(inputs)]
                chunks[self.links.rank].copy_(x)
                algorithms.all_gather(self.links, chunks)

        return self._add("all_gather", run, parts, inputs, opts)

    allgather = allgather_coalesced

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:
        """Gather each rank's tensors, one after the other in each output."""
        for output, x in zip(outputs, inputs, strict=True):
            self._check("all_gather_into_tensor", [output], x, self.links.size)
        chunks = (output.detach().view(-1).tensor_split(self.links.size) for output in outputs)
        return self.allgather_coalesced([[*of_rank] for of_rank in zip(*chunks, strict=True)], inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Options = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [x], opts)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options) -> dist.Work:
        self._check("reduce_scatter", inputs[0], outputs[0])
        return self.reduce_scatter_single(outputs[0], torch.stack(inputs[0]), opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Options) -> dist.Work:
        op = reduction(opts.reduceOp, outputs[0].dtype)
        for output, x in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter_tensor", [x], output, self.links.size)

        def run(outputs: Tensors, inputs: Tensors) -> None:
            for output, x in zip(outputs, inputs, strict=True):
                chunks = x.clone().tensor_split(self.links.size)
                algorithms.reduce_scatter(self.links, chunks, op.combine)
                self._finish(output.copy_(chunks[self.links.rank]), op)

        return self._add("reduce_scatter", run, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Options) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Options) -> dist.Work:
        parts = outputs[0] if outputs else []
        self._check("gather", parts, inputs[0])
        return self._add(
            "gather", lambda parts, xs: algorithms.gather(self.links, xs[0], parts, opts.rootRank), parts, inputs, opts
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Options) -> dist.Work:
        parts = inputs[0] if inputs else []
        self._check("scatter", parts, outputs[0])
        return self._add(
            "scatter", lambda xs, ys: algorithms.scatter(self.links, xs[0], ys, opts.rootRank), outputs, parts, opts
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Options = None) -> dist.Work:
        self._check("all_to_all", [outputs[self.links.rank]], inputs[self.links.rank])
        return self._add("all_to_all", partial(algorithms.all_to_all, self.links), outputs, inputs, opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options = None
    ) -> dist.Work:
        """Send each rank its part, and receive one from each; sizes are numbers of rows, equal if there are none."""
        coming, leaving = self._sizes(output, output_sizes), self._sizes(x, input_sizes)
        if coming[self.links.rank] != leaving[self.links.rank]:
            raise BadInput("backend", NAME, "the part that stays here to have one size in all_to_all_single")
        return self.alltoall([*output.detach().split(coming)], [*x.split(leaving)], opts)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Options = None) -> dist.Work:
        return self._add("barrier", lambda *_: algorithms.barrier(self.links), [], [], opts)

    def _check(self, name: str, parts: Sequence[Tensor], x: Tensor, share: int = 1) -> None:
        """Raise BadInput where a part has not `share` times a rank's elements, or another dtype."""
        for part in parts:
            if part.numel() != share * x.numel() or part.dtype != x.dtype:
                expected = f"{share * x.numel()} x {x.dtype} for {name}"
                raise BadInput("backend", NAME, f"{expected}, got {part.numel()} x {part.dtype}")

    def _sizes(self, x: Tensor, rows: Sequence[int]) -> list[int]:
        counts = rows or [len(x) // self.links.size] * self.links.size
        if sum(counts) != len(x):
            raise BadInput("backend", NAME, f"{len(x)} rows in all for all_to_all_single, got {sum(counts)}")
        return [*counts]

    def _finish(self, x: Tensor, op: Reduction) -> None:
        if op.averages:
            x.div_(self.links.size)

    def _add(self, name: str, run: Run, outputs: Tensors, inputs: Sequence[Tensor], opts: Options) -> dist.Work:
        for x in (*outputs, *inputs):
            if x.device.type != "cpu" or x.layout != torch.strided:
                got = f"got {x.layout} on {x.device}"
                raise BadInput("backend", NAME, f"dense tensors on a CPU for {name}, {got}")
        timeout = self._timeout if opts is None or opts.timeout < MESSENGERS_TIMEOUT else opts.timeout

        def run_flat() -> None:
            self.links.timeout = timeout
            computed = [x.contiguous().view(-1) for x in outputs]
            run(computed, [x.contiguous().view(-1) for x in inputs])
            for x, flat in zip(outputs, computed, strict=True):
                if x.data_ptr() != flat.data_ptr():  # x is not contiguous
                    x.copy_(flat.view(x.shape))

        collective = Collective(name, run_flat, outputs)
        if torch.autograd._profiler_enabled():  # a profile shows it from its call to its end, as gloo's
            with record_function(f"ring:{name}") as span:
                span._call_end_callbacks_on_future(collective.get_future())
        return self._queue.add(collective, at_once=opts is not None and not opts.asyncOp)


class UnchunkedGroup(RingGroup):
    """The tutorial's ring, for comparison."""

    name_of_backend = UNCHUNKED
    _all_reduce = staticmethod(algorithms.unchunked_all_reduce)


def _check_tag(tag: int) -> int:
    if tag == TAG:
        raise BadInput("tag", tag, "a smaller one, as collectives use it")
    return tag


def register() -> None:
    """Make `ring` and `ring_unchunked` backends of `init_process_group` and `new_group`."""
    for group in (RingGroup, UnchunkedGroup):
        if group.name_of_backend not in dist.Backend.backend_list:
            dist.Backend.register_backend(group.name_of_backend, group, devices=["cpu"])
