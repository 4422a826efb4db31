"""Methods of embeddings equal what other libraries compute, losses and gradients.

Lightly Train is not locked (CONTRIBUTING.md); where it is installed, its third method's own code gives the loss.
"""

import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets import Outputs
from lit_modules.objectives import EmbeddingMatch, MarginMSE, ScoreKL, SimilarityKL, TokenSimilarity
from lit_modules.objectives.context import StepContext
from tests.formulas import assert_equal, total

B, D, K = 5, 6, 4  # samples, values of an embedding, texts of a row
LABELS = torch.full((B,), -1)
CLOSE: Any = {"rtol": 1e-6, "atol": 1e-9}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sentence_transformers_loss(
    name: str, student: Tensor, labels: Tensor, layer: nn.Module | None, **options: Any
) -> Tensor:
    """The loss of rows of embeddings (b, k, D), in whose model a text is its embedding."""
    with warnings.catch_warnings(action="ignore"):  # from what it imports
        from sentence_transformers.sentence_transformer import losses

    loss = getattr(losses, name)(nn.Identity(), **options)
    if layer is not None:
        loss.projection = layer
    return loss([{"sentence_embedding": text} for text in student.unbind(1)], labels)


@pytest.mark.extras("sentence_transformers")
@pytest.mark.parametrize("width", [D, D + 2])
@pytest.mark.parametrize(
    ("distance", "name", "options", "factor"),
    [
        ("cosine", "EmbedDistillLoss", {}, 1),
        ("l2", "EmbedDistillLoss", {"distance_metric": "l2"}, 1),
        ("mse", "EmbedDistillLoss", {"distance_metric": "mse"}, D),  # theirs is the mean over the width
        ("mse", "MSELoss", {}, D),
    ],
)
def test_distances_are_those_of_sentence_transformers(
    distance: Any, name: str, options: dict[str, Any], factor: int, width: int
) -> None:
    student, teacher = draw(0, B, width).requires_grad_(), draw(1, B, D)
    outputs = Outputs(student, {}), Outputs(teacher, {})
    objective = EmbeddingMatch(distance)
    objective.build(*outputs)
    objective.double()
    layer = objective.projection if width != D else None
    theirs = sentence_transformers_loss(name, student[:, None], teacher, layer, **options)
    ours = total(objective(objective.adapt(outputs[0]), outputs[1], LABELS))
    assert_equal(ours, factor * theirs, [student, *objective.parameters()], **CLOSE)


@pytest.mark.extras("sentence_transformers")
@pytest.mark.parametrize(
    ("objective", "name", "options"),
    [
        (MarginMSE(), "MarginMSELoss", {}),
        (ScoreKL(), "DistillKLDivLoss", {}),
        (ScoreKL(0.5, 2.0), "DistillKLDivLoss", {"student_temperature": 0.5, "teacher_temperature": 2.0}),
    ],
)
def test_scores_are_compared_as_in_sentence_transformers(objective: Any, name: str, options: dict[str, Any]) -> None:
    student, scores = draw(0, B, K, D).requires_grad_(), draw(1, B, K - 1)
    outputs = Outputs(student, {}), Outputs(scores, {})
    objective.build(*outputs)
    theirs = sentence_transformers_loss(name, student, scores, None, **options)
    assert_equal(total(objective(*outputs, LABELS)), theirs, student, **CLOSE)


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("size", [(2, 2), (3, 4)])
def test_a_queue_and_tokens_are_the_third_method_of_lightly_train(size: tuple[int, int]) -> None:
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("lightly_train", reason="not locked, as it needs 32 packages: see CONTRIBUTING.md")
        from lightly_train._methods.distillationv3.distillationv3 import DistillationV3
        from lightly_train._methods.distillationv3.distillationv3_loss import DistillationV3Loss

    of_samples, of_places = SimilarityKL(queue=2 * B), TokenSimilarity()
    wrapped = SimpleNamespace(
        forward_features=lambda maps: {"features": maps},
        forward_pool=lambda outputs: {"pooled_features": outputs["features"].mean((2, 3), keepdim=True)},
    )
    method: Any = SimpleNamespace(
        student_embedding_model=SimpleNamespace(wrapped_model=wrapped), teacher_embedding_model=wrapped,
        flatten=nn.Flatten(), teacher_queue=torch.zeros(2 * B, D, dtype=torch.float64),
    )  # fmt: skip
    for number in range(3):
        maps, of_teacher = draw(2 * number, B, D + 2, 2, 2).requires_grad_(), draw(2 * number + 1, B, D, *size)
        student, teacher = (Outputs(x.mean((2, 3)), {"default": x}) for x in (maps, of_teacher))
        if not number:
            of_samples.build(student, teacher, StepContext())
            of_places.build(student, teacher)
            objectives = nn.ModuleList([of_samples, of_places]).double()
            method.student_projection_head_global = of_samples.projection
            method.student_projection_head_local = partial(convolve, of_places.projection)
        t_global, t_local, grid = DistillationV3._forward_teacher(method, of_teacher)
        s_global, s_local = DistillationV3._forward_student(method, maps, *grid)
        DistillationV3._update_queue(method, t_global)
        if number:  # their queue begins with zeros, which have a share; from the second batch on it is full
            theirs = DistillationV3Loss(0.07, 0.07)(t_global, t_local, s_global, s_local, method.teacher_queue)
            ours = [total(o(o.adapt(student), teacher, LABELS)) for o in (of_samples, of_places)]
            assert_equal(torch.stack(ours), torch.stack(theirs), [maps, *objectives.parameters()], **CLOSE)
        of_samples.after_batch(of_samples.adapt(student), teacher, LABELS)


def convolve(layer: Any, places: Tensor) -> Tensor:
    """A convolution over single places, of vectors (..., C) as a linear layer has them."""
    return F.linear(places, layer.weight[:, :, 0, 0], layer.bias)
