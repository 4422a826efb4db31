"""A module that is split over devices computes what the plain one does; CPUs, meta and fakes stand for GPUs."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import strategies
from apprentice import keyed
from apprentice.keyed import with_seed
from lab.strategies import LocalSGD
from lit_modules.classifier import LitClassifier
from lit_modules.nets import LightNN
from strategies import DDP, ModelParallel, ZeRO1
from strategies.base.model_parallel import devices_of, in_turn
from tests.training import SHAPE, assert_same, digits, fit, net, trainer, weights

ROWS = 11
SPLITS = [None, 1, 3, 4, 11, 50]
GPUS = ["cuda:0", "cuda:1"]


def stages(norm: Callable[[], nn.Module] = nn.Identity) -> list[nn.Module]:
    """Three, of a net of 8 x 8 images, with keyed dropout in two of them; always with the same weights."""
    return with_seed(
        0,
        lambda: [
            nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), norm(), nn.ReLU(), keyed.Dropout(0.2, layer=0)),
            nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 24), nn.ReLU()),
            nn.Sequential(keyed.Dropout(0.5, layer=1), nn.Linear(24, 10)),
        ],
    )


def plain() -> nn.Sequential:
    return nn.Sequential(*stages())


def images(dtype: torch.dtype = torch.float64, rows: int = ROWS) -> Tensor:
    return with_seed(1, lambda: torch.rand(rows, *SHAPE, dtype=dtype, requires_grad=True))


def computed(module: nn.Module, x: Tensor) -> list[Tensor]:
    with keyed.noise(seed=3, step=4, rows=torch.arange(100, 100 + len(x))):
        y = module(x)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return [y, *torch.autograd.grad(loss, [x, *module.parameters()])]


# The numbers are those of the plain module


@pytest.mark.parametrize("split_size", SPLITS)
@pytest.mark.parametrize("devices", [None, 1, 2, 3])
def test_outputs_gradients_and_noise_are_those_of_the_plain_module(devices: int | None, split_size: int | None) -> None:
    split = ModelParallel(stages(), devices and ["cpu"] * devices, split_size).double()
    for theirs, ours in zip(computed(plain().double(), images()), computed(split, images()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("split_size", [None, 11])
def test_a_whole_batch_has_the_plain_modules_bits(split_size: int | None) -> None:
    split = ModelParallel(stages(), ["cpu"] * 3, split_size)
    for theirs, ours in zip(*(computed(module, images(torch.float32)) for module in (plain(), split)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_batch_without_rows_goes_through() -> None:
    split = ModelParallel(stages(), split_size=4)
    y, *gradients = computed(split, images(torch.float32, rows=0))
    assert y.shape == (0, 10)
    assert all(not gradient.any() for gradient in gradients)


class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y


@pytest.mark.parametrize("split_size", [None, 4])
def test_tuples_are_several_arguments(split_size: int | None) -> None:
    x, y = torch.rand(2, ROWS, 5)
    split = ModelParallel([Halves(), Halves()], ["cpu"] * 2, split_size)
    torch.testing.assert_close(split(x, y), (2 * x, 2 * y))


def test_all_stages_compute_at_once() -> None:
    tutorial = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]  # (split, stage), as told to two GPUs
    assert list(in_turn(3, 2)) == tutorial
    turns = list(in_turn(splits=5, stages=3))
    assert sorted(turns) == [(split, stage) for split in range(5) for stage in range(3)]
    assert turns[3:6] == [(0, 2), (1, 1), (2, 0)]  # a tick, of three devices


# Where it lives


class Weight(nn.Module):
    """A linear layer on a buffer: torch can't move parameters that are fakes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("split_size", [None, 4])
def test_stages_compute_and_stay_on_their_devices(split_size: int | None) -> None:
    with FakeTensorMode():  # it refuses operations between devices, as GPUs do
        split = ModelParallel([Weight(6), Weight(6)], GPUS, split_size)
        module = nn.Sequential(split, Weight(6)).to("cuda:1").double()
        assert [str(buffer.device) for buffer in module.buffers()] == [*GPUS, "cuda:1"]
        logits = module(torch.ones(ROWS, 6, device="cuda:1").double())
        assert str(logits.device) == "cuda:1"
        assert logits.shape == (ROWS, 6)
        module.cpu()
        assert [str(buffer.device) for buffer in module.buffers()] == [*GPUS, "cpu"]
        split.place(None)
        module.cpu()
        assert {str(buffer.device) for buffer in module.buffers()} == {"cpu"}


def test_without_devices_it_goes_where_it_is_moved() -> None:
    split = ModelParallel(stages()).to("meta")
    assert all(p.is_meta for p in split.parameters())
    assert split.num_stages == 3


