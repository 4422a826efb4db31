"""How many settings train side by side: as many as memory holds, found before training."""

import os
import subprocess
from collections.abc import Sequence

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from apprentice.batch import Batch
from datamodules.memory import available_bytes
from harness.cli.messages import as_flags
from harness.reports.report import MIB
from harness.runs import launch
from harness.runs.plans import Arm
from harness.runs.quiet import notice
from harness.runs.session import Session
from harness.studies.side_by_side import SideBySide
from lit_modules.nets.attention.form import any_kernel
from lit_modules.training.loop import Loop

COPIES = 4  # of a parameter: itself, its gradient, two moments of an optimizer
SMI_SECONDS = 30  # for nvidia-smi to answer
SHARE = 0.5  # of the available memory; the rest is for what else a process needs


def in_waves(bake_off: SideBySide, units: Sequence[Sequence[Arm]]) -> list[list[str]]:
    """Divide settings into waves, each of which fits into memory; those of a unit stay together.

    All are one wave where the device does not say how much it has free, and `tune_wave` is not given.
    """
    session, config = bake_off.session, bake_off.config
    most = config.tune_wave
    trainer = session.trainer()
    free = free_bytes(trainer) if most is None else None
    if most is None and free is None:
        line = "tuning: all settings in one wave, as the GPU's free memory is not known; fewer by `tune_wave N`"
        notice(as_flags(line, session.parser))
    if free is not None:
        build = bake_off.builder(config.seeds[0])
        sizes = []
        for unit in {unit[0].row: unit for unit in units}.values():  # one of each row
            module = build(unit)
            sizes += [student_bytes(module, arm.name, session, trainer.world_size) for arm in unit]
        most = max(1, int(SHARE * free / max(sizes)))
    waves: list[list[str]] = [[]]
    for unit in units:
        if most is not None and waves[-1] and len(waves[-1]) + len(unit) > most:
            waves.append([])
        waves[-1] += [arm.name for arm in unit]
    if len(waves) > 1:
        why = "" if config.tune_wave else f", as one takes up to {max(sizes) / MIB:.0f} MiB of a rank's memory"
        notice(f"tuning: {sum(map(len, waves))} settings in {len(waves)} waves of at most {most}{why}")
    return waves


def free_bytes(trainer: Trainer) -> int | None:
    """Return the free bytes of the devices' memory for each rank; None if the devices don't say.

    GPUs are asked by NVIDIA's own tool: once this process had initialised CUDA, forked ranks could not use it.
    """
    if trainer.strategy.root_device.type == "cpu":
        local = trainer.num_devices if launch.find_launch() is None else max(launch.ranks() // trainer.num_nodes, 1)
        return available_bytes() // local
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    try:
        gpus = [visible.split(",")[number] if visible else str(number) for number in trainer.device_ids]
        command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", f"--id={','.join(gpus)}"]
        output = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=SMI_SECONDS).stdout
        return min(map(int, output.split())) * MIB
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):  # none there, or one that answers otherwise
        return None


def student_bytes(module: Loop, name: str, session: Session, ranks: int) -> int:
    """Return bytes that a student takes on a rank while it trains: parameters, optimizer and what backward needs."""
    rows = max(2, -(-min(session.data.batch_size, session.data.sizes["train"]) // ranks))
    pair = session.data.samples("train", torch.arange(rows), next(module.parameters()).dtype)
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with any_kernel(module):  # it is a step on the CPU, wherever they train
        step = next(iter(module.timed_steps(name, Batch.of(pair, 0, shared=False)).values()))
    with saved_tensors_hooks(count, lambda tensor: tensor):
        loss = step()
    of_parameters = sum(p.numel() * p.element_size() for p in module.module_of(name).parameters())
    del loss
    return COPIES * of_parameters + sum(saved.values())
