"""Made-up facts of a bake-off, in the shape in which the experiment hands them over."""

from typing import Any

from harness.reports.results import bake_off_results

TEST = 400
CE = (368, 372, 370)
KD = (376, 379, 379)
HINT = (360, 372, 378)
FAILED = {"step": 120, "term": "kl"}


def header(seeds: int = 3, **config: Any) -> dict[str, Any]:
    return {
        "experiment": "kd",
        "data": {"name": "Digits", "train": 1257, "validation": 140, "test": TEST},
        "hardware": {"cores": 2},
        "versions": {"torch": "2.15.0"},
        "config": {
            "data": {
                "class_path": "datamodules.Digits",
                "init_args": {"batch_size": 128, "seed": 0, "root": "a", **config},
            },
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001, "foreach": None}},
            "trainer": {"max_epochs": 10},
        },
        "seeds": list(range(seeds)),
    }


def teacher(correct: int = 390, **changes: Any) -> dict[str, Any]:
    facts = {"parameters": 1186986, "test_acc": correct / TEST, "test_correct": correct}
    return {**facts, "fit_seconds": 4.5, "step_ms": 32.0, "train_flops": 3_200_000_000_000, **changes}


def student(correct: int, failed: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    facts = {
        "objective": "Hinton(temperature=2)",
        "parameters": 267738,
        "test_acc": None if failed else correct / TEST,
        "test_correct": None if failed else correct,
        "step_ms": 3.0,
        "train_flops": 410_000_000_000,
        "failed": failed,
    }
    return {**facts, **changes}


def results(seeds: int = 3, **students: list[dict[str, Any]]) -> dict[str, Any]:
    """A bake-off of ce, kd and hint, or of these students."""
    usual = {
        name: [student(c) for c in correct[:seeds]] for name, correct in {"ce": CE, "kd": KD, "hint": HINT}.items()
    }
    return bake_off_results(header(seeds), [teacher()] * seeds, students or usual, [12.0] * seeds)
