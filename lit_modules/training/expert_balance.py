"""The loss that balances the loads of a mixture's experts (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from apprentice.batch import Batch, label_mask
from apprentice.contract import ModuleLayout
from apprentice.errors import BadInput
from apprentice.relations import relate
from lit_modules.nets.layers import observe
from lit_modules.nets.mlps import MixtureOfExperts, softmax
from lit_modules.training.extras import Extra, MoreLosses

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop

BALANCE = "balance"


class ExpertBalance(Extra["Loop"]):
    """Adds to the loss of each run that of the mixtures in its net.

    Args:
        mixtures: by run and by path, of the runs that have some.
    """

    def __init__(self, mixtures: Mapping[str, Mapping[str, MixtureOfExperts]]) -> None:
        self.mixtures = mixtures

    @classmethod
    def of(cls, loop: "Loop") -> list["ExpertBalance"]:
        """Return it for a loop whose nets have such mixtures, and else nothing."""
        mixtures = {run: balanced_mixtures(loop.net_of(run)) for run in loop.runs}
        mixtures = {run: of_net for run, of_net in mixtures.items() if of_net}
        return [cls(mixtures)] if mixtures else []

    def add_to_layout(self, loop: "Loop", layout: ModuleLayout) -> ModuleLayout:
        return replace(layout, relates_rows=True)

    @contextmanager
    def watch(self, loop: "Loop", batch: Batch) -> Iterator[Callable[[], list[MoreLosses]]]:
        active = {run: mixtures for run, mixtures in self.mixtures.items() if run not in loop.inactive}
        with ExitStack() as stack:
            outputs = {run: stack.enter_context(observe_routers(mixtures)) for run, mixtures in active.items()}

            def losses() -> list[MoreLosses]:
                return [self._loss(loop, run, outputs[run], batch) for run in active]

            yield losses

    def _loss(self, loop: "Loop", run: str, outputs: Mapping[str, Tensor], batch: Batch) -> MoreLosses:
        balance = balance_loss(self.mixtures[run], outputs, batch)
        scaled = loop.loss_scales.scaled(run, batch.mean(balance))
        return MoreLosses(scaled, {f"{run}/{BALANCE}".lstrip("/"): balance.detach()})


def balanced_mixtures(net: nn.Module) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of a net, by their paths, whose loads a loss balances."""
    mixtures = ((path, module) for path, module in net.named_modules() if isinstance(module, MixtureOfExperts))
    return {path: mixture for path, mixture in mixtures if mixture.balance}


def observe_routers(mixtures: Mapping[str, MixtureOfExperts]) -> AbstractContextManager[dict[str, Tensor]]:
    """Inside, collect the outputs of the mixtures' routers, by path."""
    return observe({path: mixture.router for path, mixture in mixtures.items()})


def balance_loss(mixtures: Mapping[str, MixtureOfExperts], outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Return (b,) of a batch's rows the loss of the global batch, whose gradient is that of its mean over the rows.

    For each mixture E Σ_e f_e P_e times its weight: f_e, the choices of expert e over the tokens; P_e, the mean of its
    probability. Both are of the global batch, without tokens that count in no loss. The product of means is not the
    mean of products, so no rank can compute its part alone. Equal loads give `top_k` times the weight.

    Args:
        mixtures: of one net, by path.
        outputs: of their routers, logits (b, T, E).
        batch: the rows of this rank.

    Raises:
        BadInput: a router's output is missing, as in a net that was compiled.
    """
    tree, sizes, rows = list[tuple[Tensor, Tensor, Tensor]](), list[float](), len(batch.rows)
    for path, mixture in mixtures.items():
        if path not in outputs:
            raise BadInput(BALANCE, mixture.balance, "0 in a compiled net, of which routers' outputs can't be read")
        probabilities = softmax(outputs[path][:rows])  # of stand-ins for no rows, none
        counted = torch.ones_like(probabilities[..., 0])
        if batch.labels.shape == counted.shape:
            counted = counted * label_mask(batch.labels)
        chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(mixture.top_k).indices, 1.0)
        choices, shares = ((x * counted[..., None]).sum(1) for x in (chosen.detach(), probabilities))
        tree.append((choices, shares, counted.sum(1)))
        sizes.append(mixture.balance * mixture.experts)

    def relation(whole: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
        total = whole[0][1].new_zeros(())
        for size, (choices, shares, tokens) in zip(sizes, whole, strict=True):
            count = tokens.sum().clamp(min=1)
            total = total + size * (choices.sum(0) / count * (shares.sum(0) / count)).sum()
        return total.expand(len(whole[0][2])), {}

    return relate(relation, tree, batch.rows, batch.count)[0]
