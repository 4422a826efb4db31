"""What net.yaml holds of a net: how to rebuild it, and what users need beside, as each exported file has it, too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Self

import yaml

from apprentice.errors import BadInput
from datamodules.preparation import Preparation
from lit_modules.nets.specs import UnplainError, to_plain
from lit_modules.tasks import TASKS

Spec = dict[str, Any]
# In net.yaml; those of older versions have the first or none.
KEYS = ("classes", "task", "inputs", "versions", "commit", "taught_by", "configuration")


@dataclass(frozen=True, kw_only=True)
class NetFacts:
    """What users of a trained net need.

    Args:
        task: what its outputs mean, by its name in `lit_modules.tasks`.
        inputs: how raw samples become its inputs.
        classes: names of its logits' classes, in their order; empty if they have none.
        versions: of the packages with which it was trained.
        commit: of the code that trained it, with `-dirty` for a changed checkout; None if that is not known.
        taught_by: of a student that learnt from others than `teacher`, their folders beside its own, and weights.
        configuration: of models of transformers, whose folders may change: what these had, by the path in the net.
    """

    task: str
    inputs: Preparation
    classes: tuple[str, ...] = ()
    versions: Mapping[str, str]
    commit: str | None = None
    taught_by: Mapping[str, float] = field(default_factory=dict)
    configuration: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_plain` wrote; TypeError, ValueError or LookupError if it is something else."""
        if facts["task"] not in TASKS:
            raise ValueError(facts["task"])
        versions = {str(name): str(version) for name, version in facts["versions"].items()}
        classes, commit = tuple(map(str, facts.get("classes", ()))), facts["commit"]
        return cls(
            task=facts["task"], inputs=Preparation.read(facts["inputs"]), classes=classes, versions=versions,
            commit=None if commit is None else str(commit),
            taught_by={str(name): float(weight) for name, weight in facts.get("taught_by", {}).items()},
            configuration={str(path): dict(settings) for path, settings in facts.get("configuration", {}).items()},
        )  # fmt: skip

    def to_plain(self) -> dict[str, Any]:
        """Return it as net.yaml has it."""
        classes = {"classes": [*self.classes]} if self.classes else {}
        rest = {"inputs": self.inputs.to_plain(), "versions": {**self.versions}, "commit": self.commit}
        taught_by = {"taught_by": {**self.taught_by}} if self.taught_by else {}
        configuration = {"configuration": {**self.configuration}} if self.configuration else {}
        return {**classes, "task": self.task, **rest, **taught_by, **configuration}


def spec(net_class: str, arguments: Mapping[str, Any]) -> Spec:
    """Return what `net.yaml` holds: the class's import path and its arguments; BadInput if YAML can't hold one."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    for key, value in arguments.items():
        if isinstance(value, type | FunctionType):
            try:
                plain[key] = to_plain(value)
            except UnplainError:
                expected = "a class, or a function that is annotated to return an nn.Module, of a file's top level"
                raise BadInput(key, getattr(value, "__name__", value), expected) from None
    try:
        yaml.safe_dump(plain)
    except yaml.YAMLError:
        raise BadInput(net_class, plain, "arguments that a file can hold: numbers, texts, lists of them") from None
    return {"class_path": net_class, "init_args": plain}
