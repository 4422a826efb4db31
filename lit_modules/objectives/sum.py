"""A weighted sum of objectives."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term, weight

OWN = ">"  # separates a part's position from the path of a feature that it made; no path contains it


class Sum(Objective):
    """The weighted sum of objectives, such as the tutorial's suggestion of soft targets and cosine together.

    Its terms are named `<position>.<term>`, which keeps those of two objectives of one kind apart.

    Args:
        objectives: the parts.
        weights: a weight for each part; default: all 1.
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
        """The parts of all objectives."""
        return [part for objective in self.objectives for part in objective.parts()]  # type: ignore[operator]

    def adapt(self, student: Outputs) -> Outputs:
        """The student's outputs, with the features that parts made added as `<position>><path>`."""
        own = {
            f"{i}{OWN}{path}": x
            for i, objective in enumerate(self.objectives)
            for path, x in objective.adapt(student).features.items()  # type: ignore[operator]
            if x is not student.features.get(path)
        }
        return student._replace(features=student.features | own)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        return {
            f"{i}.{name}": term._replace(weight=term.weight * part)
            for i, (objective, part) in enumerate(zip(self.objectives, self.weights, strict=True))
            for name, term in objective(_view_of(i, student), teacher, labels).items()
        }


def _of_parts(layers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {f"objectives.{i}.{flag}": path for i, named in enumerate(layers) for flag, path in named.items()}


def _view_of(position: int, student: Outputs) -> Outputs:
    """The student's outputs as one part adapted them, without the features that other parts made."""
    prefix = f"{position}{OWN}"
    raw = {path: x for path, x in student.features.items() if OWN not in path}
    own = {path.removeprefix(prefix): x for path, x in student.features.items() if path.startswith(prefix)}
    return student._replace(features=raw | own)
