"""How much of the communication is hidden behind computation, from a profile of a few steps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

Spans = list[tuple[float, float]]
CPU_BACKENDS = ("gloo:", "ring:")  # with which the names of their collectives begin in a profile


class Overlap:
    """Profiles this rank from now until `share` is called.

    A collective is under way from the moment it is handed to the backend until its last byte is there, so waiting for a
    slower rank is part of it. The share that is hidden is the time in which at least one collective was under way while
    this rank computed (on CPU: an operator of torch ran in it; on a GPU: a kernel other than NCCL's), over the time in
    which one was under way. What is computed then is nearly always backward. It is a share of time: that communication
    and computation may slow each other down, as they share cores and memory, is not in it. (Holistic Trace Analysis
    calls this the communication computation overlap.)

    Args:
        device: where training runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def share(self) -> float | None:
        """End; the share, or None if there was no communication."""
        if self._gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        events = self._profile.events()
        assert events is not None
        return hidden_share(*(_gpu_spans if self._gpu else _cpu_spans)(events))


def _cpu_spans(events: Iterable[Any]) -> tuple[Spans, Spans]:
    named = [(event.name, _span(event)) for event in events]
    return [s for name, s in named if name.startswith(CPU_BACKENDS)], [
        s for name, s in named if name.startswith("aten::")
    ]


def _gpu_spans(events: Iterable[Any]) -> tuple[Spans, Spans]:
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [(event.name, _span(event)) for event in on_gpu if not event.name.startswith(("Mem", "nccl:", "##"))]
    told = [name.startswith("nccl") for name, _ in kernels]
    pairs = list(zip(told, kernels, strict=True))
    return [s for nccl, (_, s) in pairs if nccl], [s for nccl, (_, s) in pairs if not nccl]


def _span(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def hidden_share(communication: Spans, computation: Spans) -> float | None:
    """Length of both together over that of communication; the spans of each may overlap among themselves."""
    one, other = _union(communication), _union(computation)
    total = _length(one)
    if not total:
        return None
    # |A and B| = |A| + |B| - |A or B|, but for rounding
    both = total + _length(other) - _length(_union([*one, *other]))
    return min(max(both / total, 0.0), 1.0)


def _union(spans: Spans) -> Spans:
    """The same times as spans in order that don't touch."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
