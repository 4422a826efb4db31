"""The process group `ring`, and its registration as a backend of torch.distributed."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.ring import algorithms
from strategies.ring.process_group import Options, QueuedGroup
from strategies.ring.reductions import Reduction, reduction

NAME = "ring"
UNCHUNKED = "ring_unchunked"


class RingGroup(QueuedGroup):
    """A process group whose collectives are those of `algorithms`."""

    name_of_backend = NAME

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> dist.Work:
        """Reduce every tensor over the ranks, in place."""
        found = reduction(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensors[0])

        def run(xs: list[Tensor], _: list[Tensor]) -> None:
            for x in xs:
                self._all_reduce(self.links, x, found.combine)
                self._finish(x, found)

        return self._add("all_reduce", run, tensors, [], opts)

    allreduce_coalesced = allreduce
    _all_reduce = staticmethod(algorithms.all_reduce)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> dist.Work:
        """Send the root's tensors to all, in place."""

        def run(xs: list[Tensor], _: list[Tensor]) -> None:
            for x in xs:
                algorithms.broadcast(self.links, x, opts.rootRank)

        return self._add("broadcast", run, tensors, [], opts)

    def reduce(self, tensors: list[Tensor], opts: Options) -> dist.Work:
        """Reduce the tensor over the ranks, in place on the root."""
        found = reduction(opts.reduceOp, tensors[0])

        def run(xs: list[Tensor], _: list[Tensor]) -> None:
            algorithms.reduce(self.links, xs[0], found.combine, opts.rootRank)
            if self.links.rank == opts.rootRank:
                self._finish(xs[0], found)

        return self._add("reduce", run, tensors, [], opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        """Gather each rank's tensors into `outputs[rank][i]`; a single one's into `outputs[0][rank]`."""
        parts = [x for some in outputs for x in some]
        for i, own in enumerate(inputs):
            self._check("all_gather", parts[i :: len(inputs)], own)

        def run(parts: list[Tensor], inputs: list[Tensor]) -> None:
            for i, own in enumerate(inputs):
                self._all_gather(parts[i :: len(inputs)], own)

        return self._add("all_gather", run, parts, inputs, opts)

    allgather = allgather_coalesced

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> dist.Work:
        """Gather each rank's tensors, one after the other in each output."""
        for whole, own in zip(outputs, inputs, strict=True):
            self._check("all_gather_into_tensor", [whole], own, self.links.size)

        def run(wholes: list[Tensor], inputs: list[Tensor]) -> None:
            for whole, own in zip(wholes, inputs, strict=True):
                self._all_gather(whole.tensor_split(self.links.size), own)

        return self._add("all_gather_into_tensor", run, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Options = None) -> dist.Work:
        """Gather each rank's tensor, one after the other."""
        return self.all_gather_single_coalesced([output], [own], opts)

    _allgather_base = all_gather_single

    def _all_gather(self, parts: Sequence[Tensor], own: Tensor) -> None:
        parts[self.links.rank].copy_(own)
        algorithms.all_gather(self.links, parts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> dist.Work:
        """Reduce the inputs' parts over the ranks, each on its rank."""
        (parts,), found = inputs, reduction(opts.reduceOp, outputs[0])
        self._check("reduce_scatter", parts, outputs[0])

        def run(outputs: list[Tensor], parts: list[Tensor]) -> None:
            self._reduce_scatter(outputs[0], torch.cat(parts), found)

        return self._add("reduce_scatter", run, outputs, parts, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options) -> dist.Work:
        """Reduce the parts of each input over the ranks, each on its rank."""
        found = reduction(opts.reduceOp, outputs[0])
        for output, x in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter_tensor", [x], output, self.links.size)

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            for output, x in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, x.clone(), found)

        return self._add("reduce_scatter_tensor", run, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Options) -> dist.Work:
        """Reduce the input's parts over the ranks, each on its rank."""
        return self.reduce_scatter_single_coalesced([output], [x], opts)

    _reduce_scatter_base = reduce_scatter_single

    def _reduce_scatter(self, output: Tensor, scratch: Tensor, found: Reduction) -> None:
        chunks = scratch.tensor_split(self.links.size)
        algorithms.reduce_scatter(self.links, chunks, found.combine)
        self._finish(output.copy_(chunks[self.links.rank]), found)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> dist.Work:
        """Gather each rank's tensor on the root."""
        parts = outputs[0] if outputs else []
        self._check("gather", parts, inputs[0])
        return self._add(
            "gather", lambda xs, own: algorithms.gather(self.links, own[0], xs, opts.rootRank), parts, inputs, opts
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> dist.Work:
        """Send each rank its part of the root's tensors."""
        parts = inputs[0] if inputs else []
        self._check("scatter", parts, outputs[0])
        return self._add(
            "scatter", lambda own, xs: algorithms.scatter(self.links, own[0], xs, opts.rootRank), outputs, parts, opts
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> dist.Work:
        """Send each rank its tensor, and receive one from each."""
        self._check("all_to_all", [outputs[self.links.rank]], inputs[self.links.rank])
        return self._add("all_to_all", partial(algorithms.all_to_all, self.links), outputs, inputs, opts)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options = None
    ) -> dist.Work:
        """Send each rank its part, and receive one from each; sizes are numbers of rows, equal if there are none."""
        coming, leaving = self._sizes(output, output_sizes), self._sizes(x, input_sizes)
        if coming[self.links.rank] != leaving[self.links.rank] or output.dtype != x.dtype:
            raise ValueError("backend ring: expected the part that stays here to have one size in all_to_all_single")

        def run(outputs: list[Tensor], inputs: list[Tensor]) -> None:
            algorithms.all_to_all(self.links, outputs[0].split(coming), inputs[0].split(leaving))

        return self._add("all_to_all_single", run, [output], [x], opts)

    alltoall_base = all_to_all_single

    def _sizes(self, x: Tensor, rows: Sequence[int]) -> list[int]:
        counts = rows or [len(x) // self.links.size] * self.links.size
        if sum(counts) != len(x):
            raise ValueError(f"backend ring: expected {len(x)} rows in all for all_to_all_single, got {sum(counts)}")
        return [count * (x.numel() // max(len(x), 1)) for count in counts]

    def barrier(self, opts: Options = None) -> dist.Work:
        """Wait until all ranks have called it."""
        return self._add("barrier", lambda *_: algorithms.barrier(self.links), [], [], opts)

    def _finish(self, x: Tensor, found: Reduction) -> None:
        if found.averages:
            x.div_(self.links.size)


class UnchunkedGroup(RingGroup):
    """The tutorial's ring, for comparison."""

    name_of_backend = UNCHUNKED
    _all_reduce = staticmethod(algorithms.unchunked_all_reduce)


def register() -> None:
    """Make `ring` and `ring_unchunked` backends of `init_process_group` and `new_group`."""
    for group in (RingGroup, UnchunkedGroup):
        if group.name_of_backend not in dist.Backend.backend_list:
            dist.Backend.register_backend(group.name_of_backend, group, devices=["cpu"])
