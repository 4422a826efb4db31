"""Nets of a run that failed, or trained for fewer epochs than planned."""

from collections.abc import Mapping, Sequence

from harness.reports.results import Results, Scores
from harness.reports.tables import join_words
from harness.runs.records import Failure, Header


def planned_epochs(run: Header) -> int | None:
    """Return the epochs of a run's nets, as its settings have them."""
    epochs: int | None = (run.config.get("trainer") or {}).get("max_epochs")
    return epochs


def ended_early(run: Header) -> list[str]:
    """Say which nets of a run trained for fewer epochs than planned; nothing of other experiments."""
    if not isinstance(run, Results):
        return []
    students = {name: student.trained_epochs for name, student in run.students.items()}
    planned = dict.fromkeys(students, planned_epochs(run))
    if run.teacher is None:
        return say_epochs(students, planned) if run.config["trainer"].get("max_time") is not None else []
    planned = {"teacher": run.teacher.max_epochs, **planned}
    return say_epochs({"teacher": run.teacher.trained_epochs, **students}, planned)


def say_epochs(trained: Mapping[str, Scores], planned: Mapping[str, int | None]) -> list[str]:
    """Say which nets trained for fewer epochs than planned, and for how many; `trained` has those of each seed."""
    nets: dict[str, list[str]] = {}
    for name, of_seeds in trained.items():
        epochs = [number for number in of_seeds if number is not None]
        if any(number != planned[name] for number in epochs if number):  # one that learns nothing trains for none
            of = f" of {planned[name]}" if (planned[name] or -1) > 0 else ""
            nets.setdefault(f"{join_words([f'{number:.4g}' for number in epochs])}{of} epochs", []).append(name)
    ended = "; ".join(f"{join_words(names)} after {epochs}" for epochs, names in nets.items())
    why = "by early_stopping, the Trainer's max_time or max_steps, or a callback"
    return [f"Training ended early ({why}), seed by seed: {ended}."] if nets else []


def failures(seeds: Sequence[int], failed: Mapping[str, Sequence[Failure | None]]) -> list[str]:
    """Return one line for each student that failed with a seed, saying where."""
    lines = []
    for name, of_seeds in failed.items():
        pairs = zip(seeds, of_seeds, strict=False)
        if where := [f"seed {seed} (term {f.term}, step {f.step})" for seed, f in pairs if f]:
            left = len(seeds) - len(where)
            rest = f"its figures are over the {left} other seed{'s' * (left > 1)}" if left else "it has no figures"
            lines.append(f"* {name}: the loss stopped being finite with {join_words(where)}; {rest}.")
    return lines


def star_failed(name: str, failed: Sequence[Failure | None]) -> str:
    """Return the name in the table; a star points to the line of its failure."""
    return f"{name} *" if any(failed) else name
