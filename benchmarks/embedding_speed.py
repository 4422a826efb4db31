"""Students that embed images without labels: images a second and memory, beside Lightly Train's third method.

    python benchmarks/embedding_speed.py --out embedding_speed.json     # 12 minutes on a busy core

All sides see the same JPEG files of 64 x 64 pixels, cropped, flipped, recoloured and mixed, in batches, on one thread,
each in a process of its own, in turn. The teacher is a ViT-B/16 of timm, the students are ResNet-18 of torchvision.
`ours` learns by SimilarityKL with a queue and by TokenSimilarity, the losses of Lightly Train's `distillationv3`, with
AdamW and the gradients' norm clipped; `in one pass` are students of four methods in one fit, `alone` are the four, each
in a fit of its own. Steps are timed from the end of the second to the end of the last, which includes fetching batches;
imports and building are left out. Peak memory is the process's.

Needs timm and lightly-train (AGPL-3.0, which is timed and never copied; 32 packages, so it is not locked):

    pip install timm lightly-train==0.18.0
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Runs, Target
from datamodules import ImageFolder
from harness.runs.environment import keep_memory
from harness.runs.progress import peak_memory
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.embedding.task import Embedding
from lit_modules.nets import Timm, Torchvision
from lit_modules.nets.embedder import Embedder
from lit_modules.objectives import RKD, EmbeddingMatch, Objective, SimilarityKL, Sum, TokenSimilarity

SIDE, SHAPE, WARMUP = 64, (3, 64, 64), 2
STUDENT, CROP = "resnet18", (0.14, 1.0)
OURS, LIGHTLY, FOUR = "ours", "Lightly Train", "four in one pass"
METHODS: dict[str, Any] = {
    "cosine": EmbeddingMatch, "kl": SimilarityKL, "rkd": RKD, "tokens": TokenSimilarity,
}  # fmt: skip
TARGETS = {
    "images": Target("images/s, ours over Lightly Train's third method", low=1.0),
    "images cpu": Target("images a CPU second, ours over Lightly Train's third method"),
    "memory": Target("peak memory, ours over Lightly Train's third method", high=1.0),
    "four": Target("CPU seconds of a step, four students in one pass over four runs", high=0.45),
}


class Marks:
    """The times, of the wall and of the process, at which an optimizer has stepped."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        register_optimizer_step_post_hook(lambda *_: self.times.append((time.perf_counter(), time.process_time())))

    def figures(self) -> dict[str, float]:
        """Return the seconds of a step, and the peak memory."""
        (wall, cpu), (last_wall, last_cpu) = self.times[WARMUP - 1], self.times[-1]
        steps = len(self.times) - WARMUP
        return {"s": (last_wall - wall) / steps, "CPU s": (last_cpu - cpu) / steps, "MiB": peak_memory(common.CPU)}


def write_images(folder: Path, count: int) -> None:
    """Write JPEG files of colours that change smoothly."""
    draw = torch.Generator().manual_seed(0)
    for number in range(count):
        pixels = F.interpolate(torch.rand(1, 3, 8, 8, generator=draw), SIDE, mode="bilinear")[0]
        image = Image.fromarray((255 * pixels).to(torch.uint8).permute(1, 2, 0).numpy())
        image.save(folder / f"{number:05}.jpg")


def objectives(side: str, queue: int) -> dict[str, Objective]:
    """Return the methods of a side, by name."""
    if side == OURS:
        return {"queue + tokens": Sum([SimilarityKL(queue=queue), TokenSimilarity()])}
    return {name: method() for name, method in METHODS.items() if side in {FOUR, name}}


def make_data(folder: str, batch_size: int) -> ImageFolder:
    jitter = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.2, "hue": 0.1}
    transforms = [
        {"RandomResizedCrop": {"size": SIDE, "scale": [*CROP]}}, "RandomHorizontalFlip", {"ColorJitter": jitter},
        {"RandomGrayscale": {"p": 0.2}},
    ]  # fmt: skip
    sizes: dict[str, Any] = {"validation_size": 0, "test_size": 2}
    return ImageFolder(folder, SIDE, transforms=transforms, mixup=1.0, task="embedding", batch_size=batch_size, **sizes)


