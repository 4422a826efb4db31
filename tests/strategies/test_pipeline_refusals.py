"""What a pipeline refuses: one clear line each, before training where that can be known."""

from collections.abc import Callable
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
from strategies.pipeline.placement import StagePlacement
from tests.commands import bad_input
from tests.pipelines import Make, Plain, ended, loss, pairs, pipeline, variant
from tests.training import trainer


class Layer(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def cut(layer: Callable[[Any], Any]) -> Make:
    """Two stages; the first ends with a layer."""
    layers = nn.Linear(6, 8), Layer(layer), Layer(layer), nn.Linear(8, 3)
    return variant("Cut", net=nn.Sequential(*layers))


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    net[2].weight = net[1].weight
    return net


def fail(*_: Any) -> Any:
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


EXAMPLE = {"example_input_array": torch.ones(2, 6)}
CUT: dict[str, tuple[Make, int, dict[str, Any], str]] = {
    "few modules": (Plain, 5, {}, "expected at least 5 modules, one for each stage; Plain.pipeline_stages.* gives 4"),
    "balance": (Plain, 2, {"balance": [1, 1]}, r"balance \[1, 1\]: expected numbers that add up to 4"),
    "outside": (
        variant("Outside", extra=nn.Linear(3, 3)), 2, {},
        "expected every trainable parameter in a stage; extra.weight is in none",
    ),
    "tied": (
        variant("Tied", net=tied()), 2, {"balance": [2, 1]},
        "a weight belongs to one stage; net.1.weight is in stages 0 and 1",
    ),
    "manual": (
        variant("Manual", automatic_optimization=False), 2, {},
        "expected automatic optimization and Lightning's backward of Manual",
    ),
    "noise": (lambda: Plain(nn.Dropout(0.1)), 2, {"exact": 8}, "exact 8: expected apprentice.keyed.Dropout .* net.1"),
    "no stages": (LightningModule, 2, {}, "expected a module with pipeline_stages; LightningModule has none"),
    "another's layer": (
        variant("Elsewhere", pipeline_stages=lambda self: [*self.net, nn.Dropout(0.5)]), 2, {},
        "pipeline_stages: expected modules of Elsewhere itself; a Dropout is not",
    ),
    "a function": (
        variant("Function", pipeline_stages=lambda self: [*self.net, torch.relu]), 2, {},
        "expected modules from Function.pipeline_stages.., got a builtin_function_or_method",
    ),
    "a function between layers": (
        variant("Forgets", forward=lambda self, x: self.net[1:](torch.relu(self.net[0](x))), **EXAMPLE), 2, {},
        "Forgets.pipeline_stages: expected modules whose composition is forward; outputs differ",
    ),
    "another order": (
        variant("Reversed", pipeline_stages=lambda self: [*self.net][::-1], **EXAMPLE), 2, {},
        "Reversed.pipeline_stages: expected modules .* is forward; one refuses what it gets: .* shapes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CUT)
def test_modules_that_can_not_be_cut_are_refused_before_ranks_start(case: str) -> None:
    make, devices, options, message = CUT[case]
    with pytest.raises(ValueError, match=message):
        ended(make, pipeline(**options), devices=devices)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"detect_anomaly": True}, "detect_anomaly True: expected False"),
        ({"callbacks": [BackboneFinetuning()]}, "callbacks BackboneFinetuning: expected none that unfreezes"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "callbacks StochasticWeightAveraging: expected none"),
    ],
)
def test_trainers_that_can_not_work_are_refused_before_ranks_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ended(Plain, pipeline(), **settings)


def hook_parameters(self: Any) -> None:
    for p in self.parameters():
        if not p.is_meta:
            p.register_hook(lambda gradient: gradient / 2)


