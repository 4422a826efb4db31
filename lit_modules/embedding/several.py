"""Several teachers that embed: the first, which judges, beside others, and a method with a projection for each."""

import copy
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lit_modules.nets.base import Net
from lit_modules.nets.layers import resolve
from lit_modules.objectives.base import Objective, Outputs, Term, select_view
from lit_modules.objectives.context import NO_STEP, StepContext, call
from lit_modules.objectives.sum import Sum

MEMBERS = "nets"  # of the teachers, and how the paths of their layers begin


class SeveralEmbedders(Net):
    """Trained nets that embed the same inputs, frozen, of any widths; the output is the first one's embedding.

    Students learn from all by `SeveralTeachers`, and are judged by the neighbours of the first.

    Args:
        nets: one or more.
        weights: what each counts in what students learn.
    """

    is_trained = True
    embeds = True

    def __init__(self, nets: Sequence[nn.Module], weights: Sequence[float]) -> None:
        super().__init__()
        self.nets, self.weights = nn.ModuleList(nets), [*weights]
        self.requires_grad_(False).eval()

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings (b, D) by the first, of inputs (b, ...); objectives read those of the others."""
        embeddings: list[Tensor] = [net(inputs) for net in self.nets]
        return embeddings[0]


class SeveralTeachers(Sum):
    """The weighted sum of one method beside each of several teachers, with a projection for each.

    As in AM-RADIO (Ranzinger et al. 2024, arXiv:2312.06709), but that a projection is the method's own, not an MLP.
    Its terms are named `<position>.<term>`, by the teacher's position.

    Args:
        objectives: the method, once for each net of `SeveralEmbedders`.
        weights: of the teachers; default: all 1.
    """

    paths: dict[str, Mapping[str, str]]  # by position: the names by which a part reads layers, and where they are

    @classmethod
    def of(cls, objective: Objective, weights: Sequence[float]) -> "SeveralTeachers":
        """Return a method beside as many teachers as there are weights."""
        return cls([copy.deepcopy(objective) for _ in weights], [*weights])

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        self.paths = {}
        for i, objective in self._parts():
            net = teacher.get_submodule(f"{MEMBERS}.{i}")
            objective.choose(student, net)
            names = objective.teacher_layers.values()
            self.paths[i] = {name: f"{MEMBERS}.{i}.{resolve(net, name)}" for name in names}
        self._name_layers()
        layers = {f"objectives.{i}.{name}": path for i, paths in self.paths.items() for name, path in paths.items()}
        self.teacher_layers = {**layers, **{f"{MEMBERS}.{i}": f"{MEMBERS}.{i}" for i in self.paths}}

    def build(self, student: Outputs, teacher: Outputs | None, context: StepContext = NO_STEP) -> None:
        for i, objective in self._parts():
            call(objective.build, student, self._by(i, teacher), context=context)
        self.fewest_related = max(objective.fewest_related for _, objective in self._parts())

    def condense(self, teacher: Outputs) -> Outputs:
        return teacher

    def adapt_teacher(self, teacher: Outputs, context: StepContext = NO_STEP) -> Outputs:
        return teacher

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        terms = dict[str, Term]()
        for i, objective in self._parts():
            of_one = objective.call_forward(select_view(i, student), self._by(i, teacher), labels, context)
            terms |= {
                f"{i}.{x}": term._replace(weight=term.weight * self.weights[int(i)]) for x, term in of_one.items()
            }
        return terms

    def after_batch(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> None:
        for i, objective in self._parts():
            call(objective.after_batch, select_view(i, student), self._by(i, teacher), labels, context=context)

    def _by(self, i: str, teacher: Outputs | None) -> Outputs:
        """Return the outputs of one teacher, as if it were the only one."""
        assert teacher is not None
        features = {name: teacher.features[path] for name, path in self.paths[i].items()}
        return Outputs(teacher.features[f"{MEMBERS}.{i}"], features)
