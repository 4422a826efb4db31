"""Tasks: what labels and outputs mean, and how nets are scored. A new task is a file and a line below."""

from collections.abc import Mapping
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from apprentice.errors import BadInput
from apprentice.faces import import_when_used
from lit_modules.nets.outputs import CLASSES
from lit_modules.tasks.base import LABELLED, TOKENS, Metric, Range, Task
from lit_modules.tasks.classification import ACCURACY, Classification, ClassMetric, ClassScores
from lit_modules.tasks.own_metric import OwnMetric, describe_own
from lit_modules.tasks.scores import ExactMean, Scores

if TYPE_CHECKING:
    from lit_modules.tasks.tokens import ANSWERS, BITS, BYTES, Tokens, TokenScores
else:  # of texts alone
    __getattr__ = import_when_used(
        __name__, dict.fromkeys(("ANSWERS", "BITS", "BYTES", "Tokens", "TokenScores"), "tokens")
    )

# By the name that a data module has as its `task`; imported when one is asked for.
TASKS = {
    "classification": "lit_modules.tasks.classification.Classification",
    "multilabel": "lit_modules.tasks.multilabel.MultiLabel",
    "regression": "lit_modules.tasks.regression.Regression",
    "tokens": "lit_modules.tasks.tokens.Tokens",
    "embedding": "lit_modules.embedding.task.Embedding",
    "retrieval": "lit_modules.embedding.retrieval.Retrieval",
}


def task_class(name: str) -> type[Task]:
    """The class of a task; LookupError if there is no such task."""
    task: type[Task] = resolve_name(TASKS[name])
    return task


@cache
def known_metrics() -> dict[str, Metric]:
    """The metrics of all tasks by their names, those of a task in its order."""
    return {metric.name: metric for name in TASKS for metric in task_class(name).metrics.values()}


def metric_of(facts: Mapping[str, Any]) -> Metric:
    """The metric of a run, as results.json has it; LookupError if there is no such metric."""
    if "path" in facts:
        return describe_own(str(facts["name"]).removeprefix("test_"), bool(facts["higher_is_better"]))
    return known_metrics()[facts["name"]]


def task_of(data: Any, metric: str | OwnMetric | None = None) -> Task:
    """The task of a data module, with nets judged by a metric of it; BadInput if there is no such task or metric."""
    if data.task not in TASKS:
        raise BadInput("data", data.name, f"data for a task of {', '.join(TASKS)}; its task is {data.task}")
    return task_class(data.task).of_data(data, metric)
