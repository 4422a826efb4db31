"""Tokens of patches beside maps, in both directions: losses by hand in float64, grids that nets know, wrong layers."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from apprentice.keyed import with_seed
from experiments import kd
from lit_modules.distillation import Distillation
from lit_modules.nets import HuggingFace, Outputs, ResNet, Timm, ViT, globalise, run
from lit_modules.nets.tokens import TokenGrid, as_maps, token_grid
from lit_modules.objectives import NST, VID, AttentionTransfer, Cosine, FitNet, Hint, Objective, ReviewKD
from lit_modules.objectives.base import condense_teacher, select_view
from tests import with_transformers
from tests.commands import bad_input, results
from tests.formulas import assert_equal, total
from tests.lit_modules.objectives import test_feature_methods as by_hand
from tests.processes import Run
from tests.training import SHAPE, assert_agree, digits, net, on, outcome

B, CLASSES, CHANNELS, TOKENS = by_hand.B, by_hand.CLASSES, 5, 4
GRIDS = {"no others": TokenGrid(2, 3), "a class token": TokenGrid(2, 3, 1), "and registers": TokenGrid(3, 2, 5)}
ONE, STAGES = by_hand.ONE, by_hand.layers(1)


def maps_by_hand(x: torch.Tensor, grid: TokenGrid) -> torch.Tensor:
    """One token after the other: (b, T, D) -> (b, D, rows, columns)."""
    first = x.shape[1] - grid.rows * grid.columns
    rows = [[x[:, first + i * grid.columns + j] for j in range(grid.columns)] for i in range(grid.rows)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def cosine_by_hand(_: Objective, s: Outputs, t: Outputs) -> torch.Tensor:
    total = torch.zeros(())
    for f_s, f_t in zip(s.features["l0"].flatten(1), t.features["l0"].flatten(1), strict=True):
        size = min(len(f_s), len(f_t))
        a, b = (
            torch.stack([f[k * len(f) // size : math.ceil((k + 1) * len(f) / size)].mean() for k in range(size)])
            for f in (f_s, f_t)
        )
        total = total + 1 - (a @ b) / (a @ a).sqrt() / (b @ b).sqrt()
    return total / B


def hint_by_hand(objective: Any, s: Outputs, t: Outputs) -> torch.Tensor:
    regressed = F.conv2d(s.features["l0"], objective.regressor.weight, objective.regressor.bias, padding=1)
    return ((regressed - t.features["l0"]) ** 2).mean()


Formula = Callable[[Any, Outputs, Outputs], torch.Tensor]
METHODS: dict[str, tuple[Callable[[], Objective], Formula, float, float]] = {
    "cosine": (lambda: Cosine(**ONE), cosine_by_hand, 0.25, 0.75),
    "hint": (lambda: Hint(**ONE), hint_by_hand, 0.25, 0.75),
    "fitnet": (lambda: FitNet(**ONE), by_hand.fitnet_by_hand, 100, 1),
    "at": (
        lambda: AttentionTransfer(**STAGES),
        lambda o, s, t: by_hand.of_levels(o, s, t, [o], by_hand.at_by_hand), 1000, 1,
    ),
    "nst": (lambda: NST(**STAGES), lambda o, s, t: by_hand.of_levels(o, s, t, [o], by_hand.nst_by_hand), 50, 1),
    "vid": (lambda: VID(**STAGES), lambda o, s, t: by_hand.of_levels(o, s, t, o.gaussians, by_hand.vid_by_hand), 1, 1),
    "review": (lambda: ReviewKD(warmup_epochs=0, **STAGES), by_hand.review_by_hand, 1, 1),
}  # fmt: skip


def knowing(grid: TokenGrid | None) -> nn.Module:
    module = nn.Identity()
    module.token_grid = grid  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("to", ["maps", "tokens", "tokens to tokens"])
@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_formula_of_maps_that_are_put_together_by_hand(name: str, kind: str, to: str) -> None:
    make, formula, factor, ce = METHODS[name]
    grid = GRIDS[kind]
    if name == "cosine" and to == "tokens to tokens":  # flattened with all tokens, as texts are
        return
    sides = (grid.rows, grid.columns) if name == "hint" else (4, 6)
    grids = [None if to == "tokens" else grid, None if to == "maps" else grid]
    grids = grids if to == "tokens to tokens" else grids[::-1]
    count = grid.before + grid.rows * grid.columns
    student, teacher = (
        by_hand.outputs(seed, [(count, TOKENS) if of else (CHANNELS, *sides)]) for seed, of in enumerate(grids, 1)
    )
    objective = make()
    objective.choose(*map(knowing, grids))
    with_seed(0, lambda: objective.build(student, teacher))
    objective = globalise(objective.double())  # type: ignore[assignment]
    known = select_view("", condense_teacher(teacher, {"": objective}))
    labels = torch.arange(B) % CLASSES
    ours = total(objective.terms(objective.adapt(student), known, labels))
    whole = [
        x._replace(features={"l0": maps_by_hand(x.features["l0"], of) if of else x.features["l0"]})
        for x, of in zip((student, teacher), grids, strict=True)
    ]
    theirs = factor * formula(objective, *whole) + ce * F.cross_entropy(student.logits, labels)
    wanted = [*student.features.values(), student.logits, *objective.parameters()]
    assert_equal(ours, theirs, wanted, rtol=1e-9, atol=1e-10, loss={"rtol": 1e-12, "atol": 1e-12})
    if grids[0]:
        (gradient,) = torch.autograd.grad(ours, student.features["l0"])
        assert not gradient[:, : grid.before].any()
        assert gradient[:, grid.before :].any()


def test_maps_whose_channels_are_last() -> None:
    x = torch.rand(2, 4, 6, 3)
    assert torch.equal(as_maps(x, TokenGrid(0, 0, channels_last=True)), x.permute(0, 3, 1, 2))
    assert as_maps(x, TokenGrid(4, 6, 1)) is x


@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("make", [Cosine, FitNet])
def test_a_layer_of_other_tokens_is_refused(make: Callable[..., Objective], side: str) -> None:
    class Odd(nn.Module):
        token_grid = TokenGrid(4, 4, 1)

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Unflatten(1, (8, 8)), nn.Linear(64, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(images.flatten(1)).flatten(1))

    odd, plain = with_seed(0, Odd), net(ResNet, depth=8, seed=1)
    student, teacher = (odd, plain) if side == "student" else (plain, odd)
    options = {f"{side}_layer": "embed"}
    line = bad_input(Distillation, teacher, {"a": (student, make(**options))}, input_shape=SHAPE)
    expected = "a layer that gives maps (C, H, W) or the tokens of 4 x 4 patches and 1 before them"
    assert line == f"variants.a.{side}_layer embed: expected {expected}; its output is (8, 8)"


class Pair(nn.Module):
    """A layer with two outputs, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.unused, self.head = _Both(), nn.Identity(), nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.both(images)[0].flatten(1))


