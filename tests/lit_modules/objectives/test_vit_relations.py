"""Relations of attention in ViTs (MiniLM, TinyBERT, AttnDistill) against formulas in float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import Batch
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.distillation import Distillation
from lit_modules.nets import GPT, ResNet, Timm, ViT, attention_maps
from lit_modules.nets.projections import find_projections
from lit_modules.objectives import AttentionScores, AttnDistill, MiniLM, Objective
from tests.attention import parts
from tests.training import SHAPE, assert_same, digits, fit, net, on, weights

B, IMAGE = 3, (1, 4, 6)
LABELS = torch.tensor([0, 2, 1])


def vit(seed: int, width: int, patch: int = 2, heads: int = 2, **options: Any) -> ViT:
    def make() -> ViT:
        made = ViT(patch, width, num_heads=heads, input_shape=IMAGE, num_classes=3, **options)
        for parameter in made.parameters():  # attention of initial weights is nearly even
            nn.init.normal_(parameter, std=0.7)
        return made

    return with_seed(seed, make)


def module(objective: Objective, teacher: ViT | None = None, student: ViT | None = None) -> Distillation:
    nets = teacher or vit(1, 16, num_layers=4), student or vit(0, 8, num_layers=2)
    return Distillation(nets[0], {"r": (nets[1], objective)}, IMAGE, 3).double()


def check(made: Distillation, formula: Callable[[Any, Any, Tensor], Tensor], ce_weight: float) -> None:
    """The loss and its gradients, the mean over images of the formula's values (b,)."""
    images = torch.randn(B, *IMAGE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = made.losses(made(images), Batch.of((images, LABELS), 0))[0]
    student = made.students["r"].net
    values = formula(student, made.teacher, images)
    assert values.min() > 1e-4
    expected = values.mean() + ce_weight * F.cross_entropy(student(images), LABELS)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    parameters = [*student.parameters()]
    found, wanted = (torch.autograd.grad(x, parameters) for x in (loss, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


def test_minilm_compares_all_tokens_of_an_image() -> None:
    def formula(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
        s, t = (parts(model, images)[-1] for model in (student, teacher))
        total = torch.zeros(B, dtype=torch.float64)
        for weight, (a, b) in {2.0: (0, 1), 3.0: (2, 2)}.items():
            q, p = ((x[a] @ x[b].mT / math.sqrt(x[a].shape[-1])).softmax(-1) for x in (s, t))
            total = total + weight * divergence(p.detach(), q).mean((1, 2))
        return total

    check(module(MiniLM(2.0, 3.0, ce_weight=0.7)), formula, 0.7)


def test_attention_scores_pair_all_blocks_of_the_student() -> None:
    def formula(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
        ours, theirs = parts(student, images), parts(teacher, images)
        total = torch.zeros(B, dtype=torch.float64)
        for m, (query, key, _) in enumerate(ours):
            q, k, _ = theirs[2 * m + 1]
            total = total + (query @ key.mT / 2 - (q @ k.mT / 8**0.5).detach()).square().mean((1, 2, 3)) / 2
        return total * 1.5

    check(module(AttentionScores(1.5, 0.3)), formula, 0.3)


def class_rows(model: ViT, images: Tensor) -> Tensor:
    """The class token's weights (b, heads, 1 + patches) over itself and the patches, in the last block."""
    query, key, _ = parts(model, images)[-1]
    key = torch.cat([key[:, :, :1], key[:, :, model.num_tokens :]], 2)
    return (query[:, :, :1] @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)[:, :, 0]


def cubic(size: int, new: int) -> Tensor:
    """Keys' cubic convolution with a = -0.75, from `size` to `new` places, as a matrix."""
    matrix, a = torch.zeros(new, size, dtype=torch.float64), -0.75
    for i in range(new):
        place = (i + 0.5) * size / new - 0.5
        for j in range(math.floor(place) - 1, math.floor(place) + 3):
            x = abs(place - j)
            near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
            matrix[i, min(max(j, 0), size - 1)] += near if x <= 1 else far
    return matrix


def test_attn_distill_compares_the_class_tokens_maps_head_by_head() -> None:
    def formula(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
        return 2 * divergence(class_rows(teacher, images).detach(), class_rows(student, images)).sum(1)

    student = vit(0, 8, num_layers=1, distillation_token=True)  # another token, which the teacher does not have
    check(module(AttnDistill(2.0, 0.6), student=student), formula, 0.6)


@pytest.mark.parametrize("patch", [1, 2])
def test_attn_distill_joins_heads_and_interpolates_other_grids(patch: int) -> None:
    def formula(student: ViT, teacher: ViT, images: Tensor) -> Tensor:
        t = class_rows(teacher, images).detach()
        if patch == 1:
            first, maps = t[..., :1], t[..., 1:].unflatten(-1, (4, 6))
            maps = (cubic(4, 2) @ maps @ cubic(6, 3).mT).flatten(-2).clamp(min=1e-5)
            t = torch.cat([first, maps / maps.sum(-1, keepdim=True) * (1 - first)], -1)
            torch.testing.assert_close(t.sum(-1), torch.ones(B, 4, dtype=torch.float64))
        p, q = ((x.log().sum(1) / 5).softmax(-1) for x in (t, class_rows(student, images)))
        return 0.1 * divergence(p, q)

    check(module(AttnDistill(temperature=5.0), vit(1, 16, patch, heads=4, num_layers=1)), formula, 1.0)


def test_other_nets_heads_and_tokens_are_refused_in_one_line() -> None:
    cases: dict[str, Callable[[], object]] = {
        r"variants\.r\.aggregate False: expected true or null, as the student has 2 heads and the teacher 4": lambda: (
            module(AttnDistill(aggregate=False), vit(1, 16, heads=4))
        ),
        r"variants\.r\.teacher_stages None: expected a teacher of 7 tokens an image, as the student has; it has 25": (
            lambda: module(MiniLM(), vit(1, 16, 1))
        ),
        r"temperature 0: expected a number above 0": lambda: AttnDistill(temperature=0),
        r"variants\.r\.teacher_stages ResNet: expected a ViT with a class token": lambda: Distillation(
            net(ResNet, depth=8), {"r": (net(ViT), AttnDistill())}, SHAPE
        ),
        r"variants\.r\.student_stages GPT: expected a ViT with a class token": lambda: Distillation(
            GPT(5, 4, 1, 1, 8), {"r": (GPT(5, 4, 1, 1, 8), AttnDistill())}, (4,), 5, input_dtype=torch.int64
        ),
        r"variants\.r\.teacher_stages\.0 stage-1: expected a block of GPT, of a .*, without qk_norm": lambda: module(
            MiniLM(), vit(1, 16, qk_norm=True)
        ),
    }
    for line, make in cases.items():
        with pytest.raises(BadInput, match=f"^{line}"):
            make()


def test_torchvisions_joint_projection_is_no_layer() -> None:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(4, 2, 1, 2, 8, 16)
    with pytest.raises(BadInput, match=r"^layer encoder\.layers\.encoder_layer_0: expected a block of GPT"):
        find_projections(model, "encoder.layers.encoder_layer_0", "layer")


@pytest.mark.extras("timm")
def test_attention_of_timm_is_that_of_our_vit() -> None:
    teacher = Timm("vit_tiny_patch16_224", (3, 32, 32), 10)
    for parameter in teacher.parameters():
        nn.init.normal_(parameter, std=0.1)
    student = ViT(8, 24, num_layers=1, num_heads=3, input_shape=(3, 32, 32))
    made = Distillation(teacher, {"r": (student, AttnDistill())}, (3, 32, 32)).eval()
    images = torch.randn(2, 3, 32, 32)
    found = made.students["r"].objective._rows("teacher_stages", {"model.blocks.11.attn.qkv": _qkv(teacher, images)})[
        "rows.0"
    ]
    ours = ViT.from_library(teacher.model)
    theirs = attention_maps(ours, images)["blocks.11.attention"][:, :, 0]
    torch.testing.assert_close(found.exp(), theirs, rtol=1e-4, atol=1e-5)
    teacher.model.blocks[11].attn.q_norm = nn.LayerNorm(64)  # type: ignore[index]
    with pytest.raises(BadInput, match=r"^layer stage-1: expected .*; attention of this one is of another form"):
        find_projections(teacher, "stage-1", "layer")


def _qkv(net: Timm, images: Tensor) -> Tensor:
    kept: list[Tensor] = []
    handle = net.model.blocks[11].attn.qkv.register_forward_hook(lambda _m, _x, y: kept.append(y))  # type: ignore[index]
    with torch.no_grad():
        net.eval()(images)
    handle.remove()
    return kept[0]


def distilled() -> Distillation:
    teacher = net(ViT, seed=1, patch_size=2, embed_dim=16, num_layers=2, num_heads=2)
    students: dict[str, tuple[nn.Module, Objective]] = {
        "joined": (net(ViT, embed_dim=8, num_layers=1, num_heads=1), AttnDistill(1.0)),
        "minilm": (net(ViT, patch_size=2, embed_dim=8, num_layers=1, num_heads=2), MiniLM()),
        "scores": (net(ViT, patch_size=2, embed_dim=8, num_layers=2, num_heads=2), AttentionScores()),
    }
    return Distillation(teacher, students, input_shape=SHAPE)


@pytest.mark.slow
def test_exact_bits_are_those_of_one_process() -> None:
    places = ("ddp 1 exact 4", "ddp 2 exact 4")
    assert_same(*(weights(fit(distilled(), digits(train_size=64), **on(place), max_epochs=1)) for place in places))
