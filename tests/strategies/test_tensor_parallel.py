"""Ranks that compute a net's layers together, or recompute layers, end where one process ends."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD

from apprentice.keyed import with_seed
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets import SelfAttention, ViT
from lit_modules.nets.attention.differential import DifferentialAttention
from lit_modules.nets.attention.positions import Alibi
from lit_modules.objectives import Cosine, CrossEntropy, DeiTToken, Hinton, Objective
from strategies import DDP, FSDP, HSDP
from strategies.sharding import recompute
from tests.callbacks import Notes
from tests.processes import launch
from tests.strategies.test_fsdp import ACCUMULATE, CLIP, CLIP_VALUES, CLOSE, DOUBLE, goes_on, small
from tests.training import SHAPE, Outcome, assert_agree, assert_same, digits, fit, net, outcome, trainer, weights

TWO, SQUARE = {"tensor": 2}, {"data": 2, "tensor": 2}


def vit(seed: int = 0, **options: Any) -> nn.Module:
    sizes = {"patch_size": 2, "embed_dim": 24, "num_layers": 2, "num_heads": 4, "dropout": 0.1}
    return net(ViT, seed, **sizes | options)


def students(**objectives: Objective) -> Distillation:
    made = {name: (vit(distillation_token=name == "deit"), objective) for name, objective in objectives.items()}
    return Distillation(vit(1, num_heads=2), made, input_shape=SHAPE, teacher_cache_mb=0)


class Pair(nn.Module):
    """A user's net: it names its layers by a pattern, and its bottleneck has no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(64, 8), nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images.flatten(1))
        return self.head(x + self.wide["down"](self.wide["up"](x).tanh()))

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"wide.u*": ColwiseParallel(), "wide.down": RowwiseParallel()}


def forms() -> nn.Module:
    """Grouped queries, norms of their heads, slopes, a gate; pairs of heads; one norm of all heads."""
    module = vit(num_layers=3, norm_place="after", layer_scale=0.5)
    for block in module.blocks:
        options = {"num_kv_heads": 2, "position": Alibi(), "qk_norm": True, "gate": True, "head_dim": 8,
                   "unit_offset": True}  # fmt: skip
        block.attention = with_seed(0, lambda options=options: SelfAttention(24, 4, **options))
    module.blocks[2].attention = with_seed(2, lambda: SelfAttention(24, 4, num_kv_heads=2, qk_norm="width"))
    module.blocks[1].attention = with_seed(1, lambda: DifferentialAttention(24, 4, layer=1))
    return module


CASES: dict[str, Callable[[], LightningModule]] = {
    "vit": lambda: LitClassifier(vit()),
    "forms": lambda: LitClassifier(forms()),
    "students": lambda: students(ce=CrossEntropy(), kd=Hinton(), cosine=Cosine(), deit=DeiTToken()),
    "pair": lambda: LitClassifier(with_seed(0, Pair)),
}
TAGS = {"vit": "train/loss", "forms": "train/loss", "students": "deit/train/loss", "pair": "train/loss"}


def trained(
    name: str, path: Path, devices: int = 1, mesh: dict[str, int] | None = None, **options: Any
) -> tuple[Outcome, Mapping[str, float]]:
    """Losses, norms and final weights of ten steps, after one validation; and the scores of a test."""

    def strategy() -> dict[str, Any]:
        return {} if mesh is None else {"strategy": FSDP(timeout=60, mesh=mesh)}

    steps = DOUBLE | {"max_steps": 10, "num_sanity_val_steps": 1, "check_val_every_n_epoch": 99}
    tags, module = (TAGS[name], TAGS[name].replace("loss", "grad_2.0_norm_total")), CASES[name]()
    found = outcome(module, small(), path, tags, devices, **steps | options | strategy())
    with quiet():
        scores = trainer(devices, precision="64-true", **strategy()).test(module, small(), verbose=False)[0]
    return found, scores


