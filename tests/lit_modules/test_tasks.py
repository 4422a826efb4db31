"""A new task is one class with its scores: from there kd.py trains, scores and reports it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from datamodules import Digits
from experiments import kd
from harness.reports.samples import unpack_classes
from lit_modules import nets, tasks
from lit_modules.tasks import ACCURACY, METRICS, Classification, ExactMean, Metric, Scores
from tests.commands import results

DISTANCE = replace(
    ACCURACY, name="test_distance", tested=("test_distance",), columns={"test_distance": "test distance"},
    word="distance", unit="grades", higher_is_better=False, scale=1.0, of_samples="test_far",
)  # fmt: skip


class Distances(Scores):
    names = ("distance", "loss")
    trained = ("distance",)
    sampled = ("far", "predicted", "label")

    def __init__(self) -> None:
        super().__init__()
        self.distance, self.loss = ExactMean(), ExactMean()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.distance.update(self.of_sample(logits, labels)["far"])
        self.loss.update(F.cross_entropy(logits, labels, reduction="none"))

    def compute(self) -> dict[str, Tensor]:
        return {"distance": self.distance.compute(), "loss": self.loss.compute()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {"distance": self.of_sample(logits.detach(), labels)["far"]}

    def of_sample(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = logits.argmax(1)
        return {"far": (predicted - labels).abs(), "predicted": predicted, "label": labels}


class Grades(Classification):
    """Classes in an order: a net is as good as its predictions are near."""

    metrics: ClassVar[dict[str, Metric]] = {"accuracy": DISTANCE}

    def scores(self) -> Distances:  # type: ignore[override]
        return Distances()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        grades = torch.arange(logits.shape[-1])
        return (logits.softmax(-1) * (grades - labels[:, None]).abs()).sum(-1)

    def keep_samples(self, values: Any) -> dict[str, Any]:
        predicted, labels = (values[name].astype(np.int64) for name in ("predicted", "label"))
        return {"far": values["far"], "predicted": predicted, "labels": labels}

    def average_samples(self, values: Any) -> dict[str, float]:
        return {}


class GradedDigits(Digits):
    task = "grades"


def test_a_new_task_is_one_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tasks, "TASKS", {**tasks.TASKS, "grades": Grades})
    monkeypatch.setitem(METRICS, DISTANCE.name, DISTANCE)
    run = tmp_path / "run"
    flags = ["--data", f"{__name__}.GradedDigits", "--data.train_size", "200", "--teacher", "LightNN", "--only", "ce"]
    kd.main([*flags, "--seeds", "2", "--trainer.max_epochs", "2", "--trainer.logger", "false", "--out", str(run)])
    saved = results(run)
    assert saved["metric"] == {"name": "test_distance", "higher_is_better": False}
    assert "test distance" in (run / "results.md").read_text()
    truth, teacher = unpack_classes(saved["teacher"]["test_labels"]), saved["teacher"]
    for predicted, distance in zip(teacher["test_predicted"], teacher["test_distance"], strict=True):
        assert distance == pytest.approx(np.abs(unpack_classes(predicted) - truth).mean())
    assert all("val/distance" in epoch for epoch in saved["students"]["ce"]["epochs"][0])


class HuggingFaceLM(nets.LightNN):
    pass


def test_a_net_of_any_name_brings_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "Text", "--teacher", f"{__name__}.HuggingFaceLM", "--student", "GPT"]
    with pytest.raises(SystemExit) as stop:
        kd.main([*flags, "--out", str(tmp_path / "a")])
    assert stop.value.code == 2
    assert "expected a net that takes inputs (64,)" in capsys.readouterr().err
