"""Strategies over NCCL: in float64 the numbers of one CPU process, under `exact` the same bits; stages that overlap."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.optim import SGD
from torch.profiler import ProfilerActivity, profile

from lab.strategies import DDPFP16, AllReduce, DDPPowerSGD, LocalSGD, ParamServer
from lab.studies.meters import hidden_share
from lit_modules.classifier import LitClassifier
from strategies import DDP, FSDP, HSDP, DataParallel, ModelParallel, PipelineStrategy, ZeRO1
from tests.gpus import gpus, on_gpu
from tests.training import assert_same, digits, distillation, fit, weights
from tests.training import net as make_net

LOSSY = 0.1  # how far a compressed gradient may lead the weights away in these steps
STRATEGIES: dict[str, tuple[Callable[..., DataParallel], dict[str, Any], float]] = {
    "ddp": (DDP, {}, 1e-9),
    "ddp, exact": (DDP, {"exact": 8}, 1e-9),
    "ddp_zero1": (ZeRO1, {}, 1e-9),
    "ddp_allreduce": (AllReduce, {}, 1e-9),
    "local_sgd": (LocalSGD, {"period": 1}, 1e-9),  # of plain SGD the steps of ddp
    "ddp_fp16": (DDPFP16, {}, LOSSY),
    "ddp_powersgd": (DDPPowerSGD, {}, LOSSY),
    "fsdp": (FSDP, {}, 1e-9),
    "fsdp, offloaded": (FSDP, {"offload": True}, 1e-9),
    "hsdp": (HSDP, {"shard_size": 1}, 1e-9),
    "param_server": (ParamServer, {}, 1e-9),
    "param_server, each": (ParamServer, {"update": "each"}, 1e-9),  # two ranks have one worker, whose order is ddp's
    "pipeline": (PipelineStrategy, {}, 1e-9),
}
STEPS: dict[str, Any] = {"max_epochs": -1, "max_steps": 6, "precision": "64-true"}


def students() -> LightningModule:
    return distillation(["ce", "hint"], optimizer=partial(SGD, lr=0.05))


def trained(make: Callable[[], LightningModule], **options: Any) -> dict[str, Tensor]:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's, of a world of one rank
        return {name: x.cpu() for name, x in weights(fit(make(), digits(), **options)).items()}


def run_on(devices: int, make: Callable[[], LightningModule], kind: Callable[..., DataParallel], **how: Any) -> Any:
    """The weights after a fit on so many GPUs; several are forked, before this process uses CUDA."""
    options = {key: how.pop(key) for key in STEPS if key in how}
    strategy = kind(timeout=60, start_method="fork" if devices > 1 else "auto", **how)
    return trained(make, devices=devices, accelerator="gpu", strategy=strategy, **options)


def agrees(name: str, devices: int) -> None:
    kind, options, tolerance = STRATEGIES[name]
    assert_same(run_on(devices, students, kind, **options, **STEPS), trained(students, **STEPS), tolerance)


@pytest.mark.parametrize("devices", gpus(1, 2, 4))
@pytest.mark.parametrize("name", STRATEGIES)
def test_float64_agrees_with_one_cpu_process(name: str, devices: int, tmp_path: Path) -> None:
    if devices > 2 and name in {"param_server, each", "pipeline"}:
        pytest.skip("several workers take turns, and the nets have fewer stages")
    on_gpu(tmp_path, agrees, name, devices)


def single_agrees(precision: str, atol: float) -> None:
    steps = STEPS | {"precision": precision}
    assert_same(trained(students, accelerator="gpu", **steps), trained(students, **steps), atol)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "atol"), [("64-true", 1e-9), ("32-true", 1e-4)])
def test_one_gpu_agrees_with_the_cpu(precision: str, atol: float, tmp_path: Path) -> None:
    on_gpu(tmp_path, single_agrees, precision, atol)


def keep(path: Path, kind: Callable[..., DataParallel], devices: int) -> None:
    torch.save(run_on(devices, distillation, kind, exact=4, max_epochs=2), path)


@pytest.mark.parametrize("devices", gpus(1, 2, 4))
@pytest.mark.parametrize("kind", [DDP, ZeRO1])
def test_exact_has_the_same_bits_on_more(kind: Callable[..., DataParallel], devices: int, tmp_path: Path) -> None:
    for name, count in {"first": 1, "second": devices}.items():
        on_gpu(tmp_path, keep, tmp_path / name, kind, count)
    assert_same(torch.load(tmp_path / "first"), torch.load(tmp_path / "second"))


def wrapped(split: bool) -> LightningModule:
    net = make_net(dropout=0.0)
    return LitClassifier(nn.DataParallel(net) if split else net)


def data_parallel_agrees() -> None:
    plain, split = (trained(partial(wrapped, kind), accelerator="gpu", devices=1, **STEPS) for kind in (False, True))
    assert_same({name.replace("net.module.", "net."): x for name, x in split.items()}, plain, 1e-9)


@pytest.mark.gpu(2)
def test_torchs_own_wrapper_splits_a_batch(tmp_path: Path) -> None:
    on_gpu(tmp_path, data_parallel_agrees)


def stages_overlap() -> None:
    """Kernels of two GPUs run at the same time with a split batch, and one after the other without."""
    stages = [nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))) for _ in range(2)]
    x, shares, outputs = torch.randn(4096, 2048, device="cuda:0"), [], []
    for split_size in (None, 512):
        module = ModelParallel(stages, ["cuda:0", "cuda:1"], split_size)
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as told:
            outputs += [module(x) for _ in range(3)]
            for device in range(2):
                torch.cuda.synchronize(device)
        spans: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
        for event in told.events() or []:
            if event.device_type == DeviceType.CUDA and "gemm" in event.name.lower():
                spans[event.device_index].append((event.time_range.start, event.time_range.end))
        assert all(spans.values()), [event.name for event in told.events() or []]
        shares.append(hidden_share(spans[0], spans[1]))
    torch.testing.assert_close(outputs[-1], outputs[0], rtol=0, atol=1e-3)
    # Without a split the first GPU may begin the next of the three calls while the second ends the one before.
    assert shares[1] > shares[0], shares


@pytest.mark.gpu(2)
def test_stages_of_one_process_compute_at_the_same_time(tmp_path: Path) -> None:
    on_gpu(tmp_path, stages_overlap)
