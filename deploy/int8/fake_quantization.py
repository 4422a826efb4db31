"""A float net that rounds as its int8 form will, so that training compensates for rounding."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from apprentice import replicas
from apprentice.private import BatchNorm
from deploy.int8 import graphs
from deploy.int8.ranges import Range
from lit_modules.nets.layers import layer, resolve
from lit_modules.nets.tokens import token_grid


class FakeQuantized(nn.Module):
    """A net, inputs (b, ...) -> logits (b, classes), with fake quantisers from torchao's PT2E: a copy of a trained one.

    BatchNorm and ranges use the global batch, dropout is the net's own, and objectives find the net's layers under
    their usual paths: those of `layers`. Ranges are observed in training only. `example` has inputs (1, ...), of the
    net's type.

    Raises:
        Missing: torchao is not installed.
        BadInput: the net has no such layer or none that can be int8, can't be captured, or draws noise outside of
            dropout layers.
    """

    def __init__(self, net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> None:
        super().__init__()
        for name in ("feature_layer", "stages", "preactivations", "pooled_layer"):
            setattr(self, name, getattr(net, name, ""))
        self.token_grid = token_grid(net)
        self.frozen = False
        for name in layers:
            layer(net, name)
        paths = list(dict.fromkeys(resolve(net, name) for name in layers))
        net = copy.deepcopy(net)
        template = graphs.prepare_trainable_graph(net, example, paths)
        graph = graphs.restore_modules(copy.deepcopy(template), net)
        # In lists, so that they are not submodules: the state dict is the graph's.
        self._template, self._taps = [template], [_tap(self, path) for path in paths]
        self.graph = graph
        self._learn_shapes(example)
        self.train()

    @torch.no_grad()
    def _learn_shapes(self, example: Tensor) -> None:
        """Set the size of weight ranges, a scale for each channel; activations are observed later."""
        self.graph.eval()
        ranges = [module for module in self.graph.modules() if isinstance(module, Range)]
        for module in ranges:
            module.train()
        with replicas.shard(0):  # each rank by itself
            self.graph(example)
        for module in ranges:
            if not module.per_channel:
                module.forget()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (b, classes) of inputs (b, ...)."""
        logits: Tensor
        logits, *features = self.graph(inputs)
        for tap, feature in zip(self._taps, features, strict=True):
            tap(feature)
        return logits

    def train(self, mode: bool = True) -> "FakeQuantized":
        """Set the mode; once frozen, ranges and BatchNorm statistics no longer change."""
        super().train(mode)
        if self.frozen:
            for module in self.graph.modules():
                if isinstance(module, BatchNorm):
                    module.eval()
        return self

    def freeze(self) -> None:
        """Stop updating ranges and BatchNorm statistics (Krishnamoorthi 2018, section 3.2.3)."""
        from torchao.quantization.pt2e import disable_observer

        self.frozen = True
        self.apply(disable_observer)  # which its state dict records
        self.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FakeQuantized":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's has no hints
        for module in self.graph.modules():
            if isinstance(getattr(module, "scale", None), Tensor):
                module.scale = module.scale.float()  # torch accepts no other type
        return self

    def int8(self, state: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Convert to the net to deploy, in float32 where it is not int8; `state` defaults to the current state dict.

        Rounds weights by their current ranges, or by those at the time of freezing. This net stays as it is.
        """
        graph = copy.deepcopy(self._template[0])
        state = self.state_dict() if state is None else state
        graph.to(next(iter(self.parameters())).dtype)
        graph.load_state_dict({name.removeprefix("graph."): value for name, value in state.items()})
        graphs.observe_weights(graphs.fold_batch_norms(graph))
        return graphs.convert(graph.float())


def _tap(root: nn.Module, path: str) -> nn.Module:
    """Add a module at that path that passes on the layer's output, so that hooks see it; return it."""
    for part in path.split("."):
        if not isinstance(getattr(root, part, None), nn.Module):
            root.add_module(part, nn.Identity())
        root = getattr(root, part)
    return root


def quantize_post_training(net: nn.Module, batches: Iterator[Tensor] | Sequence[Tensor]) -> nn.Module:
    """Convert a trained net to int8, inputs (b, ...) -> logits (b, classes), with ranges from batches of inputs.

    Raises:
        Missing: torchao is not installed.
        BadInput: the net can't be captured, or nothing in it can be int8.
    """
    batches = list(batches)
    graph = graphs.prepare_graph(copy.deepcopy(net), batches[0])
    with torch.no_grad():
        for inputs in batches:
            graph(inputs)
    return graphs.convert(graph)