SLOW: list[tuple[str, int, int, dict[str, Any]]] = [
    ("vit", 2, 2, CLIP | ACCUMULATE), ("vit", 2, 1, {}), ("vit", 1, 4, CLIP_VALUES), ("students", 1, 2, CLIP),
    ("pair", 1, 3, CLIP),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "data", "tensor", "options"),
    [("forms", 1, 2, CLIP), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_training_is_that_of_one_process(
    name: str, data: int, tensor: int, options: dict[str, Any], tmp_path: Path
) -> None:
    one, scores = trained(name, tmp_path, **options)
    mesh = {"data": data, "tensor": tensor}
    other, their_scores = trained(name, tmp_path, data * tensor, mesh, **options)
    assert len(one[0]) >= 20
    assert_agree(one, other, CLOSE)
    assert their_scores == pytest.approx(scores, abs=CLOSE, rel=0)


def elements(trainer: Any, module: Any) -> list[int]:
    """How many elements of cut parameters and of their moments a rank holds."""
    moments = [state[key] for state in trainer.optimizers[0].state.values() for key in ("exp_avg", "exp_avg_sq")]
    held = list(module.parameters()), moments
    return [sum(x.to_local().numel() for x in tensors if x.device_mesh.ndim == 2) for tensors in held]


def test_a_rank_holds_its_part_of_the_layers_that_are_cut(tmp_path: Path) -> None:
    module, notes = LitClassifier(vit()), Notes(tmp_path / "ranks", elements, "on_train_end")
    fit(module, small(), 4, strategy=FSDP(timeout=60, mesh=SQUARE), callbacks=[notes], max_steps=2)
    cut = [p for name, p in module.named_parameters() if ".attention." in name or ".mlp." in name]
    shared = [p for name, p in module.named_parameters() if name.endswith((".attention.out.bias", ".mlp.2.bias"))]
    whole, twice = (sum(p.numel() for p in of) for of in (cut, shared))
    found = [facts[0] for facts in notes.of_ranks()]
    assert [sum(each) for each in zip(*found, strict=True)] == [whole + twice, 2 * (whole + twice)]
    assert max(parameters for parameters, _ in found) == pytest.approx(whole / 4, rel=0.05)


@pytest.mark.slow
def test_any_strategy_goes_on_from_any_checkpoint(tmp_path: Path) -> None:
    cut, square = (lambda: FSDP(timeout=60, mesh=TWO), 2), (lambda: FSDP(timeout=60, mesh=SQUARE), 4)
    ddp, fsdp, hsdp = (lambda: DDP(timeout=60), 3), (lambda: FSDP(timeout=60), 2), (lambda: HSDP(timeout=60), 4)
    places = [cut, ddp, square, (lambda: "auto", 1), hsdp, fsdp]
    goes_on(lambda: students(cosine=Cosine()).double(), places, tmp_path)


def with_a_mesh(rank: int, path: Path) -> None:
    """As a user's script under torchrun."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    module = LitClassifier(vit())
    with quiet():
        trainer(2, strategy=FSDP(mesh=mesh), **DOUBLE, max_steps=3).fit(module, small())
    if rank == 0:
        torch.save(weights(module), path / "weights")


def test_a_mesh_may_be_an_object(tmp_path: Path) -> None:
    ranks = launch(with_a_mesh, tmp_path)
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    alone = fit(LitClassifier(vit()), small(), **DOUBLE, max_steps=3)
    assert_same(weights(alone), torch.load(tmp_path / "weights", weights_only=True), atol=CLOSE)


@pytest.mark.parametrize(
    ("make", "devices", "mesh", "message"),
    [
        (CASES["vit"], 2, {"tensor": 3}, r"mesh {'tensor': 3}: expected data and tensor, sizes whose product is 2"),
        (CASES["vit"], 4, {"data": 2, "tensor": 3}, "whose product is 4, the number of devices"),
        (CASES["vit"], 2, {"rows": 2}, r"mesh {'rows': 2}: expected data and tensor"),
        (CASES["vit"], 2, {"tensor": 0}, "expected data and tensor"),
        (CASES["vit"], 3, {"tensor": 3}, "expected a size of tensor that divides 4, into which net.blocks.0.attention"),
        (CASES["pair"], 5, {"tensor": 5}, "expected a size of tensor that divides 12, into which net.wide.up"),
        (lambda: LitClassifier(net()), 2, TWO, r"expected a net with tensor_parallel_plan\(\), .*; there is LightNN$"),
        (lambda: students(a=Cosine(student_layer="blocks.1.mlp.1", teacher_layer="blocks.1.mlp.1")), 2, TWO,
         "expected objectives that read whole layers, not teacher.blocks.1.mlp.1, of which each rank has a part"),
        (lambda: students(a=Cosine(student_layer="blocks.1.mlp.2<")), 2, TWO, "students.a.net.blocks.1.mlp.2"),
    ],
)  # fmt: skip
def test_what_can_not_be_cut_is_refused(
    make: Callable[[], LightningModule], devices: int, mesh: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make(), small(), devices, strategy=FSDP(timeout=60, mesh=mesh), max_steps=1)


WIDTH = 6


class Changing(nn.Module):
    """Scales by a state that each forward changes: in place, out of autograd's sight, by a new tensor, a number."""

    state: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count, self.linear = how, 0, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(()))
        self.other = nn.Module()
        self.other.register_buffer("state", self.state)  # in two places

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.other.state += 1
        elif self.how == "data":
            self.state.data.add_(1)
        elif self.how == "new":
            self.state = self.state + 1
        else:
            self.count += 1
        return self.linear(x).tanh() * (self.state + self.count) + x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
            nn.Sequential(spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
            nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),  # by hooks
            *(Changing(how) for how in ("in place", "data", "new", "number")),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images.flatten(1))))


LAYERS = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)), *Blocks().blocks[1:]]


@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_a_layer_is_recomputed_from_the_state_at_the_start_of_its_forward(number: int) -> None:
    layer, ours = (copy.deepcopy(LAYERS[number]).double() for _ in range(2))
    recompute(ours)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    for module in (layer, ours):
        torch.manual_seed(0)
        losses = [module(rows).square().sum() for rows in x]  # of accumulated batches
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
    assert_same(weights(layer), weights(ours))
    assert_same({n: p.grad for n, p in layer.named_parameters()}, {n: p.grad for n, p in ours.named_parameters()})
    assert getattr(layer, "count", 0) == getattr(ours, "count", 0)


def test_fsdp_trains_such_layers_as_one_device() -> None:
    ended = []
    for devices, options in ((1, {}), (2, {"strategy": FSDP(timeout=60, activation_checkpointing=True)})):
        module = LitClassifier(with_seed(0, Blocks), optimizer=lambda parameters: SGD(parameters, 0.1))
        ended.append(weights(fit(module, digits(), devices, precision="64-true", **options)))
    assert_same(*ended, atol=1e-9)
