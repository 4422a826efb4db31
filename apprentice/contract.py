"""What a module, a net or a batch can tell the strategies that train it. All of it is optional.

A strategy trains any LightningModule as it is. `layout_of` is how it learns more of one that has more to tell.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn


class Preparation(Protocol):
    """Makes, before the step of a global batch, inputs that the step uses beside the batch's own."""

    def prepare_rows(self, batch: Any, counted: bool) -> None:
        """Prepare for some rows of a global batch; `counted` unless another rank does the same."""

    def count_prepared(self) -> None:
        """Sum what was counted over all ranks, after the last of this rank's rows; collective."""


@dataclass(frozen=True)
class ModuleLayout:
    """What a module consists of and needs. The defaults are those of a module that has no `layout`.

    Attributes:
        sharded: modules that are called by themselves, each of which may be sharded; None: the children.
        read_layers: layers whose outputs a loss reads, or their inputs where true; each has to be whole on a rank.
        relates_rows: whether the loss relates rows of the global batch, by `apprentice.relations.relate`. A strategy
            that cuts batches then calls `shard_step` twice for each part.
        fewest_rows: of a part of a batch; BatchNorm needs more by itself.
        preparation: of each step; None: there is nothing to prepare.
        whole_nets_unless: where a rank needs whole nets, as the module calls them by themselves: what to choose to do
            without, for an error. Empty: no need.
        equal_weights_unless: the same where all ranks need equal weights at every step.
        seed: of random numbers in steps; None: Lightning's.
    """

    sharded: Sequence[nn.Module] | None = None
    read_layers: Sequence[tuple[nn.Module, bool]] = ()
    relates_rows: bool = False
    fewest_rows: int = 1
    preparation: Preparation | None = None
    whole_nets_unless: str = ""
    equal_weights_unless: str = ""
    seed: int | None = None


@runtime_checkable
class HasLayout(Protocol):
    """A module that says what it consists of, which may change from step to step."""

    def layout(self) -> ModuleLayout:
        """Return what strategies need to know now."""


@runtime_checkable
class HasShardStep(Protocol):
    """A module with state between steps, which a strategy that cuts batches calls so in place of `training_step`."""

    def shard_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of b rows of a global batch, and (b,) values by name; change no state."""

    def on_global_batch(self, means: Mapping[str, float], count: int) -> Iterable[nn.Parameter]:
        """Act on the means of the values over a global batch of `count` rows; return parameters that take no step."""


@runtime_checkable
class HasStages(Protocol):
    """A module that can be cut into stages."""

    def pipeline_stages(self) -> Iterable[nn.Module]:
        """Return modules in order, whose composition is `forward`; each gets the `request` of a call that has one."""


@runtime_checkable
class HasPipelineLoss(Protocol):
    """A module whose loss the last stage can compute by itself."""

    def pipeline_loss(self, output: Any, batch: Any) -> Tensor:
        """Return the loss of `training_step` for some rows of a batch, a mean over them, given `forward`'s output."""


@runtime_checkable
class HasTensorPlan(Protocol):
    """A net whose layers several ranks can compute together."""

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        """Return a style of `torch.distributed.tensor.parallel` by the path of a layer, in which * is any name."""


@runtime_checkable
class Joined(Protocol):
    """A linear layer that joins several matrices, each of which ranks cut by itself."""

    joined: tuple[tuple[int, ...], int]  # the matrices' rows, and the number of parts into which each can be cut


@runtime_checkable
class Gathers(Protocol):
    """A layer that communicates in `forward` if `gathers` is true, so that a rank without rows has to call it too."""

    gathers: bool


@runtime_checkable
class HasMaps(Protocol):
    """An attention whose maps a loss may ask for, in place of calling `forward`."""

    def weights(self, *args: Any) -> Tensor:
        """Return the maps."""


@runtime_checkable
class HasParts(Protocol):
    """A batch that can return some of its rows."""

    def part(self, start: int, stop: int) -> Any:
        """Return the rows from `start` to `stop` as a batch."""


def layout_of(module: object) -> ModuleLayout:
    """Return what a module says of itself; the defaults for one that says nothing."""
    return module.layout() if isinstance(module, HasLayout) else ModuleLayout()
