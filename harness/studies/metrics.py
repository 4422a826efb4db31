"""What `metric` chooses from: names of ours, torchmetrics' classes and functions by import path."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, get_args

import torchmetrics

from apprentice.errors import BadInput
from harness.cli.classes import Classes, import_target
from harness.cli.messages import near
from lit_modules.tasks import ClassMetric

OTHERS = frozenset({"map", "exact", "label_acc", "r2", "mae"})  # of tasks whose labels are no classes
DATA = frozenset({"num_classes"})  # arguments that no flag sets


@dataclass(frozen=True)
class MetricClasses(Classes):
    """Names, which stay text, and import paths."""

    bases: tuple[type, ...] = (torchmetrics.Metric,)
    package: ModuleType = torchmetrics
    skip: frozenset[str] = field(default=DATA)

    @property
    def by_name(self) -> dict[str, type]:
        return dict.fromkeys(get_args(ClassMetric), torchmetrics.Metric)

    def find(self, name: Any, key: str) -> tuple[Any, Mapping[str, Any]]:
        """Return a name of ours as it is, else the class or function at an import path."""
        if name in self.by_name or name in OTHERS:
            return name, {}
        if not isinstance(name, str) or "." not in name:
            raise BadInput(key, name, self.expected(name))
        target = import_target(name, key)
        if inspect.isclass(target) and not issubclass(target, self.bases):
            raise BadInput(key, name, "a class derived from torchmetrics.Metric, or a function (logits, labels)")
        return target, {}

    def is_same(self, name: Any, old: Any, options: Mapping[str, Any]) -> bool:
        return bool(name == old)

    def path(self, chosen: Any, name: str) -> str:
        return name

    def arguments_to_skip(self, chosen: Any) -> frozenset[str]:
        """Return what the data fixes, and of a function the first two: logits and labels."""
        first = () if inspect.isclass(chosen) else [*inspect.signature(chosen).parameters][:2]
        return self.skip.union(first)

    def expected(self, name: Any = "") -> str:
        names = list(self.by_name)
        return f"{', '.join(names)} or the import path of a torchmetrics class or a function{near(name, names)}"
