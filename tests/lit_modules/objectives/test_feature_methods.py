"""Methods of features equal formulas written out from their papers in float64, on any number of processes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.distillation import Distillation
from lit_modules.nets import GPT, DeepNN, Outputs, ResNet, ViT, globalise, run
from lit_modules.objectives import CC, NST, VID, AttentionTransfer, CrossEntropy, FitNet, Objective, ReviewKD
from lit_modules.objectives.base import Term, condense_teacher, select_view
from lit_modules.objectives.context import StepContext
from tests.commands import bad_input
from tests.formulas import assert_equal, total
from tests.training import SHAPE, assert_agree, assert_same, digits, fit, net, on, outcome, weights

B, CLASSES = 3, 4
Shape = tuple[int, ...]
Maps = list[torch.Tensor]

# Shapes of the pairs of layers, the student's first: larger, smaller, equal, both
SHAPES: dict[str, list[tuple[Shape, Shape]]] = {
    "larger": [((3, 6, 6), (5, 3, 3)), ((4, 5, 5), (2, 3, 3))],
    "smaller": [((3, 2, 2), (5, 4, 4)), ((4, 3, 3), (2, 4, 4))],
    "equal": [((3, 6, 6), (5, 6, 6)), ((4, 2, 2), (2, 2, 2))],
    "crossed": [((3, 2, 6), (5, 6, 2)), ((4, 3, 3), (2, 5, 1))],
}


def outputs(seed: int, shapes: list[Shape], rows: int = B) -> Outputs:
    g = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=g, dtype=torch.float64).requires_grad_()

    return Outputs(noise(CLASSES), {f"l{number}": noise(*shape) for number, shape in enumerate(shapes)})


def flat(x: torch.Tensor) -> list[torch.Tensor]:
    return list(x.reshape(-1))


def bins(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Maps (C, H, W) by the means of cells from floor(i H / h) to ceil((i + 1) H / h)."""
    rows, columns = x.shape[1:]

    def cell(i: int, j: int) -> torch.Tensor:
        top, bottom = i * rows // height, math.ceil((i + 1) * rows / height)
        left, right = j * columns // width, math.ceil((j + 1) * columns / width)
        return x[:, top:bottom, left:right].mean((1, 2))

    return torch.stack([torch.stack([cell(i, j) for j in range(width)], 1) for i in range(height)], 1)


def matched(f_s: torch.Tensor, f_t: torch.Tensor) -> Maps:
    height, width = (min(a, b) for a, b in zip(f_s.shape[1:], f_t.shape[1:], strict=True))
    return [bins(f, height, width) for f in (f_s, f_t)]


def unit(values: list[torch.Tensor]) -> list[torch.Tensor]:
    length = sum((v**2 for v in values), start=torch.zeros(())).sqrt()
    return [v / length for v in values]


def at_by_hand(_: Objective, f_s: torch.Tensor, f_t: torch.Tensor, squared: bool = True) -> torch.Tensor:
    own, other = matched(f_s, f_t)
    q_s, q_t = (unit(flat(sum(c**2 for c in f) / len(f))) for f in (own, other))
    total = sum((a - b) ** 2 for a, b in zip(q_s, q_t, strict=True))
    return total / len(q_s) if squared else total.sqrt()


def nst_by_hand(_: Objective, f_s: torch.Tensor, f_t: torch.Tensor) -> torch.Tensor:
    x_s, x_t = ([torch.stack(unit(flat(c))) for c in f] for f in matched(f_s, f_t))

    def mean(left: Maps, right: Maps) -> torch.Tensor:
        return sum((x @ y) ** 2 for x in left for y in right) / (len(left) * len(right))

    return mean(x_t, x_t) + mean(x_s, x_s) - 2 * mean(x_s, x_t)


def vid_by_hand(part: Any, f_s: torch.Tensor, f_t: torch.Tensor) -> torch.Tensor:
    own, other = matched(f_s, f_t)
    x = own.flatten(1)
    for number in (0, 2, 4):
        x = part.mean[number].weight[:, :, 0, 0] @ x
        x = x.clamp(min=0) if number < 4 else x
    total = torch.zeros(())
    for channel, (mean, wanted) in enumerate(zip(x, other.flatten(1), strict=True)):
        v = (1 + part.rho[channel].exp()).log() + 1e-5
        total = total + ((mean - wanted) ** 2 / v + v.log()).sum() / 2
    return total / other.numel()


