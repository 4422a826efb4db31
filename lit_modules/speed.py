"""What a fit costs while it runs: samples a second, and memory."""

import resource
import sys
import time

import torch


class Throughput:
    """Samples a second since the last reading, or since `start` after time that is not training."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, samples: int) -> None:
        """Begin, with so many samples seen so far."""
        self._since, self._samples = time.perf_counter(), samples

    def read(self, samples: int) -> float:
        """Samples a second, with so many samples seen so far."""
        seconds, new = time.perf_counter() - self._since, samples - self._samples
        self.start(samples)
        return new / seconds


def peak_memory(device: torch.device) -> float:
    """MiB that tensors took on a GPU at most; on the CPU, the most that this process had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
