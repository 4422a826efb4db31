"""Quantisation-aware training: what it simulates is what int8 computes, on any number of processes, resumed or not."""

import copy
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from apprentice import extras
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import MNIST
from deploy.int8 import EXTRA, FakeQuantized, quantize_post_training
from deploy.int8.quantization_aware import QuantizationAware
from deploy.int8.ranges import Range
from deploy.int8.study import logits_of
from harness.runs.quiet import quiet
from harness.runs.safepoints import SafePoints, read
from lit_modules.classifier import LitClassifier
from lit_modules.nets import DeepNN, LightNN, ResNet, ViT
from lit_modules.objectives import CrossEntropy, Hint, Hinton
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.lit_modules.test_distillation import Formula
from tests.ranks import in_ranks
from tests.training import SHAPE, assert_same, digits, fit, net, trainer, weights

pytestmark = [pytest.mark.extras, pytest.mark.usefixtures("one_thread")]
SMALL = partial(ResNet, depth=8)
VISION = partial(ViT, patch_size=4, embed_dim=32, num_layers=1, num_heads=2)
TOLERANCE = 1e-12  # of float64: what sums in another order differ by


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    """Imported without the warnings of its source."""
    extras.need(*EXTRA)


def module(make: Callable[..., nn.Module] = LightNN, distil: bool = False) -> QuantizationAware:
    """One to train, frozen from the second epoch on."""
    return copy.deepcopy(made(make, distil))


@functools.cache
def made(make: Callable[..., nn.Module], distil: bool) -> QuantizationAware:
    objective, teacher = (Hint(), net(DeepNN, seed=1)) if distil else (CrossEntropy(), None)
    return QuantizationAware(net(make), objective, teacher, SHAPE, freeze_epoch=1)


def inputs(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(3))


@functools.cache
def trained(make: Callable[..., nn.Module], distil: bool, devices: int) -> dict[str, torch.Tensor]:
    return weights(fit(module(make, distil).double(), digits(validation_size=40), devices, precision="64-true"))


@pytest.mark.parametrize("devices", mostly_slow([2, 3], 3))
@pytest.mark.parametrize(
    ("make", "distil"),
    [pytest.param(LightNN, True, marks=pytest.mark.slow), (SMALL, False)],
    ids=["LightNN distilled", "ResNet"],
)
def test_any_number_of_processes_trains_the_same_net(make: Any, distil: bool, devices: int) -> None:
    one = trained(make, distil, 1)
    assert {"best.epoch", "best.correct"} < set(one)  # what is deployed comes back from the ranks, too
    assert_same(trained(make, distil, devices), one, TOLERANCE)


class Biased(nn.Module):
    """A BatchNorm that becomes part of a convolution with a bias of its own, and one that can't."""

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4))
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(36, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.stem(images) + 1).flatten(1))


FOLDED = [(LightNN, 0), (SMALL, 0), (VISION, 0), (Biased, 1)]


@pytest.mark.parametrize(
    ("make", "left"), mostly_slow(FOLDED, *FOLDED[::2], FOLDED[3]), ids=["LightNN", "ResNet", "ViT", "biased"]
)
def test_int8_computes_what_training_has_simulated(make: Any, left: int) -> None:
    from torchao.quantization.pt2e import FakeQuantize

    student = LitClassifier(net(make)).net  # as one that was trained in this process
    for norm in student.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 1e-3  # not torch's default
    layers = [layer for layer in net(make).modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    fake = FakeQuantized(student, inputs(1))
    assert sum(isinstance(m, FakeQuantize) for m in fake.modules()) > len(layers)
    for _ in range(3):
        fake.train()(inputs())
    fake.freeze()
    before = weights(fake.eval())
    int8 = fake.int8()
    with torch.no_grad():
        found, simulated = int8(inputs(500)), fake(inputs(500))
    off = (found - simulated).abs().amax(1)
    assert (off > 1e-5).sum() <= 10  # rows in which a sum falls just beside the edge of two steps of int8
    assert off.max() < 0.02 * (simulated.max() - simulated.min())
    assert_same(weights(fake), before)
    stored = [value for name, value in int8.state_dict().items() if name.startswith("_frozen_param")]
    assert len(stored) == len(layers)
    assert {value.dtype for value in stored} == {torch.int8}
    assert sum("batch_norm" in str(node.target) for node in int8.graph.nodes) == left
    after = quantize_post_training(student.eval(), [inputs(100)])
    assert torch.int8 in {value.dtype for value in after.state_dict().values()}


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_rounded_by_their_own_ranges(frozen: bool) -> None:
    fake = module(SMALL).net
    fake.train()(inputs())
    if frozen:
        fake.freeze()
    state, before = weights(fake), fake.int8()(inputs())
    for name in ("head.weight", "head.bias"):
        fake.state_dict()[f"graph.net.{name}"].mul_(2)
    grown = weights(fake)
    assert torch.equal(fake.int8()(inputs()), 2 * before) == (not frozen)
    again = module(SMALL).net  # which knows by the state alone whether that was frozen
    for known in (grown, state):
        assert torch.equal(again.int8(known)(inputs()), fake.int8(known)(inputs()))


class Noisy(nn.Module):
    """Noise from torch's generator, in a way that is not `nn.Dropout`'s usual one."""

    def __init__(self, drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(64, 32), drop, nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.body(images.flatten(1)).relu()))