TWICE = variant("Twice", training_step=lambda self, batch: loss(self, self(batch[0]) + self(batch[0]), batch))
NEVER = variant("Never", training_step=lambda self, batch: loss(self, self.net(batch[0]), batch))
OTHER = variant(
    "Other",
    training_step=lambda self, batch: loss(self, self(batch[0]), batch),
    pipeline_loss=lambda self, output, batch: 2 * loss(self, output, batch),
)
HOOKED = variant("Hooked", on_fit_start=hook_parameters)
# The first loss is infinite; those after it are not those of pipeline_loss.
INFINITE = variant(
    "Infinite",
    training_step=lambda self, batch, i: (1 if i == 0 else 3) * self.pipeline_loss(self(batch[0]), batch),
    pipeline_loss=lambda self, x, batch: loss(self, x, batch) + (0 if self.trainer.global_step else torch.inf),
)
EXACT = {"exact": 8}
SHOWN: dict[str, tuple[Make, dict[str, Any], str]] = {
    "clips by hand": (
        variant("Clipped", on_before_optimizer_step=lambda s, _: nn.utils.clip_grad_norm_(s.parameters(), 1.0)), {},
        "Clipped: expected trainer.strategy.gradient_norm.parameters. in place of grad_norm",
    ),
    "forward twice": (TWICE, {}, "Twice.training_step: expected one call of forward, got a second"),
    "forward twice, exact": (TWICE, EXACT, "Twice.training_step: expected one call of forward, got a second"),
    "no forward": (NEVER, {}, "Never.training_step: expected one call of forward, got none"),
    "no forward, exact": (NEVER, EXACT, "Never.training_step: expected one call of forward, got none"),
    "a dict": (
        cut(lambda x: x["x"] if isinstance(x, dict) else {"x": x}), {"balance": [2, 2]},
        "the stage that ends with Layer: expected a tensor or a tuple of tensors .* dict",
    ),
    "rows": (cut(torch.t), {"balance": [2, 2]}, r"ends with Layer: expected tensors with the batch's 2 rows first"),
    "rows of a tuple": (
        variant("WithHidden", net=nn.Sequential(nn.Linear(6, 3), Layer(lambda x: (x, x.expand(2, *x.shape)))),
                pipeline_loss=lambda self, output, batch: loss(self, output[0], batch)), {},
        r"ends with Layer: expected tensors with the batch's . rows first, got one of \(2, ., 3\)",
    ),
    "a loss a row": (
        variant("Vector", pipeline_loss=lambda _, x, batch: F.cross_entropy(x, batch[1], reduction="none")), {},
        r"Vector.pipeline_loss: expected a scalar tensor, got \(2,\)",
    ),
    "another loss": (OTHER, {}, "Other.pipeline_loss: expected the loss that training_step returns, .* got"),
    "another loss, exact": (OTHER, EXACT, "Other.pipeline_loss: expected the loss that training_step returns, .* got"),
    "another loss later": (INFINITE, {}, "Infinite.pipeline_loss: expected the loss that training_step returns"),
    "a bug": (lambda: Plain(Layer(fail)), {}, "a bug of a stage's"),
    "a bug before forward": (
        variant("Batches", training_step=lambda self, batch: self(batch[0] @ torch.ones(5, 5)).sum()), {},
        "mat1 and mat2 shapes cannot be multiplied|expected m1 and m2",
    ),
    "hooks": (HOOKED, {}, r"expected parameters without hooks, .*; net..\.weight has one"),
    "hooks, exact": (HOOKED, EXACT, r"expected parameters without hooks, .*; net..\.weight has one"),
    "noise that no layer shows": (
        lambda: Plain(Layer(lambda x: F.dropout(x, 0.1))), EXACT,
        "exact 8: expected noise from apprentice.keyed in a pipeline, not torch's",
    ),
    "an argument by name": (
        variant("ByName", forward=lambda self, x, mask=None: self.net(x),
                training_step=lambda self, batch: loss(self, self(batch[0], mask=None), batch)), {},
        "ByName.forward: expected calls with tensors by position, .*; argument mask is a NoneType by",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHOWN)
def test_what_shows_in_training_ends_it(case: str) -> None:
    make, options, message = SHOWN[case]
    with pytest.raises(ProcessRaisedException, match=message):
        ended(make, pipeline(num_microbatches=None if options is EXACT else 4, **options))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (nn.BatchNorm1d(8), "net.1: BatchNorm sees a micro-batch"),
        (nn.Dropout(0.1), "net.1: noise from torch's generator"),
        (Dropout(0.1), ""),
    ],
)
def test_layers_whose_numbers_move_are_named(extra: nn.Module, message: str) -> None:
    def fit() -> None:  # on one rank, so that the warning, an error here, is raised where it can be seen
        ended(lambda: Plain(extra), pipeline(), devices=1, max_epochs=1)

    if message:
        with pytest.raises(ProcessRaisedException, match=message):
            fit()
    else:
        fit()


def test_micro_batches_of_an_evaluation_are_alike() -> None:
    module = variant("Widths", net=nn.Sequential(Layer(lambda x: x[:, : 1 + int(x[0, 0] > 0)]), nn.Tanh()))()
    made = trainer(2, strategy=pipeline(), precision="64-true")
    with quiet(), pytest.raises(ProcessRaisedException, match=r"expected a stage to give .* for every micro-batch"):
        made.predict(module, DataLoader(pairs(), batch_size=37))


def test_a_state_under_other_names_is_refused() -> None:
    placement = StagePlacement.__new__(StagePlacement)
    placement._names, placement.owners, placement.group = {}, {}, None
    line = bad_input(placement.full_state, {"renamed": torch.empty(2, device="meta")})
    assert line == "state_dict: expected parameters under their own names; renamed is none's"
