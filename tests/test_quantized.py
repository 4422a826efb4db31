"""Quantisation-aware training: what it simulates is what int8 computes, on any number of processes, resumed or not."""

import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apprentice import extras
from apprentice.errors import BadInput
from apprentice.progress import quiet
from lit_modules.nets import DeepNN, LightNN, ResNet
from lit_modules.objectives import CrossEntropy, Hint, Hinton
from lit_modules.quantization import FakeQuantized, post_training
from lit_modules.quantization.ranges import Range
from lit_modules.quantized import NAME, Quantized
from tests.processes import Run
from tests.ranks import ranks
from tests.training import SHAPE, assert_same, digits, fit, net, trainer, weights

pytestmark = [pytest.mark.extras, pytest.mark.usefixtures("one_thread")]
SMALL = partial(ResNet, depth=8)
TOLERANCE = 1e-12  # of float64: what sums in another order differ by


@pytest.fixture(scope="module", autouse=True)
def torchao() -> None:
    """Imported before anything is forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        extras.need("quant", "torchao.quantization.pt2e.quantize_pt2e")
        extras.need("quant", "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")


def apart(function: Callable[..., None], *args: Any, log: Path) -> None:
    """Call it in a child: once torch.export was used, a process that runs backward can't be forked any more."""
    run = Run(function, *args, log=log)
    assert run.wait() == 0, run.output


def module(make: Callable[..., nn.Module] = LightNN, distil: bool = False, **kwargs: Any) -> Quantized:
    objective, teacher = (Hint(), net(DeepNN, seed=1)) if distil else (CrossEntropy(), None)
    return Quantized(net(make), objective, teacher, SHAPE, **{"freeze_epoch": 1, **kwargs})


def inputs(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(3))


def fits(path: Path, make: Callable[..., nn.Module], distil: bool, devices: int) -> None:
    trained = module(make, distil).double()
    fit(trained, digits(validation_size=40), devices, precision="64-true")
    torch.save(weights(trained), path)


@pytest.mark.parametrize(("make", "distil"), [(LightNN, True), (SMALL, False)], ids=["LightNN distilled", "ResNet"])
def test_any_number_of_processes_trains_the_same_net(make: Any, distil: bool, tmp_path: Path) -> None:
    for devices in (1, 2, 3):
        apart(fits, tmp_path / f"{devices}.pt", make, distil, devices, log=tmp_path / "log")
    one = torch.load(tmp_path / "1.pt")
    for devices in (2, 3):
        assert_same(torch.load(tmp_path / f"{devices}.pt"), one, TOLERANCE)


def simulated(make: Callable[..., nn.Module]) -> None:
    from torchao.quantization.pt2e import FakeQuantize

    student = net(make)
    for norm in student.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eps = 1e-3  # not torch's default
    fake = FakeQuantized(student, inputs(1))
    assert sum(isinstance(m, FakeQuantize) for m in fake.modules()) > len([m for m in net(make).modules() if conv(m)])
    for _ in range(3):
        fake.train()(inputs())
    before = weights(fake.eval())
    int8 = fake.int8()
    with torch.no_grad():
        torch.testing.assert_close(int8(inputs()), fake(inputs()), rtol=0, atol=1e-5)
    assert_same(weights(fake), before)
    stored = [value for name, value in int8.state_dict().items() if name.startswith("_frozen_param")]
    assert len(stored) == len([m for m in net(make).modules() if conv(m)])
    assert {value.dtype for value in stored} == {torch.int8}
    assert not any("batch_norm" in str(node.target) for node in int8.graph.nodes)
    after = post_training(net(make).eval(), [inputs(100)])
    assert torch.int8 in {value.dtype for value in after.state_dict().values()}


def conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d | nn.Linear)


@pytest.mark.parametrize("make", [LightNN, SMALL], ids=["LightNN", "ResNet"])
def test_int8_computes_what_training_has_simulated(make: Any, tmp_path: Path) -> None:
    apart(simulated, make, log=tmp_path / "log")


def watched(folder: Path) -> None:
    """Trains with and without validation in int8, and stopped in mid-epoch."""
    data = digits(validation_size=40)
    through = fit(module(SMALL), data, max_epochs=3)
    unwatched = fit(module(SMALL), digits(validation_size=40), max_epochs=3, check_val_every_n_epoch=4)
    assert unwatched.best is None
    assert_same(weights(unwatched), weights(through))
    with quiet():
        first = trainer(max_steps=3, max_epochs=None)
        first.fit(module(SMALL), digits(validation_size=40))
        first.save_checkpoint(folder / "mid.ckpt")
        resumed = module(SMALL)
        again = digits(validation_size=40)
        trainer(max_epochs=3).fit(resumed, again, ckpt_path=folder / "mid.ckpt", weights_only=True)
    assert_same(weights(resumed), weights(through))
    assert resumed.best is not None
    assert through.best is not None
    assert_same(resumed.best.pop("state"), through.best.pop("state"))
    assert resumed.best == through.best


