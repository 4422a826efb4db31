"""A weighted sum of objectives."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from apprentice.errors import BadInput, naming
from lit_modules.objectives.base import Objective, Outputs, Term, merge_views, select_view, weight
from lit_modules.objectives.context import NO_STEP, StepContext, call
from lit_modules.objectives.text_objective import TextObjective, of_texts
from lit_modules.objectives.top_k import TAILS


class Sum(TextObjective):
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
        texts = [of_texts(objective) for objective in objectives]
        if writers := [o for o, of in zip(objectives, texts, strict=True) if of.on_policy]:
            raise BadInput(
                "objectives", type(writers[0]).__name__, "parts with on_policy 0: a sum has the data's texts"
            )
        self.objectives = nn.ModuleList(objectives)
        self.compares = frozenset.intersection(*(o.compares for o in objectives))
        self.uses_teacher = any(o.uses_teacher for o in objectives)
        self._name_layers()
        self.relates_rows = any(o.relates_rows for o in objectives)
        self.relates_tokens = any(of.relates_tokens for of in texts)
        self.by_token = all(of.by_token for of in texts)
        self.needs_labels = any(o.needs_labels for o in objectives)
        taught = [of_texts(o) for o in objectives if o.uses_teacher]
        self.tails = [tail for tail in TAILS if all(tail in o.tails for o in taught)]
        self.temperatures = {t for o in taught for t in o.temperatures}
        self.peers = [peer for o in objectives for peer in o.peers]
        self.needs = "; ".join(o.needs for o in objectives if o.needs)

    def _name_layers(self) -> None:
        self.student_layers = _prefix_layers(o.student_layers for _, o in self._parts())
        self.teacher_layers = _prefix_layers(o.teacher_layers for _, o in self._parts())

    def _parts(self) -> Iterator[tuple[str, Objective]]:
        """Yield each part with its position."""
        yield from cast("Iterator[tuple[str, Objective]]", self.objectives.named_children())

    def wrap(self, net: nn.Module, teacher: nn.Module, example: Tensor) -> nn.Module:
        """Return the net of the one part that replaces the student's, if any."""
        wrapped = [other for _, o in self._parts() if (other := o.wrap(net, teacher, example)) is not net]
        if len(wrapped) > 1:
            raise BadInput("objectives", len(wrapped), "at most one that replaces the student's net")
        return wrapped[0] if wrapped else net

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        for i, objective in self._parts():
            with naming(f"objectives.{i}"):
                objective.choose(student, teacher)
        self._name_layers()

    def build(self, student: Outputs, teacher: Outputs | None, context: StepContext = NO_STEP) -> None:
        for i, objective in self._parts():
            with naming(f"objectives.{i}"):
                call(objective.build, student, teacher, context=context)
        self.fewest_related = max(objective.fewest_related for _, objective in self._parts())

    def trains_all(self, context: StepContext = NO_STEP) -> bool:
        return any(call(objective.trains_all, context=context) for _, objective in self._parts())

    def phases(self) -> Sequence[float]:
        return sorted({start for _, objective in self._parts() for start in objective.phases()})

    def parts(self) -> list[nn.Module]:
        return [part for _, objective in self._parts() for part in objective.parts()]

    def teacher_parts(self) -> list[nn.Module]:
        return [part for _, objective in self._parts() for part in objective.teacher_parts()]

    def adapt(self, student: Outputs) -> Outputs:
        """Add the features that parts adapt."""
        return _add(student, {i: o.adapt(student) for i, o in self._parts()})

    def condense(self, teacher: Outputs) -> Outputs:
        """Reduce the teacher's outputs to what the parts need."""
        return merge_views(teacher, {i: o.condense(teacher) for i, o in self._parts()})

    def adapt_teacher(self, teacher: Outputs, context: StepContext = NO_STEP) -> Outputs:
        """Add the features that parts adapt."""
        views = {i: call(o.adapt_teacher, select_view(i, teacher), context=context) for i, o in self._parts()}
        return _add(teacher, views)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        return {
            f"{i}.{name}": term._replace(weight=term.weight * self.weights[int(i)])
            for i, objective in self._parts()
            for name, term in objective.call_forward(
                select_view(i, student), teacher and select_view(i, teacher), labels, context
            ).items()
        }

    def after_batch(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> None:
        for i, objective in self._parts():
            outputs = select_view(i, student), teacher and select_view(i, teacher)
            call(objective.after_batch, *outputs, labels, context=context)


def _add(outputs: Outputs, views: Mapping[str, Outputs]) -> Outputs:
    """Return outputs with the features that parts have in their views."""
    merged = merge_views(outputs, views)
    condensed = {**outputs.condensed, **merged.condensed}
    return outputs._replace(features=outputs.features | merged.features, condensed=condensed)


def _prefix_layers(layers: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {f"objectives.{i}.{option}": path for i, paths in enumerate(layers) for option, path in paths.items()}
