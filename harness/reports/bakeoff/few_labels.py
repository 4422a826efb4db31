"""What a page says of runs whose students have labels of some samples only, or wrong ones on purpose."""

from collections.abc import Mapping
from typing import Any

from harness.reports.results import Results
from harness.reports.tables import count


def labelled_samples(results: Results) -> int | None:
    """Return how many training samples have labels for the students, if that is not all."""
    labelled: int | None = _data_options(results).get("labelled")
    return labelled


def _data_options(results: Results) -> Mapping[str, Any]:
    options: Mapping[str, Any] = (results.config.get("data") or {}).get("init_args", {})
    return options


def _is_drawn_by_seed(results: Results) -> bool:
    """Return whether each seed has drawn its own labelled samples."""
    return _data_options(results).get("labelled_by") == "seed"


def what_differs(results: Results) -> str:
    """Say what the spread and the intervals over seeds hold, if students had only some labels."""
    if labelled_samples(results) is None:
        return ""
    drawn = ", order and labelled samples" if _is_drawn_by_seed(results) else " and order, not in the labelled samples"
    return f", which differ in initial weights{drawn}"


def notes(results: Results) -> list[str]:
    """Say which labels students and teacher had, if the students had only some, or some are wrong."""
    config, total, labelled = results.config, results.data.get("train"), labelled_samples(results)
    noise, lines = _data_options(results).get("label_noise"), []
    if labelled is not None:
        teacher = "was trained with all labels" if config.get("teacher_ckpt") is None else "was loaded"
        drawn = "which each seed draws" if _is_drawn_by_seed(results) else "the same ones with every seed"
        lines += [
            f"students: labels of {count(labelled)} of {count(total)} training samples, {drawn}; the teacher {teacher}."
        ]
        if config.get("recipe") == "few-labels":
            lines += ["The recipe's settings were chosen, on other seeds, by 144 labelled validation images of Digits."]
        if (validated := results.data.get("validation")) and (chosen := _chosen_by_validation(config)):
            lines += [f"{chosen} by {count(validated)} validation samples, which all have labels."]
    if noise:
        lines += [f"label noise: {100 * noise:g} % of the training labels are another class, on purpose; no others."]
    return lines


def _chosen_by_validation(config: Mapping[str, Any]) -> str:
    """Say what of a run the labels of the validation have chosen; "" for nothing."""
    if config.get("tune"):
        return "The settings were chosen"
    return "Epochs were chosen" if config.get("best_epoch") or config.get("early_stopping") else ""