def test_validation_changes_nothing_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    apart(watched, tmp_path, log=tmp_path / "log")


def frozen() -> None:
    trained = module(SMALL)
    seen = []
    trained.on_train_epoch_end = lambda: seen.append(observed(trained.net))
    fit(trained, digits(), max_epochs=3)
    assert any(not torch.equal(seen[0][key], value) for key, value in observed(module(SMALL).net).items())
    assert_same(seen[0], seen[1])
    assert_same(seen[1], seen[2])


def observed(fake: FakeQuantized) -> dict[str, torch.Tensor]:
    """Ranges of activations, and BatchNorm's statistics."""
    wanted = ("low", "high", "running_mean", "running_var")
    return {key: value for key, value in weights(fake).items() if key.endswith(wanted)}


def test_ranges_and_statistics_stay_once_frozen(tmp_path: Path) -> None:
    apart(frozen, log=tmp_path / "log")


def loads() -> None:
    fake, other = FakeQuantized(net(SMALL), inputs(1)), net(SMALL, seed=5)
    fake.load_float(other.state_dict())
    assert_same(fake.float_state(), other.state_dict())
    state = other.state_dict()
    for key in ("stem.1.running_mean", "head.bias"):
        del state[key]
    state |= {"strange": torch.zeros(1), "head.weight": torch.zeros(3, 64)}
    with pytest.raises(BadInput) as refused:
        fake.load_float(state, "FILE")
    for word in ("FILE", "missing: stem.1.running_mean, head.bias;", "unknown: strange;", "head.weight (3, 64)"):
        assert word in str(refused.value)


def test_a_float_net_is_loaded_whole_or_every_fault_is_named(tmp_path: Path) -> None:
    apart(loads, log=tmp_path / "log")


def test_what_can_not_be_trained_is_refused() -> None:
    with pytest.raises(BadInput, match="--objective Hinton: expected CrossEntropy, or a teacher"):
        Quantized(net(), Hinton(), None, SHAPE)
    with pytest.raises(BadInput, match="--freeze_epoch 0"):
        Quantized(net(), input_shape=SHAPE, freeze_epoch=0)
    assert NAME == "int8-qat"


def shares() -> None:
    """Three ranks, one of them without rows."""
    import torch.distributed as dist

    whole = [inputs(8), 3 * inputs(8)]
    alone = activation()
    split = activation()
    cut = [slice(0, 5), slice(5, 8), slice(8, 8)][dist.get_rank()]
    for batch in whole:
        split(batch[cut])
    low = whole[0].min().lerp(whole[1].min(), 0.01)
    assert split.low == low
    assert split.high == whole[0].max().lerp(whole[1].max(), 0.01)
    alone.eval()(inputs(8))
    assert alone.low == torch.inf


def activation(averaging_constant: float = 0.01) -> Range:
    return Range(torch.uint8, torch.per_tensor_affine, 0, 255, averaging_constant=averaging_constant)


def test_ranges_are_those_of_the_global_batch() -> None:
    ranks(3, shares, backend="gloo")


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
    assert multiprocessing.active_children() == []


@pytest.mark.real_data
@pytest.mark.slow
@pytest.mark.parametrize(("make", "epochs"), [(LightNN, 5), (ResNet, 2)], ids=["LightNN", "ResNet-20"])
def test_int8_is_as_good_as_float_on_mnist(make: Any, epochs: int, data_root: Path, tmp_path: Path) -> None:
    apart(on_mnist, make, epochs, data_root, log=tmp_path / "log")


def on_mnist(make: Callable[..., nn.Module], epochs: int, root: Path) -> None:
    from apprentice.deploying.study import logits_of
    from apprentice.keyed import seeded
    from datamodules import MNIST
    from lit_modules.classifier import LitClassifier

    data = MNIST(root=str(root), train_size=1500, test_size=1000, validation_size=100, batch_size=64)
    data.setup()
    student = seeded(0, lambda: make(input_shape=data.input_shape))
    fit(LitClassifier(student), data, max_epochs=epochs)
    from torch.optim import Adam

    module = Quantized(
        student, None, None, data.input_shape, optimizer=partial(Adam, lr=1e-4), freeze_epoch=1
    )  # fmt: skip
    fit(module, data, max_epochs=2)
    rows, labels = data.split("test").take(torch.arange(1000))
    train = data.split("train").take(torch.arange(256))[0]
    after = post_training(student, data.normalize(train, torch.float32).split(128))
    nets = {"float32": student.eval(), "int8-ptq": after, "int8-qat": module.net.int8(module.best_state())}
    images = data.normalize(rows, torch.float32)
    correct = {name: int((logits_of(n, images).argmax(1) == labels).sum()) for name, n in nets.items()}
    print(correct)
    assert correct["float32"] > 700
    assert correct["int8-qat"] >= correct["float32"] - 3
    assert correct["int8-qat"] >= correct["int8-ptq"] - 1