def ours(side: str, folder: str, steps: int, batch_size: int, teacher_name: str) -> dict[str, float]:
    """Train students by the methods of a side; return the seconds of a step and memory."""
    common.one_thread()
    keep_memory()
    data, marks = make_data(folder, batch_size), Marks()
    data.prepare_data()
    data.setup("fit")
    teacher = Embedder(with_seed(1, lambda: Timm(teacher_name, SHAPE)), SHAPE)
    net = with_seed(0, lambda: Torchvision(STUDENT, SHAPE))  # of which each Embedder has a copy
    methods = objectives(side, 2 * batch_size)
    students = {name: (Embedder(net, SHAPE), objective) for name, objective in methods.items()}
    module = Distillation(
        teacher, students, SHAPE, optimizer=partial(torch.optim.AdamW, lr=5e-4, fused=True), task=Embedding(),
        samples=data.sizes["train"], labelled=False, teacher_cache_mb=0,
    )  # fmt: skip
    settings: dict[str, Any] = {"max_steps": steps, "gradient_clip_val": 1.0, "limit_val_batches": 0}
    with quiet(), warnings.catch_warnings(action="ignore"):
        Trainer(**common.SILENT, **settings).fit(module, data)
    return marks.figures()


def lightly(folder: str, steps: int, batch_size: int, teacher_name: str) -> dict[str, float]:
    """Train a student by Lightly Train's third method; return the seconds of a step and memory."""
    common.one_thread()
    import lightly_train
    import timm

    marks = Marks()
    teacher = with_seed(1, lambda: timm.create_model(teacher_name, img_size=SIDE))
    with tempfile.TemporaryDirectory() as out, warnings.catch_warnings(action="ignore"):
        lightly_train.pretrain(
            out=f"{out}/run", data=folder, model=f"torchvision/{STUDENT}", method="distillationv3",
            method_args={"teacher": teacher, "queue_size": 2 * batch_size}, batch_size=batch_size, num_workers=0,
            epochs=1, accelerator="cpu", devices=1, precision="32-true",
            transform_args={
                "image_size": (SIDE, SIDE), "gaussian_blur": None, "random_resize": {"min_scale": CROP[0]},
            },
            trainer_args={"max_steps": steps},
        )  # fmt: skip
    return marks.figures()


def measure(args: argparse.Namespace) -> Measurement:
    steps, sides = WARMUP + args.steps, [side for side in (OURS, LIGHTLY, FOUR, *METHODS) if side in args.only]
    environment = common.thread_variables(1) | {"OMP_WAIT_POLICY": "PASSIVE", "LIGHTLY_TRAIN_EVENTS_DISABLED": "1"}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), steps * args.batch_size + 2)
        settings = folder, steps, args.batch_size, args.teacher
        calls = {side: [lightly] if side == LIGHTLY else [ours, side] for side in sides}
        rivals = {side: partial(common.call_fresh, *call, *settings, env=environment) for side, call in calls.items()}
        runs = common.take_turns(rivals, args.rounds)
    figures = {unit: {side: [x[unit] for x in runs[side]] for side in sides} for unit in ("s", "CPU s", "MiB")}
    for unit in ("s", "CPU s"):
        figures[f"images a {unit}"] = {side: [args.batch_size / x for x in figures[unit][side]] for side in sides}
    return Measurement(figures, ratios(figures))


def ratios(figures: dict[str, Runs]) -> Runs:
    """Return the ratios of the sides that were measured."""
    sides, found = figures["s"].keys(), Runs()
    if {OURS, LIGHTLY} <= sides:
        units = {"images": "images a s", "images cpu": "images a CPU s", "memory": "MiB"}
        found = {name: common.over(figures[unit][OURS], figures[unit][LIGHTLY]) for name, unit in units.items()}
    if {FOUR, *METHODS} <= sides:
        alone = zip(*(figures["CPU s"][name] for name in METHODS), strict=True)
        found["four"] = common.over(figures["CPU s"][FOUR], [sum(seconds) for seconds in alone])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 3), "runs of each side, in turn")
    command.add_argument("--steps", type=int, default=4, help="that are timed, after the first two")
    command.add_argument("--batch_size", type=int, default=32)
    command.add_argument("--teacher", default="vit_base_patch16_224", help="a ViT of timm")
    sides = (OURS, LIGHTLY, FOUR, *METHODS)
    command.add_argument("--only", nargs="+", choices=sides, default=sides, help="sides; default: all")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