def test_devices_take_modules_by_their_parameters() -> None:
    modules = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16)]
    split = ModelParallel(modules, ["cpu", "meta"])
    assert [[p.is_meta for p in module.parameters()][:1] for module in modules] == [[False], [], [False], [], [True]]
    assert split.num_stages == 2
    assert split.double().get_submodule("4").weight.is_meta


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_have_gpus_in_order(processes: int) -> None:
    dealt = [devices_of(process, 2, gpus(*range(processes)), gpus=8) for process in range(processes)]
    assert [str(device) for devices in dealt for device in devices] == [f"cuda:{i}" for i in range(2 * processes)]
    cpus = [torch.device("cpu")] * processes
    assert devices_of(processes - 1, 3, cpus, gpus=0) == [torch.device("cpu")] * 3


# Checkpoints


def test_state_dicts_are_those_of_a_sequence_whatever_the_devices() -> None:
    whole, split = plain(), ModelParallel([*stages()[0], *stages()[1:]], ["cpu"] * 2)
    assert list(ModelParallel(stages()).state_dict()) == list(whole.state_dict())
    with torch.no_grad():
        for p in split.parameters():
            p.mul_(2)
    finer = nn.Sequential(*stages()[0], *stages()[1:])
    finer.load_state_dict(split.state_dict())
    assert_same(finer.state_dict(), split.state_dict())
    other = ModelParallel(finer, ["cpu"] * 3)
    other.load_state_dict(finer.state_dict())
    assert_same(other.state_dict(), split.state_dict())


def test_a_net_has_the_weights_that_its_stages_have_learned() -> None:
    whole = net(LightNN)
    start = weights(whole)
    split = ModelParallel(whole.pipeline_stages(), ["cpu"] * 2)
    fit(LitClassifier(split), digits(), max_epochs=1)
    assert list(whole.state_dict()) == list(start)
    assert all(not torch.equal(value, start[key]) for key, value in weights(whole).items())
    x = images(torch.float32)
    assert torch.equal(whole.eval()(x), split.eval()(x))


# Under Trainers


def double(module: nn.Module, processes: int, **kwargs: Any) -> dict[str, Tensor]:
    """Weights after a fit in float64; of 112 samples in batches of 37, the last has one row."""
    options = {"precision": "64-true", "max_epochs": 2, **kwargs}
    return weights(fit(LitClassifier(module), digits(train_size=112), processes, **options))


