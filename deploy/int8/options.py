"""The options of quantize.py, and the data that a student's run was trained on."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from apprentice.errors import BadInput
from deploy.net_path import net_path
from harness import cli
from harness.cli import sources
from harness.cli.classes import import_class
from harness.runs.options import OneSeedOptions


@dataclass
class Options(OneSeedOptions):
    """Options of the study."""

    run: str | None = None
    """a student's folder, such as RUN/seed0/kd; when not given, one is trained."""
    teacher: str | None = None
    """its teacher's folder, for an objective that asks it; RUN/seed0/teacher if that is there."""
    student_epochs: int = cli.option(10, cli.COUNT)
    """of a student that is trained here, by Adam with a learning rate of 0.001."""
    freeze_epoch: int = cli.option(2, cli.COUNT)
    """from this epoch on, counted from 0, ranges and BatchNorm's statistics stay as they are."""
    evaluate_every: int = cli.option(1, cli.COUNT)
    """epochs from one int8 validation to the next."""
    calibration_size: int = cli.option(512, cli.COUNT)
    """training samples that post-training quantisation takes its ranges from."""
    why_one: ClassVar[str] = "one student is deployed"
    idle: ClassVar[Collection[str]] = ("num_classes",)
    why_inexact: ClassVar[str] = "ranges are the global batch's, not a shard's"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is not None and self.student_epochs != Options.student_epochs:
            expected = "not allowed with `run`, whose student is trained already"
            raise BadInput("student_epochs", self.student_epochs, expected)


def data_of_run(argv: Sequence[str], default: Any, kind: type) -> Any:
    """Return the default of `data`: that of the run which the flags or their files name, as its config.yaml has it.

    `default` where no run is named, None where the run has no such file; BadInput if the data are not of class `kind`.
    """
    runs = [layer["run"].value for layer in sources.read(argv)[0] if "run" in layer]
    run = runs[-1] if runs else None
    if not isinstance(run, str):
        return default
    settings = net_path(run).run / "config.yaml"
    data = sources.load(settings, "run").get("data") if settings.is_file() else None
    if isinstance(data, dict) and "class_path" in data:
        try:
            import_class(data["class_path"], "data", (kind,))
        except BadInput as fault:
            raise BadInput("run", run, f"a student of images; its run's data is {fault.value}") from None
    return data
