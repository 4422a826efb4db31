"""A student's attention is aligned with the teacher's, block by block, then its logits (MOHAWK, LoLCATs)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.families import family_of
from lit_modules.nets.gpt import GPT
from lit_modules.nets.hugging_face import HuggingFaceLM
from lit_modules.nets.layers import INPUT
from lit_modules.nets.projections import Projections, find_projections, hide_later, products
from lit_modules.objectives.base import Outputs, Term, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.hinton import Hinton
from lit_modules.objectives.search import Linear, Log, space


class Linearize(Hinton):
    """First the mixers of a student's blocks, each on what the teacher's reads; then the objective of `Hinton`.

    A run has up to three phases, of which each trains one of these terms:

    - maps: mean over replaced blocks and heads of ||M_s - M_t||^2 for each token: of what it gives to all tokens.
    - mixers: mean over replaced blocks and channels of (y_s - y_t)^2, for each token.
    - kd and ce: those of Hinton.

    y_s is the output of the student's mixer for the inputs of the teacher's attention in the same block, and y_t that
    attention's own output; M are their mixing matrices (T, T) of each head. So blocks learn apart from one another, and
    nothing but mixers has a gradient in these phases. Blocks with softmax attention (of a `Mixer` with
    `softmax_layers`) are not compared.

    Source: Bick et al. 2024, "Transformers to SSMs: Distilling Quadratic Knowledge to Subquadratic Models" (MOHAWK,
    arXiv:2408.10189), whose three stages these are; Zhang et al. 2024, "LoLCATs" (arXiv:2410.10254) and Goldstein et
    al. 2025, "RADLADS" (arXiv:2505.03005), which have no maps. All train far longer.

    Args:
        mixers_until: share of the training after which mixers are aligned.
        maps_until: share of the training in which maps are, before their outputs; 0 for none.
        mixers_weight: weight of the mixers' outputs.
        maps_weight: weight of the maps.
        temperature: that of Hinton.
        kd_weight: that of Hinton.
        ce_weight: that of Hinton.

    Raises:
        BadInput: in `choose`, the nets' blocks are not those of one another, or all have softmax attention.
    """

    by_token, relates_tokens, tails = False, True, ()
    search = space(mixers_until=Linear(0.2, 0.8), kd_weight=Log(0.1, 10))
    needs = "`student Mixer`, which is made of the teacher"

    def __init__(
        self,
        mixers_until: float = 0.5,
        maps_until: float = 0.0,
        mixers_weight: float = 1.0,
        maps_weight: float = 1.0,
        temperature: float = 1.0,
        kd_weight: float = 1.0,
        ce_weight: float = 0.0,
    ) -> None:
        super().__init__(temperature, kd_weight, ce_weight)
        for name, value in {"mixers_until": mixers_until, "maps_until": maps_until}.items():
            if not 0 <= value <= 1:
                raise BadInput(name, value, "a share of the training, 0 to 1")
        if maps_until > mixers_until:
            raise BadInput("maps_until", maps_until, f"at most mixers_until, {mixers_until:g}")
        self.mixers_until, self.maps_until = mixers_until, maps_until
        self.mixers_weight, self.maps_weight = (
            weight("mixers_weight", mixers_weight),
            weight("maps_weight", maps_weight),
        )
        self.width = 0  # of the student's tokens
        self.mixers: tuple[Any, ...] = ()  # of the student: in a tuple, as they are no parts of the objective
        self.attention: list[tuple[str, str]] = []  # paths of the teacher's: of inputs and outputs
        self.projections: list[Projections] = []

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Find the student's mixers, and where the teacher's attention in the same blocks reads and writes."""
        if not isinstance(student, GPT):
            raise BadInput("student", type(student).__name__, self.needs)
        mixers = [block.get_submodule("attention") for block in student.blocks]
        numbers = [number for number, mixer in enumerate(mixers) if not isinstance(mixer, SelfAttention)]
        if not numbers:
            raise BadInput("student", type(student).__name__, f"{self.needs}: all its blocks have softmax attention")
        if len(mixers) != len(getattr(teacher, "stages", ())):
            expected = f"{self.needs}: a student with as many blocks as the teacher, and not {len(mixers)}"
            raise BadInput("student", type(student).__name__, expected)
        self.mixers = tuple(mixers[number] for number in numbers)
        if self.mixers_until and not any(True for mixer in self.mixers for _ in mixer.parameters()):
            expected = f"0: {type(self.mixers[0]).__name__} has no parameters, which would be trained"
            raise BadInput("mixers_until", self.mixers_until, expected)
        self.width = student.embedding.tokens.embedding_dim
        self.attention = [_attention_of(teacher, number) for number in numbers]
        layers = {f"teacher_inputs.{n}": path for n, (path, _) in enumerate(self.attention)}
        layers |= {f"teacher_outputs.{n}": path for n, (_, path) in enumerate(self.attention)}
        if self.maps_until:
            stages = {f"teacher_stages.{number}": f"stage{number + 1}" for number in numbers}
            self.projections = [find_projections(teacher, stage, option) for option, stage in stages.items()]
            paths = [path for projections in self.projections for path in projections.paths]
            layers |= {f"teacher_projections.{n}": path for n, path in enumerate(paths)}
            if unable := next((mixer for mixer in self.mixers if not hasattr(mixer, "weights")), None):
                raise BadInput("maps_until", self.maps_until, f"0: {type(unable).__name__} gives no weights of tokens")
        self.teacher_layers = layers

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        assert teacher is not None
        for mixer, (inputs, outputs) in zip(self.mixers, self.attention, strict=True):
            for path in (inputs, outputs):
                if (width := teacher.features[path].shape[-1]) != self.width:
                    expected = f"{self.needs}: tokens as wide as the teacher's {width}, and not {self.width}"
                    raise BadInput("student", type(mixer).__name__, expected)

    def parts(self) -> list[nn.Module]:
        return [*self.mixers]

    def teacher_parts(self) -> list[nn.Module]:
        return [*self.mixers]

    def phase(self, progress: float) -> str:
        """Return what is trained now: maps, mixers or logits."""
        return "maps" if progress < self.maps_until else "mixers" if progress < self.mixers_until else "logits"

    def phases(self) -> Sequence[float]:
        return sorted({0.0, self.maps_until, self.mixers_until} - {1.0})

    def trains_all(self, context: StepContext = NO_STEP) -> bool:
        return self.phase(context.progress) == "logits"

    def adapt_teacher(self, teacher: Outputs, context: StepContext = NO_STEP) -> Outputs:
        """Add what the phase compares, (b, T) of each block: how far the student's mixer is from the attention."""
        gaps, phase = dict[str, Tensor](), self.phase(context.progress)
        for number, (mixer, (inputs, outputs)) in enumerate(zip(self.mixers, self.attention, strict=True)):
            x = teacher.features[inputs]
            if phase == "mixers":
                gaps[f"mixers.{number}"] = (widen(mixer(x)) - widen(teacher.features[outputs])).square().mean(-1)
            elif phase == "maps":  # the rest of the mixer gets a gradient of zero, on each kind of hardware
                gaps[f"maps.{number}"] = self._map_gap(number, mixer.weights(x), teacher) + 0 * widen(mixer(x)).mean(-1)
        return Outputs(teacher.logits, gaps)

    def _map_gap(self, number: int, weights: Tensor, teacher: Outputs) -> Tensor:
        """(b, T) of the student's map (b, H, T, T) and what the teacher's projections give."""
        projections = self.projections[number]
        query, key, _ = projections.split([teacher.features[path] for path in projections.paths])
        expected = hide_later(products(query, key, projections.scale_of(query.shape[3]))).softmax(-1)  # (b, T, H, T)
        return (weights.transpose(1, 2) - expected).square().sum(-1).mean(-1)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        phase = self.phase(context.progress)
        if phase == "logits":
            return super().forward(student, teacher, labels)
        assert teacher is not None
        gaps = [teacher.features[f"{phase}.{number}"] for number in range(len(self.mixers))]
        weights = {"maps": self.maps_weight, "mixers": self.mixers_weight}
        return {phase: Term(torch.stack(gaps).mean(0), weights[phase])}


def _attention_of(teacher: nn.Module, number: int) -> tuple[str, str]:
    """Return the paths of what the attention of a teacher's block reads and writes; BadInput if that is not known."""
    if isinstance(teacher, GPT):
        return f"blocks.{number}.attention{INPUT}", f"blocks.{number}.attention"
    if not isinstance(teacher, HuggingFaceLM):
        raise BadInput("teacher", type(teacher).__name__, "GPT, or a HuggingFaceLM of a family that GPT.from_hf reads")
    names = family_of(teacher.model.config).names
    before, after = names.inside["attention.qkv"].split()[0], names.inside["attention.out"]
    return f"model.{names.blocks}{number}.{before}{INPUT}", f"model.{names.blocks}{number}.{after}"
