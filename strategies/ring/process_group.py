"""The base of `RingGroup`: what torch asks a process group, its messages, and the queue of its collectives."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from strategies.ring.links import MESSENGERS_TIMEOUT, TAG, Links
from strategies.ring.queue import Collective, Queue

Options = Any  # torch's AllreduceOptions and the like
ProcessGroup: Any = dist.ProcessGroup  # its methods have overloads and older names, which differ between versions
Run = Callable[[list[Tensor], list[Tensor]], None]  # a collective, given its outputs and inputs as flat tensors


class QueuedGroup(ProcessGroup):
    """A process group over gloo's send and recv, whose collectives run one after the other in a thread.

    torch gives the names and arguments of the methods; the older names of 2.11 stand beside the newer ones.
    """

    name_of_backend: str

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        messenger = dist.ProcessGroupGloo(dist.PrefixStore("messages", store), rank, size, timeout)
        self._messenger = cast("Any", messenger)  # its messages are not in torch's type hints
        self.links = Links(self._messenger, rank, size)
        self._queue = Queue()
        self._timeout = MESSENGERS_TIMEOUT
        self._group_name = ""

    # About the group

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """The backend's name."""
        return self.name_of_backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which torch finds the group."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        """That name."""
        return self._group_name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def _get_backend(self, device: torch.device) -> Any:
        """For torch's question whether messages can be joined: gloo's can't."""
        return self._messenger

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later collectives."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the thread."""
        self._queue.close()

    abort = shutdown

    # Messages

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Gloo's."""
        return self._messenger.send(tensors, dst, _check_tag(tag))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Gloo's."""
        return self._messenger.recv(tensors, src, _check_tag(tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Gloo's."""
        return self._messenger.recv_anysource(tensors, _check_tag(tag))

    recvAnysource = recv_anysource  # noqa: N815

    # Running

    def _check(self, name: str, parts: Sequence[Tensor], own: Tensor, share: int = 1) -> None:
        """Raise ValueError where a part has not `share` times a rank's elements, or another dtype."""
        for part in parts:
            if part.numel() != share * own.numel() or part.dtype != own.dtype:
                expected = f"expected {share * own.numel()} x {own.dtype} for {name}"
                raise ValueError(f"backend ring: {expected}, got {part.numel()} x {part.dtype}")

    def _add(self, name: str, run: Run, outputs: list[Tensor], inputs: Sequence[Tensor], opts: Options) -> dist.Work:
        for x in (*outputs, *inputs):
            if x.device.type != "cpu" or x.layout != torch.strided:
                found = f"got {x.layout} on {x.device}"
                raise ValueError(f"backend ring: expected dense tensors on a CPU for {name}, {found}")
        timeout = self._timeout if opts is None or opts.timeout < MESSENGERS_TIMEOUT else opts.timeout

        def run_flat() -> None:
            self.links.timeout = timeout
            with _flat(outputs) as xs:
                run(xs, [x.contiguous().view(-1) for x in inputs])

        collective = Collective(name, run_flat, outputs)
        if torch.autograd._profiler_enabled():  # a profile shows it from its call to its end, as gloo's
            with record_function(f"ring:{name}") as span:
                span._call_end_callbacks_on_future(collective.get_future())
        return self._queue.add(collective, at_once=opts is not None and not opts.asyncOp)


@contextmanager
def _flat(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat, contiguous views of tensors, or copies that are written back at the end."""
    xs = [x.contiguous().view(-1) for x in tensors]
    yield xs
    for tensor, x in zip(tensors, xs, strict=True):
        if tensor.data_ptr() != x.data_ptr():
            tensor.copy_(x.view(tensor.shape))


def _check_tag(tag: int) -> int:
    if tag == TAG:
        raise ValueError(f"tag {tag}: expected a smaller one, as collectives use it")
    return tag