def of_levels(objective: Any, s: Outputs, t: Outputs, parts: list[Any], by_hand: Callable[..., Any]) -> Any:
    pairs = list(zip(s.features.values(), t.features.values(), strict=True))
    rows = [by_hand(parts[n], f_s[i], f_t[i]) for n, (f_s, f_t) in enumerate(pairs) for i in range(B)]
    return sum(rows) / B


def batch_norm(x: torch.Tensor, norm: nn.BatchNorm2d) -> torch.Tensor:
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    scaled = (x - mean[:, None, None]) / (variance[:, None, None] + norm.eps).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def nearest(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    rows = [i * x.shape[2] // height for i in range(height)]
    return x[:, :, rows][..., [j * x.shape[3] // width for j in range(width)]]


def review_by_hand(objective: Any, s: Outputs, t: Outputs) -> torch.Tensor:
    own = [x if x.dim() == 4 else x[..., None, None] for x in s.features.values()]
    other = [x if x.dim() == 4 else x[..., None, None] for x in t.features.values()]
    total, deeper = torch.zeros(()), None
    for f_s, f_t, part in reversed(list(zip(own, other, objective.fusions, strict=True))):
        x = torch.einsum("bchw,dc->bdhw", f_s, part.first[0].weight[:, :, 0, 0])
        x = batch_norm(x, part.first[1])
        if deeper is not None:
            y = nearest(deeper, *x.shape[2:])
            z = torch.einsum("bchw,dc->bdhw", torch.cat([x, y], 1), part.attention[0].weight[:, :, 0, 0])
            z = 1 / (1 + (-z - part.attention[0].bias[:, None, None]).exp())
            x = x * z[:, :1] + y * z[:, 1:]
        deeper = x = nearest(x, *f_t.shape[2:])
        found = batch_norm(F.conv2d(x, part.last[0].weight, padding=1), part.last[1])
        shares = [1.0]
        levels = [((found - f_t) ** 2).sum() / f_t.numel()]
        for side in (4, 2, 1):
            if side < min(f_t.shape[2:]):
                shares.append(shares[-1] / 2)
                cells = [bins(a - b, side, side) for a, b in zip(found, f_t, strict=True)]
                levels.append(shares[-1] * sum((c**2).mean() for c in cells) / B)
        total = total + sum(levels) / sum(shares)
    return total


def cc_by_hand(_objective: Any, s: Outputs, t: Outputs) -> torch.Tensor:
    total = torch.zeros(())
    k = []
    for x in (s, t):
        a = [torch.stack(unit(flat(e))) for e in x.features["l0"]]
        series = [[sum(0.8**p / math.factorial(p) * (u @ v) ** p for p in (0, 1, 2)) for v in a] for u in a]
        k.append([[math.exp(-0.8) * value for value in row] for row in series])
    for i in range(B):
        for j in range(B):
            total = total + (k[0][i][j] - k[1][i][j]) ** 2
    return total / B**2


def fitnet_by_hand(objective: Any, s: Outputs, t: Outputs) -> torch.Tensor:
    f_s, f_t, convolution = s.features["l0"], t.features["l0"], objective.regressor[0]
    x, w = f_s, convolution.weight
    if isinstance(convolution, nn.ConvTranspose2d):  # each value of x paints a kernel
        step, kernel = convolution.stride[0], w.shape[2:]
        size = [(n - 1) * step + k for n, k in zip(x.shape[2:], kernel, strict=True)]
        made = x.new_zeros(B, w.shape[1], *size)
        for i in range(x.shape[2]):
            for j in range(x.shape[3]):
                painted = torch.einsum("bc,cdkl->bdkl", x[:, :, i, j], w)
                where = F.pad(
                    painted, (j * step, size[1] - kernel[1] - j * step, i * step, size[0] - kernel[0] - i * step)
                )
                made = made + where
        cut = convolution.padding[0]
        made = made[:, :, cut : size[0] - cut, cut : size[1] - cut]
    else:
        pad, step = convolution.padding[0], convolution.stride[0]
        x = F.pad(x, (pad, pad, pad, pad))
        made = torch.stack(
            [
                torch.stack(
                    [
                        torch.einsum("bckl,dckl->bd", x[:, :, i : i + w.shape[2], j : j + w.shape[3]], w)
                        for j in range(0, x.shape[3] - w.shape[3] + 1, step)
                    ],
                    2,
                )
                for i in range(0, x.shape[2] - w.shape[2] + 1, step)
            ],
            2,
        )
    made = batch_norm(made, objective.regressor[1]).clamp(min=0)
    return ((made - f_t) ** 2).sum() / f_t.numel()


def layers(count: int) -> dict[str, list[str]]:
    names = [f"l{number}" for number in range(count)]
    return {"student_stages": names, "teacher_stages": names}


ONE = {"student_layer": "l0", "teacher_layer": "l0"}
METHODS: dict[str, tuple[Callable[[], Objective], Callable[..., Any], float]] = {
    "at": (lambda: AttentionTransfer(**layers(2)), lambda o, s, t: of_levels(o, s, t, [o, o], at_by_hand), 1000),
    "at of the paper": (
        lambda: AttentionTransfer(squared=False, **layers(2)),
        lambda o, s, t: of_levels(o, s, t, [o, o], lambda *x: at_by_hand(*x, squared=False)),
        1000,
    ),
    "nst": (lambda: NST(**layers(2)), lambda o, s, t: of_levels(o, s, t, [o, o], nst_by_hand), 50),
    "vid": (lambda: VID(**layers(2)), lambda o, s, t: of_levels(o, s, t, o.gaussians, vid_by_hand), 1),
    "review": (lambda: ReviewKD(**layers(2)), review_by_hand, 0.25),
    "fitnet": (lambda: FitNet(**ONE), fitnet_by_hand, 100),
    "cc": (lambda: CC(**ONE), cc_by_hand, 100),
}


def built(make: Callable[[], Objective], student: Outputs, teacher: Outputs) -> Objective:
    objective = make()
    objective.choose(nn.Module(), nn.Module())
    with_seed(0, lambda: objective.build(student, teacher))
    return globalise(objective.double())  # type: ignore[return-value]


def terms(
    objective: Objective, student: Outputs, teacher: Outputs, rows: int = B, epoch: float = 5.0
) -> dict[str, Term]:
    known = select_view("", condense_teacher(teacher, {"": objective}))
    return objective.terms(objective.adapt(student), known, torch.arange(rows) % CLASSES, StepContext(epoch=epoch))


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_formula_and_its_gradients(name: str, sizes: str) -> None:
    make, by_hand, factor = METHODS[name]
    pairs = SHAPES[sizes]
    student, teacher = outputs(1, [own for own, _ in pairs]), outputs(2, [other for _, other in pairs])
    if name == "fitnet" and sizes == "crossed":
        with pytest.raises(BadInput, match=r"^student_layer l0: expected maps not higher and less wide than others"):
            built(make, student, teacher)
        return
    objective = built(make, student, teacher)
    theirs = factor * by_hand(objective, student, teacher) + F.cross_entropy(student.logits, torch.arange(B) % CLASSES)
    wanted = [*student.features.values(), student.logits, *objective.parameters()]
    close = {"rtol": 1e-12, "atol": 1e-12}
    assert_equal(total(terms(objective, student, teacher)), theirs, wanted, rtol=1e-9, atol=1e-10, loss=close)


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("name", METHODS)
def test_few_rows_and_dead_maps_are_finite(name: str, rows: int) -> None:
    pairs = [((3, 6, 6), (5, 3, 3)), ((4, 1, 1), (2, 1, 1))]
    student, teacher = outputs(1, [own for own, _ in pairs], rows), outputs(2, [other for _, other in pairs], rows)
    objective = built(METHODS[name][0], student, teacher)
    objective.adapt(outputs(3, [own for own, _ in pairs]))  # BatchNorm refuses a first batch of one row
    dead = student._replace(features={key: (x * 0).relu() for key, x in student.features.items()})
    for given in (student, dead):
        loss = sum(t.values.sum() * t.weight for t in terms(objective, given, teacher, rows).values())
        wanted = [*student.features.values(), *objective.parameters()]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        assert all(x is None or x.isfinite().all() for x in (loss, *found))


@pytest.mark.parametrize("name", ["vid", "review", "fitnet"])
def test_without_weight_all_parameters_have_a_gradient(name: str) -> None:
    pairs = SHAPES["larger"]
    student, teacher = outputs(1, [own for own, _ in pairs]), outputs(2, [other for _, other in pairs])
    objective = built(METHODS[name][0], student, teacher)
    loss = 0 * total(terms(objective, student, teacher))
    assert all(x is not None for x in torch.autograd.grad(loss, list(objective.parameters()), allow_unused=True))


def test_review_reads_all_stages_and_the_pooled_vectors() -> None:
    objective = ReviewKD()
    objective.choose(ResNet(8), ResNet(14))
    assert [*objective.student_layers.values()] == ["stage-3", "stage-2", "stage-1", "pooled"]
    assert [*objective.teacher_layers.values()] == ["stage-3.pre", "stage-2.pre", "stage-1.pre", "pooled"]


def test_review_grows_with_the_epochs() -> None:
    student, teacher = outputs(1, [(3, 4, 4), (4,)]), outputs(2, [(5, 4, 4), (2,)])
    objective = built(lambda: ReviewKD(2.0, **layers(2)), student, teacher)
    for epoch, expected in {0.0: 0.0, 5.0: 0.5, 19.5: 1.95, 20.0: 2.0, 70.0: 2.0}.items():
        assert terms(objective, student, teacher, epoch=epoch)["review"].weight == pytest.approx(expected)
    objective = built(lambda: ReviewKD(2.0, warmup_epochs=0, **layers(2)), student, teacher)
    assert terms(objective, student, teacher)["review"].weight == 2.0


class Largest(TorchDispatchMode):
    """The most values of any tensor made inside."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found = max(
            [self.found, *(x.untyped_storage().nbytes() // 4 for x in tree_leaves(made) if isinstance(x, torch.Tensor))]
        )
        return made


def test_nst_makes_no_tensor_larger_than_maps_or_products() -> None:
    c_s, c_t, side = 24, 40, 16
    student, teacher = (Outputs(torch.zeros(B, CLASSES), {"l0": torch.randn(B, c, side, side)}) for c in (c_s, c_t))
    student.features["l0"].requires_grad_()
    objective = NST(student_stages=["l0"], teacher_stages=["l0"])
    objective.choose(nn.Module(), nn.Module())
    objective.build(student, teacher)
    with Largest() as largest:
        total(terms(objective, student, teacher)).backward()
    assert largest.found <= B * c_t * max(side**2, c_t)


def test_attention_is_cached_in_5_kb_an_image() -> None:
    small = ResNet(depth=8)  # its stages are as large as ResNet-110's
    objective = AttentionTransfer()
    objective.choose(small, small)
    raw = run(small.eval(), torch.zeros(1, 3, 32, 32), set(objective.teacher_layers.values()))
    objective.build(raw, raw)
    cached = condense_teacher(raw, {"at": objective}).condensed
    assert sum(x.nbytes for x in raw.features.values()) == 4 * (16 * 32**2 + 32 * 16**2 + 64 * 8**2)  # 114,688
    assert sum(x.nbytes for x in cached.values()) == 4 * (32**2 + 16**2 + 8**2)  # 5,376


NO_MAP = "expected a layer that gives maps"


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (NST, {"student_stages": ["stage9"], "teacher_stages": ["stage1"]}, "student_stages.0 stage9: expected a"),
        (AttentionTransfer, {"teacher_stages": ["stage1", "head"]}, f"teacher_stages.1 head: {NO_MAP}"),
        (VID, {"student_stages": ["pooled"], "teacher_stages": ["stage1"]}, f"student_stages.0 pooled: {NO_MAP}"),
        (FitNet, {"student_layer": "pooled"}, f"student_layer pooled: {NO_MAP}"),
        (FitNet, {"teacher_layer": "head"}, f"teacher_layer head: {NO_MAP}"),
        (FitNet, {"teacher_layer": "stage7"}, "teacher_layer stage7: expected a layer of ResNet"),
    ],
)
def test_layers_without_maps_are_refused(make: Callable[..., Objective], options: Any, expected: str) -> None:
    student, teacher = net(DeepNN), net(ResNet, depth=8)
    line = bad_input(Distillation, teacher, {"mine": (student, make(**options))}, input_shape=SHAPE)
    assert line.startswith(f"variants.mine.{expected}")


@pytest.mark.parametrize("make", [AttentionTransfer, NST])
def test_maps_of_one_position_have_no_gradient_and_are_refused(make: Callable[..., Objective]) -> None:
    layers = {"student_stages": ["l0"], "teacher_stages": ["l0"]}
    objective = make(**layers)
    objective.choose(nn.Identity(), nn.Identity())
    student, teacher = (Outputs(torch.zeros(3, CLASSES), {"l0": torch.rand(3, 2, 1, 1)}) for _ in range(2))
    line = r"^student_stages \[l0\]: expected layers of which one at least gives maps larger than 1 x 1"
    with pytest.raises(BadInput, match=line):
        objective.build(student, teacher)
    f_s = student.features["l0"].requires_grad_()
    terms = objective(student, objective.condense(teacher), torch.zeros(3, dtype=torch.int64))
    loss = next(iter(terms.values())).values.mean()
    assert torch.autograd.grad(loss, f_s)[0].abs().max() < 1e-6


@pytest.mark.parametrize("make", [AttentionTransfer, NST, VID, ReviewKD])
def test_tokens_are_refused(make: Callable[..., Objective]) -> None:
    gpt = GPT(vocab_size=7, block_size=4, num_layers=2, embed_dim=8, num_heads=2)
    objective = make()
    objective.choose(gpt, gpt)
    found = run(gpt, torch.zeros(2, 4, dtype=torch.int64), set(objective.student_layers.values()))
    expected = r"^student_stages.0 stage-2: expected a layer that gives maps \(C, H, W\); its output is \(4, 8\)$"
    with pytest.raises(BadInput, match=expected):
        objective.build(found, found)


FITTED: dict[str, Callable[[], Objective]] = {
    "at": AttentionTransfer, "nst": NST, "vid": VID, "review": ReviewKD, "fitnet": FitNet, "cc": CC,
}  # fmt: skip


def module(*names: str, teacher: nn.Module | None = None, **options: Any) -> Distillation:
    students = {name: (net(ResNet, depth=8), FITTED[name]()) for name in names or FITTED}
    others = {} if names else {"ce": (net(ResNet, depth=8), CrossEntropy())}
    return Distillation(teacher or net(DeepNN, seed=1), students | others, input_shape=SHAPE, **options)


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:  # longer, and exact: tests/harness/test_zoo.py
    tags, data = [f"{name}/train/loss" for name in FITTED], digits(train_size=75)
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true"}
    assert_agree(*(outcome(module(), data, tmp_path, tags, **on(f"ddp {n}"), **options) for n in (1, 2)))


@pytest.mark.slow
def test_cached_condensed_features_are_those_of_online() -> None:
    online = weights(fit(module(teacher_cache_mb=0), digits(train_size=75), precision="64-true"))
    assert_same(weights(fit(module(), digits(train_size=75), precision="64-true")), online, atol=1e-9)


@pytest.mark.parametrize("name", ["at", "at of the paper", "nst", "cc"])  # others have layers that compute in bfloat16
@pytest.mark.parametrize("sizes", ["larger", "smaller"])
def test_autocast_rounds_no_loss(name: str, sizes: str) -> None:
    pairs = SHAPES[sizes]
    whole = outputs(1, [own for own, _ in pairs]), outputs(2, [other for _, other in pairs])
    rounded = [Outputs(x.logits.bfloat16(), {key: f.bfloat16() for key, f in x.features.items()}) for x in whole]
    exact = [Outputs(x.logits.double(), {key: f.double() for key, f in x.features.items()}) for x in rounded]
    objective = built(METHODS[name][0], *whole)
    with torch.autocast("cpu", torch.bfloat16):
        found = total(terms(objective, rounded[0], rounded[1]))
    torch.testing.assert_close(found.double(), total(terms(objective, exact[0], exact[1])), rtol=1e-5, atol=0)


def test_a_fit_in_bfloat16_stays_finite() -> None:
    made = fit(module(), digits(train_size=75), precision="bf16-mixed", max_epochs=1)
    assert not made.failed
    assert all(x.isfinite().all() for x in weights(made).values())


def test_a_vit_teaches_a_resnet() -> None:
    made = fit(module(teacher=net(ViT, patch_size=2, embed_dim=8, num_heads=2)), digits(train_size=40), max_epochs=1)
    assert not made.failed