@pytest.mark.parametrize("kind", ["in place", "stochastic depth"])
def test_noise_is_of_training_only(kind: str) -> None:
    from torchvision.ops import StochasticDepth

    drop = nn.Dropout(inplace=True) if kind == "in place" else StochasticDepth(0.5, "row")
    with pytest.warns(UserWarning, match="draws noise from torch's generator in graph.net.drop:"):
        net = QuantizationAware(Noisy(drop), input_shape=SHAPE).net
    assert not torch.equal(net(inputs()), net(inputs()))
    int8 = net.int8()
    assert torch.equal(int8(inputs()), int8(inputs()))
    assert not any("drop" in str(node.target) or "bernoulli" in str(node.target) for node in int8.graph.nodes)
    assert torch.equal(net.eval()(inputs()), net(inputs()))


def test_ranges_keep_32_bits() -> None:
    fake = module().net.bfloat16()
    assert {kept.dtype for kept in observed(fake).values()} == {torch.float32}
    fake.train()(inputs().bfloat16())
    assert all(kept.isfinite().all() for kept in observed(fake).values())
    assert fake.int8()(inputs()).dtype == torch.float32


def test_validation_in_int8_leaves_the_net_in_training_as_it_is() -> None:
    data = digits(validation_size=40)
    watched = fit(module(SMALL), data, max_epochs=3)
    unwatched = fit(module(SMALL), data, max_epochs=3, check_val_every_n_epoch=4, num_sanity_val_steps=1)
    trainer().validate(unwatched, data, verbose=False)
    assert watched.best
    assert not unwatched.best  # neither a sanity check nor a validation by itself is an epoch
    assert_same(weights(watched.net), weights(unwatched.net))


def test_a_test_converts_the_best_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, asked = module(), []
    trained.best = {f"net.{name}": value for name, value in weights(trained.net).items()}
    convert = FakeQuantized.int8
    monkeypatch.setattr(FakeQuantized, "int8", lambda net, state: (asked.append(state), convert(net, state))[1])
    trainer().test(trained, digits(), verbose=False)
    (state,) = asked
    assert_same(state, trained.best_state())


