"""A float net that computes as its int8 form will, so that training makes up for what rounding costs."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import replicas
from apprentice.weights import check_weights
from lit_modules.nets.base import DEFAULT_LAYER, layer
from lit_modules.quantization import graphs
from lit_modules.quantization.ranges import Range


class FakeQuantized(nn.Module):
    """A net, inputs (b, ...) -> logits (b, classes), with fake quantisers from torchao's PT2E.

    Its BatchNorm is over the global batch, its ranges are the global batch's, its layers of dropout are the net's, and
    objectives find its layers where the net has them. Ranges are observed in training only.

    Args:
        net: a float net, trained; it is copied.
        example: inputs (1, ...), of the net's type.
        layers: whose outputs objectives compare, as they name them.

    Raises:
        Missing: torchao is not there.
        BadInput: the net has no such layer or none that can be int8, can't be captured, or draws noise outside of
            layers of dropout.
    """

    def __init__(self, net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> None:
        super().__init__()
        self.feature_layer = getattr(net, "feature_layer", "")
        self.frozen = False
        paths = list(dict.fromkeys(self.feature_layer if path == DEFAULT_LAYER else path for path in layers))
        for path in paths:
            layer(net, path)
        net = copy.deepcopy(net)
        template = graphs.prepared(net, example, paths)
        graph = graphs.with_modules(copy.deepcopy(template), net)
        # Not modules of this one: its state is the graph's.
        self._template, self._taps = [template], [_tap(self, path) for path in paths]
        self.graph = graph
        self._learn_shapes(example)
        self.train()

    @torch.no_grad()
    def _learn_shapes(self, example: Tensor) -> None:
        """Give each range of weights its size, a scale a channel; activations are still to be seen."""
        self.graph.eval()
        for module in self._ranges():
            module.train()
        with replicas.shard(0):  # each rank by itself
            self.graph(example)
        for module in self._ranges():
            if not module.per_channel:
                module.forget()

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits (b, classes) of inputs (b, ...)."""
        logits, *features = self.graph(inputs)
        for tap, feature in zip(self._taps, features, strict=True):
            tap(feature)
        return logits

    def _ranges(self) -> Iterator[Range]:
        return (module for module in self.graph.modules() if isinstance(module, Range))

    def train(self, mode: bool = True) -> "FakeQuantized":
        """As every module; once frozen, ranges and BatchNorm's statistics stay as they are."""
        super().train(mode)
        if self.frozen:
            for module in self.graph.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def freeze(self) -> None:
        """From now on use the ranges and BatchNorm's statistics as they are (Krishnamoorthi 2018, section 3.2.3)."""
        from torchao.quantization.pt2e import disable_observer

        self.frozen = True
        self.apply(disable_observer)  # which its state tells
        self.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FakeQuantized":
        super()._apply(fn, recurse)
        for module in self.graph.modules():
            if isinstance(getattr(module, "scale", None), Tensor):
                module.scale = module.scale.float()  # torch takes no other
        return self

    def float_state(self) -> dict[str, Tensor]:
        """The float net's state, under its own names."""
        prefix = f"{graphs.NET}."
        state = self.graph.state_dict()
        return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

    def load_float(self, weights: Mapping[str, Tensor], path: str = "", flag: str = "run") -> None:
        """Take over a float net's state, such as another seed's, as it takes seconds to prepare a net.

        Ranges of activations stay as they are.

        Args:
            weights: all that the float net has.
            path: of its file, for the message.
            flag: of that, likewise.

        Raises:
            BadInput: a key is missing, unknown or of another shape; all of them are named.
        """
        own = self.float_state()
        check_weights(own, weights, path, flag)
        for name, value in weights.items():
            own[name].copy_(value)

    def int8(self, state: Mapping[str, Tensor] | None = None) -> nn.Module:
        """What is deployed, in float32 where it is not int8; this net stays as it is, to the bit.

        Weights are rounded by their ranges of now, or by those they had when the net was frozen.

        Args:
            state: one of this net's, as `state_dict` gave it; what it has now if none is given.
        """
        graph = copy.deepcopy(self._template[0])
        state = self.state_dict() if state is None else state
        graph.to(next(iter(self.parameters())).dtype)
        graph.load_state_dict({name.removeprefix("graph."): value for name, value in state.items()})
        graphs.observe_weights(graphs.folded(graph))
        return graphs.converted(graph.float())


def _tap(root: nn.Module, path: str) -> nn.Module:
    """A module at that path through which the layer's output goes, so that hooks see it."""
    for part in path.split("."):
        if not isinstance(getattr(root, part, None), nn.Module):
            root.add_module(part, nn.Identity())
        root = getattr(root, part)
    return root


def post_training(net: nn.Module, batches: Iterator[Tensor] | Sequence[Tensor]) -> nn.Module:
    """An int8 net of a trained one, inputs (b, ...) -> logits (b, classes), its ranges from some batches of inputs.

    Raises:
        Missing: torchao is not there.
        BadInput: the net can't be captured, or nothing in it can be int8.
    """
    spec: Any = graphs.quantizer(training=False)
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    batches = list(batches)
    graph = graphs.observing(prepare_pt2e(graphs.captured(copy.deepcopy(net).eval(), batches[0]), spec), net)
    with torch.no_grad():
        for inputs in batches:
            graph(inputs)
    return graphs.converted(graph)
