"""Made-up facts of runs: of a bake-off as the experiment hands them over, of gpt.py as results.json."""

from typing import Any

from harness.reports.combine import combine
from harness.reports.results import Results
from harness.runs.records import FitRecord, Header, NetRecord
from lit_modules.tasks import BITS

TEST = 400
CE = (368, 372, 370)
FREE = ["out", "resume", "overwrite", "checkpoint_every", "trainer.devices", "trainer.strategy", "trainer.logger"]
SAMPLES: dict[str, Any] = {"fingerprint": {}, "commits": []}
KD = (376, 379, 379)
HINT = (360, 372, 378)
FAILED = {"step": 120, "term": "kl"}


def choice(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


def header(seeds: int = 3, **config: Any) -> Header:
    facts = {
        "experiment": "kd",
        "data": {"name": "Digits", "train": 1257, "validation": 140, "test": TEST},
        "hardware": {"cores": 2},
        "versions": {"torch": "2.15.0"},
        "config": {
            "data": choice("datamodules.Digits", **{"batch_size": 128, "seed": 0, "root": "a", **config}),
            "optimizer": choice("torch.optim.Adam", lr=0.001, foreach=None),
            "variants": {
                "ce": {"class_path": "lit_modules.objectives.CrossEntropy"},
                "kd": choice("lit_modules.objectives.Hinton", temperature=2.0, off=None),
            },
            "trainer": {"max_epochs": 10},
        },
        "free": FREE,
        "seeds": list(range(seeds)),
        **SAMPLES,
    }
    return Header.read(facts)


def net(correct: int | None, failed: dict[str, Any] | None, changes: dict[str, Any], **facts: Any) -> NetRecord:
    """A record with so many correct predictions, changed; figures are those of `facts`, and those changed of them."""
    scores = {"test_acc": correct and correct / TEST, "test_correct": correct}
    if failed:
        scores = dict.fromkeys(scores)
    return NetRecord.from_json({"failed": failed, "trained_epochs": None, "epochs": [], **facts, **scores, **changes})


def teacher(correct: int = 390, **changes: Any) -> FitRecord:
    """A fit of a teacher, changed."""
    fit = {"fit_seconds": 4.5, "max_epochs": None}
    fit |= {key: changes.pop(key) for key in fit if key in changes}
    facts = {"objective": "CrossEntropy", "parameters": 1186986, "step_ms": 32.0, "train_flops": 3_200_000_000_000}
    return FitRecord(**fit, nets={"teacher": net(correct, None, changes, **facts)})


def student(correct: int, failed: dict[str, Any] | None = None, **changes: Any) -> NetRecord:
    """A record of a student, changed."""
    facts = {"objective": "Hinton(temperature=2)", "parameters": 267738, "step_ms": 3.0, "train_flops": 410_000_000_000}
    return net(correct, failed, changes, **facts)


def results(seeds: int = 3, **students: list[NetRecord]) -> Results:
    """A bake-off of ce, kd and hint, or of these students."""
    usual = {
        name: [student(c) for c in correct[:seeds]] for name, correct in {"ce": CE, "kd": KD, "hint": HINT}.items()
    }
    return combine(header(seeds), [teacher()] * seeds, students or usual, [12.0] * seeds)


def gpt(bits: list[float], **changes: Any) -> dict[str, Any]:
    """A run of gpt.py with these bits per character, one a seed; `net__num_layers=6` changes a setting."""
    config: dict[str, Any] = {
        "data": {"path": None, "block_size": 64, "batch_size": 12},
        "net": choice("lit_modules.nets.GPT", num_layers=4),
        "model": {"lr": 0.003},
        "trainer": {"max_epochs": -1, "max_steps": 100},
        "temperature": 0.8,
    }
    for name, value in changes.items():
        *groups, last = name.split("__")
        inner = config[groups[0]] if groups else config
        inner.get("init_args", inner)[last] = value
    facts = {
        "experiment": "gpt",
        "data": {"name": "Text", "train": 900, "validation": 100, "test": 100},
        "hardware": {},
        "versions": {},
        "config": config,
        "free": FREE,
        "seeds": list(range(len(bits))),
        **SAMPLES,
    }
    figures = {"objective": "CrossEntropy", "parameters": 81472, "step_ms": 32.5, "train_flops": 404_000_000_000}
    records = [
        NetRecord.from_json({**figures, "test_bpc": each, "test_loss": each, "failed": None, "epochs": []})
        for each in bits
    ]
    return combine(Header.read(facts), [], {"gpt": records}, [1.0] * len(bits), BITS).to_json()