class Dealt(Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert pl_module.net.devices == [torch.device("cpu")] * 3


@pytest.mark.parametrize("split_size", [None, 7])
def test_ddp_of_two_processes_trains_as_one_does(split_size: int | None) -> None:
    right = double(plain(), 1)
    assert_same(double(ModelParallel(stages(), split_size=split_size), 1), right, atol=1e-12)
    split = ModelParallel(stages(), split_size=split_size)
    assert_same(double(split, 2, callbacks=[Dealt()]), right, atol=1e-12)
    assert_same(double(split := ModelParallel(stages()), 1, strategy=DDP(exact=1), callbacks=[Dealt()]), right, 1e-12)
    assert split.devices is None  # and may be moved again


def test_ddp_by_name_splits_too() -> None:
    strategies.register()
    given = ModelParallel(stages(), ["cpu", "cpu"], split_size=5)  # devices that were given stay
    assert_same(double(given, 2, strategy="ddp"), double(plain(), 1), atol=1e-12)
    assert given.devices == [torch.device("cpu")] * 2


def test_exact_bits_do_not_depend_on_the_processes() -> None:
    def ended(processes: int) -> dict[str, Tensor]:
        module = LitClassifier(ModelParallel(stages(), split_size=2))
        return weights(fit(module, digits(), processes, strategy=DDP(timeout=60, exact=4), max_epochs=1))

    assert_same(ended(1), ended(2))


class Fakes(LightningModule):
    def __init__(self, part: ModelParallel) -> None:
        super().__init__()
        self.part, self.head = part, Weight(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def on_gpus(
    module: LightningModule, local_rank: int, monkeypatch: pytest.MonkeyPatch, strategy: DDP | None = None
) -> DDP:
    """A strategy as it is in a rank of two processes with four GPUs, before it joins the others."""
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(strategies.base.data_parallel.DataParallel, "setup_environment", lambda self: None)
    strategy = strategy or DDP(timeout=60)
    strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    strategy.cluster_environment = LightningEnvironment()
    strategy.connect(module)
    strategy.setup_environment()
    return strategy


@pytest.mark.parametrize(("local_rank", "devices"), [(0, ["cuda:0", "cuda:1"]), (1, ["cuda:2", "cuda:3"])])
def test_ddp_deals_each_process_its_gpus(local_rank: int, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        module = Fakes(ModelParallel([Weight(6), Weight(6)], split_size=4))
        strategy = on_gpus(module, local_rank, monkeypatch)
        assert str(strategy.root_device) == devices[-1]
        strategy.model_to_device()
        assert [str(buffer.device) for buffer in module.buffers()] == [*devices, devices[-1]]
        x = strategy.batch_to_device(torch.ones(ROWS, 6))
        assert {str(tensor.device) for tensor in (x, module(x))} == {devices[-1]}


def test_noise_goes_to_each_stages_gpu() -> None:
    with FakeTensorMode():
        split = ModelParallel([keyed.Dropout(0.5), keyed.Dropout(0.5)], GPUS, split_size=4)
        with keyed.noise(0, 0, torch.arange(ROWS, device="cuda:1")):
            assert str(split(torch.ones(ROWS, 6, device="cuda:1")).device) == "cuda:1"


@pytest.mark.parametrize("strategy", [DDP(exact=4), ZeRO1(), LocalSGD()], ids=lambda s: type(s).__name__)
def test_what_wants_one_device_says_so(strategy: DDP, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Fakes(ModelParallel([Weight(6), Weight(6)]))
    with pytest.raises(ValueError, match="expected plain ddp, without exact, for a ModelParallel on several GPUs"):
        on_gpus(module, 0, monkeypatch, strategy)


def test_optimizer_states_go_to_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Fakes(ModelParallel([nn.Linear(6, 6, device="meta"), nn.Linear(6, 6, device="meta")]))
    strategy = on_gpus(module, 0, monkeypatch)
    optimizer = torch.optim.Adam(module.parameters())
    for p in module.parameters():  # as after a resume under Lightning, all on the root device
        optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(p.shape)}
    strategy.optimizers = [optimizer]
    strategy.on_train_start()
    for state in optimizer.state.values():
        assert not state["step"].is_meta
        assert state["exp_avg"].is_meta


# Faults and bad input


def tied() -> list[nn.Module]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return [nn.ReLU(), first, second]


class Dictionary(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "no stages": (lambda: ModelParallel([]), r"stages \[\]: expected at least one module"),
    "split_size": (lambda: ModelParallel(stages(), split_size=0), "split_size 0: expected at least 1"),
    "too many devices": (
        lambda: ModelParallel(stages()[:2], ["cpu"] * 3),
        r"devices \['cpu', 'cpu', 'cpu'\]: expected one to 2, one for each stage",
    ),
    "no devices": (lambda: ModelParallel(stages(), []), r"devices \[\]: expected one to 3, one for each stage"),
    "shared weight": (
        lambda: ModelParallel(tied()),
        "stages: expected that a weight belongs to one stage; 1.weight of stage 1 is 2.weight of stage 2",
    ),
    "output": (
        lambda: ModelParallel([nn.ReLU(), Dictionary()])(torch.ones(3, 4)),
        "stage 1: expected a tensor or a tuple of tensors as its output, got dict",
    ),
    "rows": (
        lambda: ModelParallel([nn.ReLU(), Mean()], split_size=2)(torch.ones(3, 4)),
        r"split_size: expected outputs with the input's 2 rows first, got \(\)",
    ),
    "GPUs": (
        lambda: devices_of(0, 2, gpus(0, 1), gpus=3),
        "devices 2: expected 4 GPUs, 2 for the stages of each process; there are 3",
    ),
    "chosen GPUs": (
        lambda: devices_of(0, 2, gpus(1, 3), gpus=4),
        r"devices \[1, 3\]: expected a number of processes, which take 2 GPUs each in order",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_in_one_line(fault: str) -> None:
    fails, message = FAULTS[fault]
    with pytest.raises(ValueError, match=f"^{message}$"):
        fails()


def test_one_device_may_share_a_weight_within() -> None:
    shared = tied()
    assert ModelParallel([shared[0], nn.Sequential(*shared[1:])], ["cpu"] * 2).num_stages == 2
    whole = nn.Sequential(*shared)
    assert torch.equal(ModelParallel(shared, ["cpu"])(torch.ones(3, 4)), whole(torch.ones(3, 4)))


def test_one_warning_names_batch_norms() -> None:
    with pytest.warns(UserWarning, match=r"^0.0, 0.1, 0.2 and 5 more: BatchNorm sees 4 rows"):
        ModelParallel([nn.Sequential(*(nn.BatchNorm2d(8) for _ in range(8)))], split_size=4)
    with pytest.warns(UserWarning, match="BatchNorm") as told:
        ModelParallel(stages(lambda: nn.BatchNorm2d(8)), split_size=4)
    assert [str(warning.message) for warning in told] == [
        "0.1: BatchNorm sees 4 rows, not the batch; GroupNorm's numbers are those of the whole batch"
    ]
    with warnings.catch_warnings(action="error"):
        ModelParallel(stages(lambda: nn.BatchNorm2d(8)))
        ModelParallel(stages(), split_size=4)


class Later(LitClassifier):
    def configure_model(self) -> None:
        self.net = ModelParallel(stages())


def test_ddp_refuses_what_it_can_not_split() -> None:
    with pytest.warns(UserWarning, match="BatchNorm sees 4 rows"):
        normed = ModelParallel(stages(lambda: nn.BatchNorm2d(8)), split_size=4)
    several = nn.Sequential(ModelParallel(stages()[:2]), ModelParallel(stages()[2:]))
    faults: dict[str, LightningModule] = {
        "split_size 4: expected None, as 0.1 computes over all ranks": LitClassifier(normed),
        r"ModelParallel: expected one number of stages throughout a module, got \[1, 2\]": LitClassifier(several),
        "ModelParallel: expected one that is made in the module's constructor": Later(plain()),
    }
    for message, module in faults.items():
        with pytest.raises(Exception, match=message):
            trainer(2).fit(module, digits())
