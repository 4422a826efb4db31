"""What to do with a finished run: commands that its last lines name."""

import shlex

from harness.reports.results import Results
from harness.runs.session import Session
from harness.start import called_as
from harness.studies.kinds import DataKind, command_line


def next_steps(session: Session, kind: DataKind, net: str | None) -> str:
    """Write a line for the report, the curves and each command; `net` is the name of the one to use, if there is one.

    Words in capitals stand for what only the user knows.
    """
    out = shlex.quote(str(session.out))
    steps = {"report": f"{out}/report.html, results.md, .png, .json"}
    if session.tensorboard:
        steps["curves"] = f"tensorboard --logdir {out}"
    steps["compare"] = f"{called_as('compare.py')} {out} OTHER_RUN"
    if net is not None:
        folder = shlex.quote(f"{session.out}/seed{session.config.seeds[0]}/{net}")
        steps |= kind.next_steps(session, folder)
        steps["export"] = command_line("export.py", run=folder)
    return "\n".join(f"{step:8}  {line}" for step, line in steps.items())


def best_student(results: Results) -> str | None:
    """Return the student with the best mean score among those that failed with no seed."""
    sign = 1 if results.metric.higher_is_better else -1
    means: dict[str, float] = {}
    for name, student in results.students.items():
        scores = [score for score in student.scores[results.metric.name] if score is not None]
        if len(scores) == len(results.seeds):
            means[name] = sign * sum(scores)
    return max(means, key=means.__getitem__, default=None)
