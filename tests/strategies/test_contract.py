"""What a LightningModule of anyone's tells strategies by `apprentice.contract`."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import strategies
from apprentice import replicas
from apprentice.contract import ModuleLayout, layout_of
from apprentice.errors import BadInput
from lab.strategies import LocalSGD
from strategies import DDP, FSDP
from strategies.sharding import units
from tests.pipelines import Plain, ended, pairs, variant
from tests.training import assert_same


def floats() -> DataLoader:
    x, y = pairs(20).tensors
    return DataLoader(TensorDataset(x.float(), y), 10)


class Stateful(Plain):
    """Has a state that follows global batches, draws noise, and counts a batch's rows before its step."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        self.of_layout, self.counted, self.rows = seed, 0, 0
        self.register_buffer("seen", torch.zeros(3))

    def layout(self) -> ModuleLayout:
        return ModuleLayout(preparation=self, fewest_rows=3, seed=self.of_layout)

    def prepare_rows(self, batch: Any, counted: bool) -> None:
        self.counted += counted * len(batch[0])

    def count_prepared(self) -> None:
        self.rows, self.counted = int(replicas.all_reduce_sum(torch.tensor(self.counted))), 0

    def shard_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        assert len(batch[0]) >= 3
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none") * torch.rand(())
        return losses.mean(), {"loss": losses, "rows": torch.full_like(losses, self.rows)}

    def on_global_batch(self, means: Mapping[str, float], count: int) -> list[nn.Parameter]:
        self.get_buffer("seen").add_(torch.tensor([means["loss"], means["rows"], count]))
        return []


def trained(devices: int, seed: int = 7) -> dict[str, Tensor]:
    return ended(lambda: Stateful(seed), DDP(timeout=60, exact=4), floats, devices, precision="32-true")[0]


def test_a_module_with_state_is_exact_and_prepares_each_step_once() -> None:
    one = trained(1)
    assert one["seen"][1:].tolist() == [60.0, 60.0]  # in three epochs of two batches of ten
    assert_same(one, trained(2), atol=0)
    assert not torch.equal(one["net.0.weight"], trained(1, seed=8)["net.0.weight"])


def test_a_module_that_says_nothing_has_the_defaults() -> None:
    module = Plain()
    assert layout_of(module) == ModuleLayout()
    assert list(units(module)) == [module.net]


def test_a_layout_names_what_is_sharded() -> None:
    module: Any = variant("Named", layout=lambda self: ModuleLayout(sharded=[self.net[0], self.net[2]]))()
    assert list(units(module)) == [module.net[0], module.net[2]]


def test_a_module_says_what_it_needs_of_a_strategy() -> None:
    whole = variant("Whole", layout=lambda _: ModuleLayout(whole_nets_unless="one that writes nothing"))()
    equal = variant("Equal", layout=lambda _: ModuleLayout(equal_weights_unless="one that waits for none"))()
    with pytest.raises(BadInput, match=r"^strategy FSDP: expected one that writes nothing, or ddp or ddp_zero1, whose"):
        FSDP().check_module(whole)
    with pytest.raises(BadInput, match=r"^strategy LocalSGD: expected one that waits for none, or another: ranks have"):
        LocalSGD().check_module(equal)
    for module, strategy in ((whole, LocalSGD()), (equal, FSDP()), (whole, DDP()), (equal, DDP())):
        strategy.check_module(module)


def test_a_strategy_has_one_line_of_bases() -> None:
    """What else it is made of, such as exactness, it holds."""
    for path, _ in strategies.NAMES.values():
        if path.startswith("strategies."):
            kinds = resolve_name(path).__mro__
            assert {len(kind.__bases__) for kind in kinds[: kinds.index(DDPStrategy)]} == {1}, path
