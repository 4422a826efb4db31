"""What a pipeline refuses: one clear line each, before training where that can be known."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.utils.data import DataLoader

from apprentice.keyed import Dropout
from harness.runs.quiet import quiet
from tests.pipelines import Conv, Linear, Make, Plain, ended, fitted, pairs, pipeline
from tests.training import trainer


class Outside(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)


class Tied(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64))
        self.net[2].weight = self.net[1].weight


class Twice(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch.inputs) + self(batch.inputs), batch.labels)


class Never(Linear):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch.inputs), batch.labels)


class Manual(Linear):
    automatic_optimization = False


class Named(nn.Module):
    def forward(self, x: Any) -> Any:
        return x["x"] if isinstance(x, dict) else {"x": x}


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t()


class Mapped(Linear):
    def __init__(self, layer: type[nn.Module] = Named) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), layer(), layer(), nn.Linear(32, 10))


class Vector(Linear):
    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output, batch.labels, reduction="none")


class Other(Linear):
    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return 2 * super().pipeline_loss(output, batch)


class Clipped(Linear):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)


class Broken(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, Breaks())


class Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a bug of a stage's")


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (2, {"schedule": "2F1B"}, "schedule 2F1B: expected GPipe, 1F1B"),
        (2, {"num_microbatches": 0}, "num_microbatches 0: expected at least 1"),
        (2, {"num_microbatches": 1}, "schedule 1F1B: expected one for 1 micro-batches and 2 ranks: Number of micro"),
        (
            2,
            {"schedule": "DualPipeV", "num_microbatches": 3},
            "schedule DualPipeV: expected .* as many microbatches as",
        ),
        (
            2,
            {"schedule": "ZBVZeroBubble", "stages_per_rank": 1},
            "schedule ZBVZeroBubble: expected .* exactly 2 stages",
        ),
        (2, {"schedule": "GPipe", "stages_per_rank": 2}, "schedule GPipe: expected .* one stage on each rank"),
        (3, {"data_parallel_size": 2}, "data_parallel_size 2: expected a number that divides the 3 devices"),
        (2, {"balance": "luck"}, "balance luck: expected parameters, time or a list"),
        (2, {"balance": [4]}, r"balance \[4\]: expected 2 numbers, one for each stage"),
        (2, {"balance": [4, 0]}, r"balance \[4, 0\]: expected at least one module for every stage"),
        (2, {"exact": 8, "num_microbatches": 4}, "num_microbatches 4: expected 8 or none, as the shards of exact 8"),
        (4, {"exact": 1, "data_parallel_size": 2}, "exact 1: expected at least 2"),
    ],
    ids=str,
)
def test_options_that_can_not_work_are_refused_at_once(devices: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(devices, strategy=pipeline(**options))


@pytest.mark.parametrize(
    ("make", "devices", "options", "message"),
    [
        (Linear, 5, {}, "expected at least 5 modules, one for each stage; Linear.pipeline_stages.* gives 4"),
        (Linear, 2, {"balance": [1, 1]}, r"balance \[1, 1\]: expected numbers that add up to 4"),
        (Outside, 2, {}, "expected every trainable parameter in a stage; extra.weight is in none"),
        (Tied, 2, {"balance": [2, 1]}, "a weight belongs to one stage; net.1.weight is in stages 0 and 1"),
        (Manual, 2, {}, "expected automatic optimization and Lightning's backward of Manual"),
        (lambda: Conv(nn.Dropout(0.1)), 2, {"exact": 8}, "exact 8: expected apprentice.keyed.Dropout .* first.3"),
        (LightningModule, 2, {}, "expected a module with pipeline_stages; LightningModule has none"),
    ],
)
def test_modules_that_can_not_be_cut_are_refused_before_ranks_start(
    make: Make, devices: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(make, devices, pipeline(**options))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Clipped, {}, "Clipped: expected trainer.strategy.gradient_norm.parameters. in place of grad_norm"),
        (Twice, {}, "Twice.training_step: expected one call of forward, got a second"),
        (Twice, {"exact": 8}, "Twice.training_step: expected one call of forward, got a second"),
        (Never, {}, "Never.training_step: expected one call of forward, got none"),
        (Never, {"exact": 8}, "Never.training_step: expected one call of forward, got none"),
        (
            Mapped,
            {"balance": [3, 2]},
            "the stage that ends with Named: expected a tensor or a tuple of tensors .* dict",
        ),
        (
            lambda: Mapped(Turned),
            {"balance": [3, 2]},
            r"ends with Turned: expected tensors with the batch's 5 rows first",
        ),
        (Vector, {}, r"Vector.pipeline_loss: expected a scalar tensor, got \(5,\)"),
        (Other, {}, "Other.pipeline_loss: expected the loss that training_step returns, .* got"),
        (Other, {"exact": 8}, "Other.pipeline_loss: expected the loss that training_step returns, .* got"),
        (Broken, {}, "a bug of a stage's"),
    ],
)
def test_what_shows_in_training_ends_it(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProcessRaisedException, match=message):
        fitted(make, 2, pipeline(**options), max_epochs=1)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (nn.BatchNorm2d(8), "first.3: BatchNorm sees a micro-batch"),
        (nn.Dropout(0.1), "first.3: noise from torch's generator"),
        (Dropout(0.1), ""),
    ],
)
def test_layers_whose_numbers_move_are_named(extra: nn.Module, message: str) -> None:
    # On one rank, so that the warning, an error here, is raised where it can be seen.
    if message:
        with pytest.raises(ProcessRaisedException, match=message):
            fitted(lambda: Conv(extra), 1, pipeline(), max_epochs=1)
    else:
        fitted(lambda: Conv(extra), 1, pipeline(), max_epochs=1)


class Infinite(Plain):
    """Its first loss is infinite; those after it are not those of pipeline_loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch)
        return loss if batch_idx == 0 else 3 * loss

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        loss = super().pipeline_loss(output, batch)
        return loss + (torch.inf if self.trainer.global_step == 0 else 0)