class _Both(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("layer", "why"), [("both", "its output is a tuple"), ("unused", "it takes no part in a forw")]
)
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_layers_without_a_tensor_are_refused(side: str, layer: str, why: str) -> None:
    student, teacher = (with_seed(0, Pair), net()) if side == "student" else (net(), with_seed(0, Pair))
    objective = Hint(**{"student_layer": "default", "teacher_layer": "default", f"{side}_layer": layer})
    line = bad_input(Distillation, teacher, {"a": (student, objective)}, input_shape=SHAPE)
    assert line.startswith(f"variants.a.{side}_layer {layer}: expected a layer that gives a tensor; {why}")


class Tokens(ViT):
    """Our ViT as other libraries' nets are: its default layer and stages give tokens, not maps."""

    def __init__(self, **options: Any) -> None:
        super().__init__(patch_size=2, embed_dim=8, num_layers=3, num_heads=2, distillation_token=True, **options)
        self.stages = tuple(f"blocks.{number}" for number in range(3))
        self.feature_layer = self.stages[-1]


def module(student: type[nn.Module], teacher: type[nn.Module], **made: Objective) -> Distillation:
    students = {name: (_small(student), objective) for name, objective in made.items()}
    return Distillation(_small(teacher, 1), students, input_shape=SHAPE)


def _small(made: type[nn.Module], seed: int = 0) -> nn.Module:
    return net(made, seed=seed) if made is Tokens else net(made, seed=seed, depth=8, norm="group")


@pytest.mark.parametrize(
    ("place", "student", "teacher"),
    [("ddp 2", Tokens, ResNet), ("ddp 2", ResNet, Tokens), ("pipeline 2", ResNet, Tokens)],
)
def test_two_processes_compute_what_one_does(
    place: str, student: type[nn.Module], teacher: type[nn.Module], tmp_path: Path
) -> None:
    tags, data = ["cosine/train/loss", "at/train/loss"], digits(train_size=75)

    def ended(place: str) -> Any:
        made: dict[str, Objective] = {"cosine": Cosine(), "at": AttentionTransfer()}
        # A pipeline's BatchNorm sees a micro-batch.
        built = module(student, teacher, **made, **({} if "pipeline 2" in places else {"fitnet": FitNet()}))
        return outcome(built, data, tmp_path, tags, **on(place), max_epochs=1, precision="64-true")

    places = ["ddp 1", place]
    assert_agree(*map(ended, places))


def test_our_vit_knows_its_grid() -> None:
    vit = with_seed(0, lambda: ViT(4, 8, 2, 2, distillation_token=True, input_shape=(1, 8, 12))).eval()
    assert token_grid(vit) == TokenGrid(2, 3, 2)
    found = run(vit, torch.rand(2, 1, 8, 12), {"blocks.0", "blocks.1.maps"}).features
    assert torch.equal(as_maps(found["blocks.0"], token_grid(vit)), found["blocks.1.maps"])


@pytest.mark.extras("timm")
@pytest.mark.slow
def test_models_of_timm_know_their_grids(tmp_path: Path) -> None:
    started = Run(_timm, tmp_path, log=tmp_path / "log")
    assert started.wait() == 0, started.output


