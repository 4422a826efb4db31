"""In 16-mixed precision each student has a loss scale of its own, and bf16-mixed needs none."""

import itertools
import warnings
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing import ProcessRaisedException
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from harness.runs.quiet import quiet
from lab.strategies import DDPFP16, DDPPowerSGD, LocalSGD
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.objectives import CrossEntropy, Objective, Term
from lit_modules.training.loop import Loop
from lit_modules.training.loss_scale import LossScales
from strategies import DDP, FSDP, ZeRO1
from tests.callbacks import Notes, SaveAndStop
from tests.grids import mostly_slow
from tests.ranks import in_ranks
from tests.strategies.test_fsdp import Foreign
from tests.training import VARIANTS, LinesLogger, assert_same, digits, distil, distillation, fit, net, trainer, weights

HUGE = 2.0**26  # too large for the first steps of every student


def half(init_scale: float = HUGE, **kwargs: Any) -> MixedPrecision:
    """What `--trainer.precision 16-mixed` is on a GPU; on a CPU Lightning would take bf16-mixed for it."""
    return MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=init_scale, **kwargs))


class Scales(Notes):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self._scales, "on_train_batch_end")

    @staticmethod
    def _scales(_trainer: Any, module: Loop) -> dict[str, float]:
        return {run: scaler.get_scale() for run, scaler in module.loss_scales.scalers.items()}

    def values(self, run: str) -> list[float]:
        return [scales[run] for scales in self.of_ranks()[0]]


@pytest.fixture
def scales(tmp_path: Path) -> Scales:
    return Scales(tmp_path / "scales")


class Loud(Objective):
    """Cross-entropy times a factor, at some steps or always: finite, but too much for float16 at some scales."""

    uses_teacher = False

    def __init__(self, factor: float, steps: Container[int] = range(100)) -> None:
        super().__init__()
        self.calls, self.factor, self.steps = 0, factor, steps

    def forward(self, student: Any, teacher: Any, labels: Tensor) -> dict[str, Term]:
        terms = CrossEntropy()(student, teacher, labels)
        factor = self.factor if self.calls in self.steps else 1.0
        self.calls += 1
        return {"ce": Term(terms["ce"].values * factor, 1.0)}


def company(**objectives: Objective) -> Distillation:
    return distil(objectives)


def clipped(module: Distillation, devices: int, **kwargs: Any) -> dict[str, Tensor]:
    fit(module, digits(), devices, max_epochs=4, plugins=[half(2.0**8)], gradient_clip_val=0.5, **kwargs)
    return weights(module.students["b"])


@pytest.mark.parametrize("devices", [1, 2])
def test_who_overflows_skips_its_own_steps_only(devices: int, scales: Scales, monkeypatch: pytest.MonkeyPatch) -> None:
    together = company(a=Loud(2.0**24, {3, 5}), b=CrossEntropy())
    b = clipped(together, devices, callbacks=[scales])
    assert scales.values("a") == [2.0**8] * 3 + [2.0**7] * 2 + [2.0**6] * 7
    assert scales.values("b") == [2.0**8] * 12
    assert_same(clipped(company(b=CrossEntropy()), devices), b)
    assert not together.failed
    monkeypatch.setattr(LossScales, "take_over", lambda *args: None)  # Lightning's one scaler couples them
    with pytest.raises(AssertionError):
        assert_same(clipped(company(a=Loud(2.0**24, {3, 5}), b=CrossEntropy()), devices), b)


def test_students_that_begin_with_too_large_a_scale_find_theirs_as_if_alone(tmp_path: Path) -> None:
    objectives: dict[str, Callable[[], Objective]] = {**VARIANTS, "loud": lambda: Loud(2.0**5)}

    def found(*names: str) -> tuple[Distillation, Scales]:
        scales = Scales(tmp_path / "-".join(names))
        module = company(**{name: objectives[name]() for name in names})
        return fit(module, digits(), max_epochs=5, plugins=[half()], callbacks=[scales]), scales  # type: ignore[return-value]

    together, all_scales = found(*objectives)
    for name in objectives:
        alone, scales = found(name)
        assert_same(weights(alone.students[name]), weights(together.students[name]))
        assert all_scales.values(name) == scales.values(name)
    assert all_scales.values("loud")[-1] < all_scales.values("ce")[-1] < HUGE


# torch's own loop is the reference


def batches() -> DataLoader:
    train = digits(train_size=96).split("train")
    data = TensorDataset(train.inputs.float() / 16, train.labels)
    return DataLoader(data, batch_size=20)  # the fifth has 16 images