@pytest.mark.parametrize("devices", mostly_slow([1, 2], 1))
def test_a_run_resumed_in_mid_epoch_ends_as_if_undisturbed(devices: int, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped.ckpt"

    def ended(*callbacks: Callback) -> dict[str, Any]:
        found = tmp_path / "ended.ckpt"
        resumed = {"ckpt_path": stopped, "weights_only": True} if stopped.exists() else {}
        with quiet():
            points = SafePoints(found, every=1000)
            fitting = trainer(devices, max_epochs=3, enable_checkpointing=True, callbacks=[points, *callbacks])
            fitting.fit(module(SMALL), digits(validation_size=40), **resumed)
        return read(found)

    right = ended()
    ended(SaveAndStop(stopped, 4))  # of three steps an epoch: in the second, whose ranges are frozen
    state = ended()
    assert read(stopped)["global_step"] == 4
    assert_same(state["state_dict"], right["state_dict"])
    assert state["state_dict"]["best.epoch"] < 3


def test_ranges_and_statistics_stay_once_frozen() -> None:
    trained = module(SMALL)
    seen = []
    trained.on_train_epoch_end = lambda: seen.append(observed(trained.net))
    fit(trained, digits(), max_epochs=3)
    assert any(not torch.equal(seen[0][key], value) for key, value in observed(module(SMALL).net).items())
    assert_same(seen[0], seen[1])
    assert_same(seen[1], seen[2])


def observed(fake: FakeQuantized) -> dict[str, torch.Tensor]:
    wanted = ("low", "high", "running_mean", "running_var")
    return {key: value for key, value in weights(fake).items() if key.endswith(wanted)}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.head(images.flatten(1))
        return logits if logits.sum() > 0 else -logits


class Templates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.templates = nn.Parameter(torch.zeros(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.templates


def test_what_can_not_be_trained_is_refused() -> None:
    with pytest.raises(BadInput, match=r"net Templates: expected a net with layers that torchao quantises"):
        QuantizationAware(Templates(), input_shape=SHAPE)
    with pytest.raises(BadInput, match=r"net Templates: expected a net with layers that torchao quantises"):
        quantize_post_training(Templates(), [torch.zeros(2, *SHAPE)])
    with pytest.raises(BadInput, match=r"net Branching: expected a net that torch.export can capture .*; it says: "):
        QuantizationAware(Branching(), input_shape=SHAPE)
    for drop, where in ((nn.functional.dropout, "its forward"), (nn.RReLU(), "drop")):
        with pytest.raises(BadInput, match=rf"net Noisy: expected a net that draws noise in .*; {where} calls aten"):
            QuantizationAware(Noisy(drop), input_shape=SHAPE)
    with pytest.raises(BadInput, match=r"net Noisy: expected a net that has BatchNorm with .*; drop has none"):
        QuantizationAware(Noisy(nn.BatchNorm1d(32, track_running_stats=False)), input_shape=SHAPE)
    activated = nn.BatchNorm1d(32)
    activated.act = nn.SiLU()
    with pytest.raises(BadInput, match=r"net Noisy: expected a net with torch's BatchNorm; drop does more"):
        QuantizationAware(Noisy(activated), input_shape=SHAPE)
    with pytest.raises(BadInput, match="objective Hinton: expected CrossEntropy, or a teacher"):
        QuantizationAware(net(), Hinton(), None, SHAPE)
    with pytest.raises(BadInput, match=r"^objective Formula: expected an objective whose term x has a value a row"):
        QuantizationAware(net(), Formula(lambda s, t, y: s.logits.sum()), net(DeepNN), SHAPE)
    with pytest.raises(BadInput, match="freeze_epoch 0"):
        QuantizationAware(net(), input_shape=SHAPE, freeze_epoch=0)


def activation(averaging_constant: float = 0.01) -> Range:
    return Range(torch.uint8, torch.per_tensor_affine, 0, 255, averaging_constant=averaging_constant)


@pytest.mark.parametrize("per_channel", [False, True], ids=["activation", "weight"])
def test_scales_are_those_of_torchao(per_channel: bool) -> None:
    from torchao.quantization.pt2e import MovingAverageMinMaxObserver, PerChannelMinMaxObserver

    if per_channel:
        options: dict[str, Any] = {"dtype": torch.int8, "qscheme": torch.per_channel_symmetric}
        options |= {"quant_min": -128, "quant_max": 127, "eps": 2**-12}
        ours, theirs = Range(**options, averaging_constant=1.0), PerChannelMinMaxObserver(**options, ch_axis=0)
        batches = [inputs(8)]
    else:
        options = {"dtype": torch.uint8, "qscheme": torch.per_tensor_affine, "quant_min": 0, "quant_max": 255}
        theirs, ours = MovingAverageMinMaxObserver(**options, eps=2**-12), activation()
        batches = [inputs(8), 2 * inputs(8), inputs(8).relu()]
    for batch in batches:
        ours(batch)
        theirs(batch)
    for mine, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), rtol=1e-6, atol=0)


@in_ranks(3, backend="gloo")
def test_ranges_are_those_of_the_global_batch() -> None:
    """One rank has no rows."""
    batches, split, unseen = [inputs(8), 3 * inputs(8)], activation(), activation()
    rows = [slice(0, 5), slice(5, 8), slice(8, 8)][dist.get_rank()]
    for batch in batches:
        split(batch[rows])
    assert split.low == batches[0].min().lerp(batches[1].min(), 0.01)
    assert split.high == batches[0].max().lerp(batches[1].max(), 0.01)
    unseen.eval()(inputs(8))
    assert unseen.low == torch.inf


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize("make", [LightNN, ResNet], ids=["LightNN", "ResNet-20"])
def test_int8_is_as_good_as_float_on_mnist(make: Any, data_root: Path) -> None:
    data = mnist(data_root, 600)
    student = with_seed(0, lambda: make(input_shape=data.input_shape))
    falling = partial(CosineAnnealingLR, T_max=6)  # the float net has learnt what it can, its statistics, too
    fit(LitClassifier(student, optimizer=partial(Adam, lr=3e-3), scheduler=falling), data, max_epochs=6)
    aware = QuantizationAware(student, input_shape=data.input_shape, optimizer=partial(Adam, lr=1e-5), freeze_epoch=1)
    fit(aware, mnist(data_root, 300), max_epochs=2)
    calibration = data.normalize(data.split("train").take(torch.arange(256))[0], torch.float32)
    nets = {
        "float32": student.eval(),
        "int8-ptq": quantize_post_training(student, calibration.split(128)),
        "int8-qat": aware.net.int8(aware.best_state()),
    }
    images, labels = data.split("test").take(torch.arange(2000))
    images = data.normalize(images, torch.float32)
    correct = {name: int((logits_of(each, images).argmax(1) == labels).sum()) for name, each in nets.items()}
    assert correct["float32"] > 0.9 * 2000
    assert abs(correct["int8-qat"] - correct["float32"]) <= 0.003 * 2000, correct
    assert correct["int8-qat"] >= correct["int8-ptq"] - 0.001 * 2000, correct


def mnist(root: Path, train_size: int) -> MNIST:
    data = MNIST(root=str(root), train_size=train_size, test_size=2000, validation_size=100, batch_size=20)
    data.setup()
    return data
