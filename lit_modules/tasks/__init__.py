"""Tasks: what labels and outputs mean, and how nets are scored. A new task is a file here and a line below."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from apprentice.errors import BadInput
from lit_modules.tasks.base import LABELLED, TOKENS, Metric, Range, Task
from lit_modules.tasks.classification import ACCURACY, Classification, ClassMetric, ClassScores
from lit_modules.tasks.own_metric import OwnMetric, describe_own
from lit_modules.tasks.scores import ExactMean, Scores
from lit_modules.tasks.tokens import ANSWERS, BITS, BYTES, Tokens, TokenScores

# By the name that a data module has as its `task`.
TASKS: Mapping[str, type[Task]] = MappingProxyType({"classification": Classification, "tokens": Tokens})
METRICS = {metric.name: metric for task in TASKS.values() for metric in task.metrics.values()}


def metric_of(facts: Mapping[str, Any]) -> Metric:
    """The metric of a run, as results.json has it; LookupError if there is no such metric."""
    if "path" in facts:
        return describe_own(str(facts["name"]).removeprefix("test_"), bool(facts["higher_is_better"]))
    return METRICS[facts["name"]]


def task_of(data: Any, metric: str | OwnMetric | None = None) -> Task:
    """The task of a data module, with nets judged by a metric of it; BadInput if there is no such task or metric."""
    if data.task not in TASKS:
        raise BadInput("data", data.name, f"data for a task of {', '.join(TASKS)}; its task is {data.task}")
    return TASKS[data.task].of_data(data, metric)
