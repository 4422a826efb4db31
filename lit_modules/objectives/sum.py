"""Several objectives at once."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term, weight

OWN = ">"  # between a part's position and the path of a feature that is its own; no path has it


class Sum(Objective):
    """The weighted sum of objectives, itself an objective: the tutorial suggests soft targets and cosine together.

    Its terms are named `<position>.<term>`, so that two objectives of one kind keep their own.

    Args:
        objectives: the parts.
        weights: a weight for each part; all 1 unless given.
    """

    def __init__(self, objectives: list[Objective], weights: list[float] | None = None) -> None:
        super().__init__()
        if not objectives:
            raise BadInput("objectives", objectives, "at least one objective")
        self.weights = [weight("weights", w) for w in weights or [1.0] * len(objectives)]
        if len(self.weights) != len(objectives):
            raise BadInput("weights", weights, f"{len(objectives)} weights, one for each objective")
        self.objectives = nn.ModuleList(objectives)
        self.uses_teacher = any(o.uses_teacher for o in objectives)
        self.student_layers = _of_parts(o.student_layers for o in objectives)
        self.teacher_layers = _of_parts(o.teacher_layers for o in objectives)
        self.relates_rows = any(o.relates_rows for o in objectives)
        self.needs = "; ".join(o.needs for o in objectives if o.needs)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:  # noqa: D102
        for i, objective in enumerate(self.objectives):
            try:
                objective.build(student, teacher)  # type: ignore[operator]
            except BadInput as fault:
                raise BadInput(f"objectives.{i}.{fault.flag}", fault.value, fault.expected) from None

    def parts(self) -> list[nn.Module]:
        """Those of all objectives."""
        return [part for objective in self.objectives for part in objective.parts()]  # type: ignore[operator]

    def adapt(self, student: Outputs) -> Outputs:
        """The student's outputs, and beside its features those that a part has made, as `<position>><path>`."""
        features = dict(student.features)
        for i, objective in enumerate(self.objectives):
            adapted = objective.adapt(student).features  # type: ignore[operator]
            own = {path: x for path, x in adapted.items() if x is not student.features.get(path)}
            features |= {f"{i}{OWN}{path}": x for path, x in own.items()}
        return student._replace(features=features)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        return {
            f"{i}.{name}": term._replace(weight=term.weight * part)
            for i, (objective, part) in enumerate(zip(self.objectives, self.weights, strict=True))
            for name, term in objective(_seen_by(i, student), teacher, labels).items()
        }


def _of_parts(layers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {f"objectives.{i}.{flag}": path for i, named in enumerate(layers) for flag, path in named.items()}


def _seen_by(position: int, student: Outputs) -> Outputs:
    """The student's features as one part has adapted them, without those of the others."""
    prefix = f"{position}{OWN}"
    raw = {path: x for path, x in student.features.items() if OWN not in path}
    own = {path.removeprefix(prefix): x for path, x in student.features.items() if path.startswith(prefix)}
    return student._replace(features=raw | own)