def _timm(folder: Path) -> None:
    grids = {
        "vit_tiny_patch16_224": TokenGrid(2, 3, 1),
        "deit_tiny_distilled_patch16_224": TokenGrid(2, 3, 2),
        "vit_small_patch14_reg4_dinov2": TokenGrid(2, 3, 5),
        "mixer_s32_224": TokenGrid(2, 3, 0),
        "mambaout_femto": TokenGrid(0, 0, 0, channels_last=True),
        "resnet10t": None,
    }
    for name, grid in grids.items():
        shape = {14: (1, 28, 42), 32: (1, 64, 96)}.get(14 if "14" in name else 32 if "s32" in name else 16, (1, 32, 48))
        timm = with_seed(0, lambda name=name, shape=shape: Timm(name, shape, 10)).eval()
        assert token_grid(timm) == grid
        if grid and grid.rows:
            _patches_stand_where_the_grid_says(timm, f"{timm.feature_layer.rpartition('.')[0]}.0<", shape, grid)
        students = {"at": (_resnet(shape), AttentionTransfer()), "fitnet": (_resnet(shape), FitNet())}
        Distillation(timm, students, input_shape=shape)
        Distillation(_resnet(shape), {"at": (timm, AttentionTransfer())}, input_shape=shape)


def _resnet(shape: tuple[int, int, int]) -> ResNet:
    return with_seed(1, lambda: ResNet(8, input_shape=shape))


def _patches_stand_where_the_grid_says(
    made: nn.Module, first: str, shape: tuple[int, int, int], grid: TokenGrid
) -> None:
    """One pixel changes one patch's token before the first block: the one of its row and column."""
    images = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1, 1)
    row, column = grid.rows - 1, grid.columns - 2
    images[1, :, row * shape[1] // grid.rows, column * shape[2] // grid.columns] += 1
    x = as_maps(run(made, images, {first}).features[first], grid)
    changed = (x[1] - x[0]).abs().amax(0) > 1e-6
    assert changed.nonzero().tolist() == [[row, column]]


@pytest.mark.extras("transformers")
@with_transformers.in_fork
def test_models_of_transformers_know_their_layers_and_grids(folder: Path) -> None:
    import transformers as t

    warnings.simplefilter("ignore")
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 8}
    patches = {**sizes, "patch_size": 4, "num_channels": 1}
    vit, deit = t.ViTForImageClassification, t.DeiTForImageClassification
    maps = t.ResNetConfig(num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    dino = t.Dinov2WithRegistersForImageClassification
    models = {
        "vit": (vit(t.ViTConfig(image_size=(8, 12), **patches)), (1, 8, 12), TokenGrid(2, 3, 1)),
        "deit": (deit(t.DeiTConfig(image_size=(8, 12), **patches)), (1, 8, 12), TokenGrid(2, 3, 2)),
        "dino": (dino(t.Dinov2WithRegistersConfig(image_size=8, **patches)), (1, 8, 8), TokenGrid(2, 2, 5)),
        "resnet": (t.ResNetForImageClassification(maps), (1, 8, 12), None),
    }
    for name, (model, shape, grid) in models.items():
        model.save_pretrained(folder / name)
        made = with_seed(0, lambda name=name, shape=shape: HuggingFace(str(folder / name), shape, 10)).eval()
        assert token_grid(made) == grid
        stages = [getattr(made, "stages", ())[number].rpartition(".")[2] for number in range(2 if grid is None else 3)]
        assert stages == ["0", "1", "2"][: len(made.stages)]
        if grid:
            _patches_stand_where_the_grid_says(made, f"{made.stages[0]}<", shape, grid)
        students = {"at": (_resnet(shape), AttentionTransfer()), "fitnet": (_resnet(shape), FitNet())}
        Distillation(made, students, input_shape=shape)
        Distillation(_resnet(shape), {"at": (made, AttentionTransfer())}, input_shape=shape)
    vit(t.ViTConfig(image_size=8, **patches)).save_pretrained(folder / "square")
    kd.main([
        "--data", "Digits", "--teacher", "HuggingFace", "--teacher.name", str(folder / "square"), "--student", "ResNet",
        "--student.depth", "8", "--variants.fitnet", "FitNet", "--variants.at", "AttentionTransfer",
        "--only", "cosine", "fitnet", "at", "--seeds", "1", "--trainer.max_epochs", "1",
        "--trainer.limit_train_batches", "2", "--out", str(folder / "run"),
    ])  # fmt: skip
    assert set(results(folder / "run")["students"]) == {"cosine", "fitnet", "at"}
    layers = {"student_stages": ["stage-1"], "teacher_stages": ["model.vit.embeddings"]}
    whole = with_seed(0, lambda: HuggingFace(str(folder / "square"), (1, 8, 8), 10))
    whole.token_grid = None
    line = bad_input(Distillation, whole, {"at": (_resnet(SHAPE), AttentionTransfer(**layers))}, input_shape=SHAPE)
    assert line.endswith("its output is (5, 8)")
