"""The share of communication hidden behind computation, from a profile of a few steps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

Spans = list[tuple[float, float]]
CPU_BACKENDS = ("gloo:", "ring:")  # prefixes of their collectives in a profile


class Overlap:
    """Profiles this rank until `share` is called.

    A collective is under way from its call to its last byte, so waiting for a slower rank is part of it. The hidden
    share is the time in which one was under way while this rank computed (on CPU: an operator of torch ran in it; on a
    GPU: a kernel other than NCCL's), over the time in which one was under way: Holistic Trace Analysis' communication
    computation overlap. That both may slow each other down is not in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def share(self) -> float | None:
        """The hidden share; None without communication."""
        if self._gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        events = self._profile.events()
        assert events is not None
        return hidden_share(*_spans(events, self._gpu))


def _spans(events: Iterable[Any], on_gpu: bool) -> tuple[Spans, Spans]:
    """Of communication and of computation."""
    if on_gpu:
        events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
        events = [event for event in events if not event.name.startswith(("Mem", "nccl:", "##"))]
    named = [(event.name, (event.time_range.start, event.time_range.end)) for event in events]
    backends = "nccl" if on_gpu else CPU_BACKENDS
    computed = [span for name, span in named if not name.startswith(backends) and (on_gpu or name.startswith("aten::"))]
    return [span for name, span in named if name.startswith(backends)], computed


def hidden_share(communication: Spans, computation: Spans) -> float | None:
    """Time of both at once over that of communication; the spans of each may overlap among themselves."""
    one, other = _union(communication), _union(computation)
    total = _length(one)
    if not total:
        return None
    # |A and B| = |A| + |B| - |A or B|, but for rounding
    both = total + _length(other) - _length(_union([*one, *other]))
    return min(max(both / total, 0.0), 1.0)


def _union(spans: Spans) -> Spans:
    """The same times as disjoint spans in order."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