class Widths(Plain):
    """What goes to its last stage is as wide as the first row says."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Cut(), nn.Tanh())


class Cut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : 1 + int(x[0, 0] > 0)]


class Hidden(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x.expand(2, *x.shape)


class WithHidden(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(Hidden())

    def pipeline_loss(self, output: Any, batch: Any) -> torch.Tensor:
        return F.cross_entropy(output[0], batch[1])


class Hooked(Plain):
    def on_fit_start(self) -> None:
        for p in self.parameters():
            if not p.is_meta:
                p.register_hook(lambda gradient: gradient / 2)


class Functional(Plain):
    """Noise that no layer shows."""

    def __init__(self) -> None:
        super().__init__(Drops())


class Drops(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.1, self.training)


class ByName(Plain):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.pipeline_loss(self(batch[0], mask=None), batch)

    def forward(self, x: torch.Tensor, mask: Any = None) -> Any:
        return self.net(x)


class Batches(Plain):
    """A bug before forward."""

    def training_step(self, batch: Any) -> torch.Tensor:
        return super().training_step([batch[0] @ torch.ones(5, 5), batch[1]])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Infinite, {}, "Infinite.pipeline_loss: expected the loss that training_step returns"),
        (WithHidden, {}, r"ends with Hidden: expected tensors with the batch's . rows first, got one of \(2, ., 3\)"),
        (Hooked, {}, r"expected parameters without hooks, .*; net..\.weight has one"),
        (Hooked, {"exact": 8}, r"expected parameters without hooks, .*; net..\.weight has one"),
        (Functional, {"exact": 8}, "exact 8: expected noise from apprentice.keyed in a pipeline, not torch's"),
        (ByName, {}, "ByName.forward: expected calls with tensors by position, .*; argument mask is a NoneType by"),
        (Batches, {}, "mat1 and mat2 shapes cannot be multiplied|expected m1 and m2"),
    ],
)
def test_what_would_give_other_numbers_ends_the_fit(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProcessRaisedException, match=message):
        ended(make, pipeline(num_microbatches=None if options else 4, **options))


def test_micro_batches_of_an_evaluation_are_alike() -> None:
    module, made = Widths(), trainer(2, strategy=pipeline(), precision="64-true")
    with quiet(), pytest.raises(ProcessRaisedException, match=r"expected a stage to give .* for every micro-batch"):
        made.predict(module, DataLoader(pairs(), batch_size=37))


class Elsewhere(Plain):
    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.net, nn.Dropout(0.5)]


class Function(Plain):
    def pipeline_stages(self) -> Any:
        return [*self.net, torch.relu]


class Forgets(Plain):
    """A function between the layers that is no stage's."""

    example_input_array = torch.ones(2, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net[1:](torch.relu(self.net[0](x)))


class Reversed(Plain):
    """A layer gets a shape that it can't take."""

    example_input_array = torch.ones(2, 6)

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.net][::-1]


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Elsewhere, {}, "pipeline_stages: expected modules of Elsewhere itself; a Dropout is not"),
        (Function, {}, "expected modules from Function.pipeline_stages.., got a builtin_function_or_method"),
        (Forgets, {}, "Forgets.pipeline_stages: expected modules whose composition is forward; outputs differ"),
        (Reversed, {}, "Reversed.pipeline_stages: expected modules .* is forward; one refuses what it gets: .* shapes"),
        (Plain, {"detect_anomaly": True}, "detect_anomaly True: expected False"),
        (Plain, {"callbacks": [BackboneFinetuning()]}, "callbacks BackboneFinetuning: expected none that unfreezes"),
        (Plain, {"callbacks": [StochasticWeightAveraging(0.1)]}, "callbacks StochasticWeightAveraging: expected none"),
    ],
)
def test_what_can_not_work_is_refused_before_ranks_start(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ended(make, pipeline(), **settings)
