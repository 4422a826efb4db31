"""What parts of a language model matter, measured on a few texts: the loss without a block, activations."""

import math
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import label_mask
from lit_modules.nets.base import Net
from lit_modules.nets.from_teacher import Say
from lit_modules.nets.token_head import find_token_head, run_to_head

TRIES = 4  # blocks that are measured again before one more is left out


class Loss(Protocol):
    """The loss of a net with some of its blocks; `unit` says it, as `loss {:.3f} a token`."""

    unit: str

    def __call__(self, kept: Sequence[int]) -> float: ...

    def settle(self, kept: Sequence[int]) -> None:
        """Say that the next calls leave out one more than these."""


def drop_blocks(loss: Loss, count: int, left: int, say: Say = lambda _: None) -> tuple[list[int], float, float]:
    """Leave out one block after the other, each time the one without which the loss is least.

    Only the `TRIES` blocks that raised it least when they were last measured are measured again.

    Args:
        loss: of the net with some of its blocks.
        count: blocks of the net.
        left: blocks that stay.
        say: takes a line after each measurement.

    Returns:
        The blocks that are left, the loss with them, and the loss with all.
    """
    calls, done = 1 + count + sum(min(TRIES, size) for size in range(left + 1, count + 1)), 0

    def measure(kept: Sequence[int]) -> float:
        nonlocal done
        value, done = loss(kept), done + 1
        say(f"measured {done} of {calls} times, {len(kept)} of {count} blocks: {loss.unit.format(value)}")
        return value

    kept = list(range(count))
    whole = least = measure(kept)
    loss.settle(kept)
    increases = {number: measure(_without(kept, number)) - whole for number in kept}
    while len(kept) > left:
        tried = sorted(kept, key=lambda number: increases[number])[:TRIES]
        losses = {number: measure(_without(kept, number)) for number in tried}
        increases |= {number: value - least for number, value in losses.items()}
        dropped = min(tried, key=lambda number: losses[number])
        kept, least = _without(kept, dropped), losses[dropped]
        loss.settle(kept)
    return kept, least, whole


def _without(kept: Sequence[int], number: int) -> list[int]:
    return [block for block in kept if block != number]


class Subset:
    """Inside, the net computes with these blocks in place of the list of blocks at `path`."""

    def __init__(self, net: nn.Module, path: str, blocks: Sequence[nn.Module]) -> None:
        parent, _, self.name = path.rpartition(".")
        self.parent = net.get_submodule(parent)
        self.before, self.blocks = getattr(self.parent, self.name), nn.ModuleList(blocks)

    def __enter__(self) -> None:
        setattr(self.parent, self.name, self.blocks)

    def __exit__(self, *_: object) -> None:
        setattr(self.parent, self.name, self.before)


class _Stored(nn.Module):
    """In place of the first blocks: their output, which was computed before."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output


class TokenLoss:
    """The mean cross-entropy a token of a net with some of its blocks.

    What blocks before the one that is left out compute is stored, which halves the time, and logits are computed for
    the tokens alone that count, if a linear layer gives them.

    Args:
        net: tokens (b, T) -> logits (b, T, V), in eval mode; blocks pass on what they return.
        path: of the list of its blocks.
        tokens: (b, T).
        labels: (b, T), -100 counts nowhere.
    """

    unit = "loss {:.3f} a token"

    def __init__(self, net: nn.Module, path: str, tokens: Tensor, labels: Tensor) -> None:
        self.net, self.path, self.tokens = net, path, tokens
        self.counts = label_mask(labels)
        self.labels, self.head = labels[self.counts].long(), find_token_head(net, tokens[:1, :2])
        self.blocks = list(net.get_submodule(path).children())
        self.settled: tuple[list[int], list[Any]] = [], []  # blocks, and the output of each after those before it
        self.best: tuple[float, list[int], list[Any]] = math.inf, [], []  # since then

    @torch.no_grad()
    def __call__(self, kept: Sequence[int]) -> float:
        before, outputs = self.settled
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, before, strict=False)))
        blocks, new = [self.blocks[number] for number in kept[same:]], list[Any]()
        start = [_Stored(outputs[same - 1])] if same else []
        hooks = [block.register_forward_hook(lambda _m, _i, output: new.append(output)) for block in blocks]
        try:
            with Subset(self.net, self.path, [*start, *blocks]):
                logits = self._logits()
        finally:
            for hook in hooks:
                hook.remove()
        loss = F.cross_entropy(logits.float(), self.labels).item()
        if loss < self.best[0]:
            self.best = loss, list(kept), [*outputs[:same], *new]
        return loss

    def _logits(self) -> Tensor:
        """Compute those (n, V) of the tokens that count."""
        if self.head is None:
            logits: Tensor = self.net(self.tokens)
            return logits[self.counts]
        outputs = run_to_head(self.net, self.head, self.tokens)
        return outputs.logits_at(self.counts.flatten().nonzero().flatten())

    def settle(self, kept: Sequence[int]) -> None:
        _, best, outputs = self.best
        if best == list(kept):
            self.settled = best, outputs
        self.best = math.inf, [], []


class Distance:
    """How far the outputs of an encoder with some of its blocks are from those of the whole.

    Of embeddings the mean of 1 - cos, of a cross-encoder's scores that of squared differences.

    Args:
        net: inputs (b, ...) -> embeddings (..., D), or scores if it `ranks`; in eval mode.
        path: of the list of its blocks.
        inputs: (b, ...).
    """

    unit = "{:.3f} from the whole"

    @torch.no_grad()
    def __init__(self, net: Net, path: str, inputs: Tensor) -> None:
        self.net, self.path, self.inputs = net, path, inputs
        self.blocks, self.whole = list(net.get_submodule(path).children()), net(inputs)

    @torch.no_grad()
    def __call__(self, kept: Sequence[int]) -> float:
        with Subset(self.net, self.path, [self.blocks[number] for number in kept]):
            outputs = self.net(self.inputs)
        if self.net.ranks:
            return F.mse_loss(outputs, self.whole).item()
        return 1 - F.cosine_similarity(outputs, self.whole, -1).mean().item()

    def settle(self, kept: Sequence[int]) -> None:
        """Nothing: no block's output is stored."""


@torch.no_grad()
def mean_inputs(
    net: nn.Module, layers: Sequence[nn.Module], size: Callable[[Tensor], Tensor], tokens: Tensor, counted: Tensor
) -> list[Tensor]:
    """Return the mean of a size of each layer's inputs (n, D), such as their absolute values, over counted tokens.

    Args:
        net: tokens (b, T) -> anything.
        layers: of the net, each called once.
        size: of n inputs, (n, D) -> (n, parts).
        tokens: (b, T).
        counted: (b, T), True for those that count.
    """
    means: dict[nn.Module, Tensor] = {}

    def measure(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].view(*counted.shape, -1)[counted]
        means[layer] = size(x.float()).mean(0)

    hooks = [layer.register_forward_pre_hook(measure) for layer in layers]
    try:
        net(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return [means[layer] for layer in layers]


def largest(scores: Tensor, count: int) -> list[int]:
    """Return the places of the largest scores (n,), in their order; of equal ones the first."""
    return sorted(scores.argsort(descending=True, stable=True)[:count].tolist())
