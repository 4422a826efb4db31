"""What is deployed: the options, the student in a run's folder, the images of its data."""

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput
from harness import config
from harness.config.classes import imported
from harness.config.sources import load, read
from harness.runs.nets import Spec, load_net, read_spec


@dataclass
class Options(config.OneSeedOptions):
    """Options of the study.

    Args:
        exact: none; int8 is another net than the one that was trained.
        run: a student's folder, such as RUN/seed0/kd; when not given, one is trained.
        teacher: its teacher's folder, for an objective that asks it; RUN/seed0/teacher if that is there.
        student_epochs: of a student that is trained here, by Adam with a learning rate of 0.001.
        freeze_epoch: from this epoch on, counted from 0, ranges and BatchNorm's statistics stay as they are.
        evaluate_every: epochs from one int8 validation to the next.
        calibration_size: training samples that post-training quantisation takes its ranges from.
    """

    run: str | None = None
    teacher: str | None = None
    student_epochs: int = 10
    freeze_epoch: int = 2
    evaluate_every: int = 1
    calibration_size: int = 512
    why_one: ClassVar[str] = "one student is deployed"
    why_inexact: ClassVar[str] = "ranges are the global batch's, not a shard's"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student_epochs", "freeze_epoch", "evaluate_every", "calibration_size"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), "a whole number, at least 1")
        if self.run is not None and self.student_epochs != Options.student_epochs:
            expected = "it left out: the student in --run is trained already"
            raise BadInput("student_epochs", self.student_epochs, expected)


def data_of_run(argv: Sequence[str], default: Any, kind: type) -> Any:
    """The default of `--data`: that of the run which the flags or their files name, as its config.yaml has it.

    `default` where no run is named, None where the run has no such file; `kind` is the class that the data must be of.

    Raises:
        BadInput: the run was on another kind of data.
    """
    run = None
    for layer in read(argv)[0]:
        run = layer["run"].value if "run" in layer else run
    if not isinstance(run, str):
        return default
    settings = Path(run).resolve().parent.parent / "config.yaml"
    data = load(settings, "run").get("data") if settings.is_file() else None
    if isinstance(data, dict) and "class_path" in data:
        try:
            imported(data["class_path"], "data", (kind,))
        except BadInput as fault:
            raise BadInput("run", run, f"a student of images; its run's data is {fault.value}") from None
    return data


def read_net(folder: str | Path, flag: str, input_shape: tuple[int, ...]) -> tuple[nn.Module, Spec]:
    """The net in a folder that a flag names, in float32 and in eval mode, and its `net.yaml`.

    Raises:
        BadInput: the files are missing or broken, or of a net for other images; or the weights don't fit, and how.
    """
    spec, net = read_spec(folder, flag), load_net(folder, flag)
    made = tuple(spec["init_args"].get("input_shape", input_shape))
    if made != tuple(input_shape):
        raise BadInput(flag, folder, f"a net for inputs {tuple(input_shape)}, as this data has them; it is for {made}")
    return net.float(), spec


@contextmanager
def of_net(flag: str, value: object, *more: str) -> Iterator[None]:
    """Turns errors of torch.export and torchao about a net, and those of `more` flags, into a BadInput of its flag."""
    output = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(output):  # where it fails, torch.export prints the whole graph
            yield
        sys.stderr.write(output.getvalue())
    except BadInput as fault:
        if fault.flag.partition(".")[0] not in {flag, *more}:
            raise
        raise BadInput(flag, value, fault.expected) from None
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(flag, value, f"a net that can be quantised; it says: {said}") from error
    finally:
        logging.disable(logging.NOTSET)


def images_of(data: Any, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images of a data module's split, normalised, float32 (N, C, H, W), and their labels (N,).

    Of `count` images, drawn by the data's seed: the first of a sorted folder are of one class.
    """
    samples = data.split(split)
    size = len(samples.labels)
    chosen = torch.arange(size) if count is None else keyed.permutation(size, keyed.fold_in(data.seed, 5))[:count]
    images, labels = samples.take(chosen)
    return data.normalize(images.cpu(), torch.float32), labels.cpu()