def plain_loop(steps_of: int, clip: float | None, epochs: int, scaler: GradScaler) -> Iterator[tuple[float, nn.Module]]:
    model = net(dropout=0.0).to(memory_format=torch.channels_last)
    optimizer = Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        loader = batches()
        for i, (images, labels) in enumerate(loader):
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
                loss = losses.sum() * (1 / len(images)) / steps_of
            if i % steps_of == 0:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            if (i + 1) % steps_of == 0 or i + 1 == len(loader):
                scaler.unscale_(optimizer)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
            yield scaler.get_scale(), model


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_one_run_steps_as_in_torchs_own_loop(accumulated: int, clip: float | None, scales: Scales) -> None:
    settings: dict[str, Any] = {"init_scale": HUGE, "growth_interval": 2}
    reference = list(plain_loop(accumulated, clip, 6, GradScaler("cpu", **settings)))
    module = LitClassifier(net(dropout=0.0))
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated, "gradient_clip_val": clip, "max_epochs": 6}
    with warnings.catch_warnings(action="ignore"):  # Lightning's, about workers
        fit(module, batches(), plugins=[half(**settings)], callbacks=[scales], limit_val_batches=0, **options)
    sequence = scales.values("")
    assert sequence == [scale for scale, _ in reference]
    changes = [b / a for a, b in itertools.pairwise(sequence)]
    assert {0.5, 1.0, 2.0} == set(changes)
    assert_same(weights(module.net), weights(reference[-1][1]))


# What is logged


class Returned(Callback):
    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        self.values.append([outputs["loss"].item(), trainer.progress_bar_metrics["loss"]])


def test_losses_are_logged_as_they_are(tmp_path: Path) -> None:
    logger, returned = LinesLogger(tmp_path / "log"), Returned()
    options: dict[str, Any] = {"log_every_n_steps": 1, "logger": logger, "callbacks": [returned]}
    fit(distillation(["ce"], scheduler=None), digits(), max_epochs=1, plugins=[half()], **options)
    logged = logger.values("ce/train/loss")[:3]
    assert len(logged) == 3
    assert logged[0] == pytest.approx(2.3, abs=0.3)
    for value, (loss, bar) in zip(logged, returned.values, strict=True):
        assert (loss, bar) == pytest.approx((value, value), abs=1e-6)


# Cut off and resumed


@pytest.mark.parametrize("devices", [1, 2])
def test_resumed_in_mid_epoch_is_as_if_uninterrupted(devices: int, tmp_path: Path) -> None:
    def run(name: str, callback: Callback, path: Path | None = None) -> tuple[dict[str, Tensor], Any]:
        scales = Scales(tmp_path / name)
        module = company(ce=CrossEntropy(), loud=Loud(2.0**5), failed=Loud(torch.inf, {2}))
        with quiet():
            run = trainer(devices, max_epochs=7, plugins=[half(growth_interval=5)], callbacks=[callback, scales])
            run.fit(module, digits(), ckpt_path=path, weights_only=True)
        return weights(module), {name: scales.values(name) for name in module.runs}

    path = tmp_path / "middle.ckpt"
    ended, scales = run("whole", SaveAndStop(path, 16, stop=False))
    state = torch.load(path, weights_only=True)["learner"]["loss_scales"]
    assert state["ce"]["scale"] != state["loud"]["scale"]
    assert min(state[name]["_growth_tracker"] for name in ("ce", "loud")) > 0
    resumed, later_scales = run("half", Callback(), path)
    assert_same(resumed, ended)
    assert later_scales == {name: values[16:] for name, values in scales.items()}


def test_a_checkpoint_without_scales_begins_with_new_ones() -> None:
    module, saved = distillation(["ce"]), {"learner": {"train_sums": {}, "samples": 7, "failed": {}}}
    module.on_load_checkpoint(saved)
    module.loss_scales.take_over(half(), module.runs)
    assert (module.training_log.samples, module.loss_scales.scalers["ce"].get_scale()) == (7, HUGE)


# What goes with it, and what doesn't


def test_a_trainer_has_its_own_scaler_back_and_one_that_is_switched_off_stays_so() -> None:
    plugin = half()
    fit(distillation(["ce"]), digits(), plugins=[plugin])
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == HUGE  # it has rested
    module = distillation(["ce"])
    fit(module, digits(), plugins=[half(enabled=False)])
    assert module.loss_scales.state_dict() == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plugins": [half(1000.0)]}, r"GradScaler with scale.*1000.*expected powers of two"),
        ({"plugins": [half()], "strategy": DDP(exact=4)}, "expected another precision than 16-mixed"),
    ],
    ids=["would round", "exact"],
)
def test_what_scales_can_not_serve_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(distillation(["ce"]), digits(), **options)


