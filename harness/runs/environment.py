"""The machine: its description for reports, and limits of the threads and memory of a run."""

import ctypes
import importlib.metadata
import math
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("apprentice", "torch", "torchvision", "lightning", "torchmetrics", "tensorboard")


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory in GiB and GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    # Reading a GPU's name initialises CUDA, after which a fork can't use it.
    initialized = torch.cuda.is_initialized()
    gpus = [torch.cuda.get_device_name(i) if initialized else "GPU" for i in range(torch.cuda.device_count())]
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:(.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": memory and round(memory, 1), "gpus": gpus}


def limit_threads(input_shape: Sequence[int]) -> None:
    """Use one thread for tiny images (C, H, W), unless OMP_NUM_THREADS is set.

    A step of LightNN on 8 x 8 images takes 2 ms with one thread and up to 34 ms with two on a busy machine. The rule
    depends on the inputs alone because the number of threads changes a kernel's bits.
    """
    if "OMP_NUM_THREADS" not in os.environ and len(input_shape) == 3 and math.prod(input_shape[1:]) <= 256:
        torch.set_num_threads(1)


def hide_gpus() -> None:
    """Hide GPUs from a run on CPUs: autograd starts a thread for each one, after which no fork can run a backward."""
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def keep_memory() -> None:
    """Make glibc keep freed memory: a CPU's steps are a fifth faster, peak memory is up to a fifth larger."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # other C libraries have none
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def measurement_conditions() -> dict[str, Any]:
    """Return the conditions of a measurement: date, load, hardware and versions."""
    load = os.getloadavg()[0]
    return {"date": time.strftime("%Y-%m-%d"), "load_before": load, "hardware": hardware(), "versions": versions()}


def versions(*packages: str) -> dict[str, str]:
    """Return versions of Python, of the packages on which numbers depend, and of others."""
    return {"python": platform.python_version()} | {name: _version(name) for name in (*PACKAGES, *packages)}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "not installed"