def test_a_sharded_optimizer_steps_whom_ddp_would_and_refuses_a_scale_for_all() -> None:
    together = {strategy: company(a=Loud(2.0**24, {3, 5}), b=CrossEntropy()) for strategy in (DDP, ZeRO1)}
    for strategy, module in together.items():
        clipped(module, 2, strategy=strategy(timeout=60))
    assert_same(weights(together[DDP]), weights(together[ZeRO1]))
    with pytest.raises(ProcessRaisedException, match=r"strategy ddp_zero1: expected .* no loss scale"):
        fit(Foreign(), digits(), 2, strategy=ZeRO1(timeout=60), plugins=[half()], limit_val_batches=0)


class Kinked(Objective):
    """Cross-entropy, and a term of zero whose gradient is not a number."""

    uses_teacher = False

    def forward(self, student: Any, teacher: Any, labels: Tensor) -> dict[str, Term]:
        terms = CrossEntropy()(student, teacher, labels)
        return {**terms, "kink": Term((terms["ce"].values * 0).sqrt(), 1.0)}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_that_no_scale_can_help_has_failed(devices: int, scales: Scales) -> None:
    module = company(kinked=Kinked(), ce=CrossEntropy())
    before = weights(module.students["kinked"])
    fit(module, digits(), devices, plugins=[half(2.0**-22)], callbacks=[scales])
    assert_same(weights(module.students["kinked"]), before)
    assert scales.values("kinked") == [2.0**-23, 2.0**-24, *[2.0**-25] * 4]  # the last overflow was at 2**-24
    if devices == 1:
        assert module.failed == {"kinked": {"step": 2, "term": "gradient"}}


# Any number of processes


@in_ranks(2, backend="gloo")
def test_ranks_decide_alike_on_gradients_that_they_share_or_not() -> None:
    """Of gradients that are cut in two, a's is infinite on rank 1; b's are each rank's own, not a number on rank 0."""
    mesh = init_device_mesh("cpu", (2,))
    values = {"a": [1.0, 2.0, torch.inf], "b": [1.0 if dist.get_rank() else torch.nan], "c": [1.0, 2.0, 3.0]}
    scales, parameters = LossScales(), {}
    scales.take_over(half(8.0), values)
    for run, wanted in values.items():
        gradient: Tensor = torch.tensor(wanted) * 8
        gradient = gradient if run == "b" else distribute_tensor(gradient, mesh, [Shard(0)])
        parameters[run] = nn.Parameter(torch.zeros_like(gradient))
        parameters[run].grad = gradient
        scales.scalers[run].scale(torch.ones(()))
    with CommDebugMode() as messages:
        overflowed = scales.unscale({run: [p] for run, p in parameters.items()}, torch.device("cpu"))
    assert overflowed == ["a", "b"]
    assert messages.get_total_counts() == 1
    assert [scaler.get_scale() for scaler in scales.scalers.values()] == [4.0, 4.0, 8.0]
    gradient = parameters["c"].grad
    assert isinstance(gradient, DTensor)
    assert gradient.full_tensor().tolist() == [1.0, 2.0, 3.0]


def curves(module: Distillation, devices: int, path: Path, **kwargs: Any) -> dict[str, list[float]]:
    logger = LinesLogger(path)
    fit(module, digits(), devices, max_epochs=4, log_every_n_steps=1, logger=logger, **kwargs)
    return {name: logger.values(f"{name}/train/loss")[:12] for name in module.runs}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """In float32 on one process; these losses fall by 0.1 in 12 steps."""
    return curves(distillation(), 1, tmp_path_factory.mktemp("plain") / "log")


HALVES: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "bf16": (lambda: {"precision": "bf16-mixed"}, 1e-2),
    "fp16": (lambda: {"plugins": [half(2.0**12)]}, 2e-3),
}


QUICK: list[tuple[str, int, Any]] = [("bf16", 2, DDP), ("fp16", 2, DDP), ("fp16", 2, ZeRO1)]
NEAR = [
    *QUICK, ("fp16", 1, None), ("bf16", 2, LocalSGD), ("bf16", 2, DDPFP16), ("fp16", 2, DDPPowerSGD), ("bf16", 2, FSDP),
    ("fp16", 2, FSDP),
]  # fmt: skip


@pytest.mark.parametrize(("name", "devices", "make"), mostly_slow(NEAR, *QUICK))
def test_near_float32(name: str, devices: int, make: Any, plain: dict[str, list[float]], tmp_path: Path) -> None:
    options, tolerance = HALVES[name]
    if make is LocalSGD:  # learns otherwise
        plain = curves(distillation(), 2, tmp_path / "plain", strategy=make(timeout=60))
    strategy = make(timeout=60) if make else "auto"
    found = curves(distillation(), devices, tmp_path / "log", strategy=strategy, **options())
    differences = {name: max(abs(x - y) for x, y in zip(plain[name], found[name], strict=True)) for name in plain}
    assert all(0 < difference < tolerance for difference in differences.values()), differences
