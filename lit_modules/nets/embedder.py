"""Nets that embed: another net without what makes logits of its embedding."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import slice_rows
from lit_modules.nets.base import Net, cast_inputs, check_sizes, evaluating, pipeline_stages
from lit_modules.nets.layers import INPUT, resolve


class Embedder(Net):
    """The embedding of another net: the input of its classifier.

    That is the input of a net's `pooled_layer` or, of a net that names none, that of its last linear layer, which is
    left out; of a net that `embeds`, its output. Features of more dimensions are flattened.

    Attributes:
        width: values of an embedding.

    Args:
        net: a net, inputs (b, ...) -> logits (b, classes).
        width: values of an embedding, by a new linear layer with bias after it, which belongs to the net; default:
            those that it has.
        input_shape: of one input, by which the layer's width is found.

    Raises:
        BadInput: the net has no linear layer, or its classifier can't be left out.
    """

    def __init__(self, net: nn.Module, input_shape: Sequence[int] = (3, 32, 32), width: int | None = None) -> None:
        super().__init__()
        net = copy.deepcopy(net)  # whoever has the classifier keeps it
        if not getattr(net, "embeds", False):
            classifier = leave_out_classifier(net)
            self.unused_weights = f"net.{classifier}.", f"{classifier}."  # in files of the whole net
        self.net, self.head, self.pooled_layer = net, nn.Sequential(), "head<"
        if isinstance(net, Net):
            if feature_layer := getattr(net, "feature_layer", ""):  # a net of others may name none
                self.feature_layer = f"net.{feature_layer}"
            self.stages, self.preactivations = _inside(net.stages), _inside(net.preactivations)
            self.token_grid, self.expects, self.is_trained = net.token_grid, dict(net.expects), net.is_trained
            self.ranks = net.ranks
        with evaluating(net):
            self.width: int = self(cast_inputs(net, self.example(input_shape))).shape[-1]
        if width is not None:
            self._widen(width)

    @staticmethod
    def example(input_shape: Sequence[int]) -> Tensor:
        """Return two inputs (2, ...) of this shape."""
        return torch.zeros(2, *input_shape)

    def with_width(self, width: int) -> "Embedder":
        """Return a copy with a new last layer of this width; BadInput if it is less than 1."""
        wider = copy.deepcopy(self)
        wider._widen(width)
        wider.init_args = {**self.init_args, "width": width}
        return wider

    def with_net(self, net: nn.Module) -> "Embedder":
        """Return one that holds another net that embeds in as many values, with this one's last layer."""
        held = type(self)(**{**self.init_args, "net": net})
        held.head.load_state_dict(self.head.state_dict())
        return held

    def _widen(self, width: int) -> None:
        check_sizes(width=width)
        self.head.append(nn.Linear(self.width, width))
        self.width = width

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings (b, D) of inputs (b, ...)."""
        embeddings: Tensor = self.head(self.net(inputs).flatten(1))
        return embeddings

    def pipeline_stages(self) -> list[nn.Module]:
        return [*pipeline_stages(self.net), nn.Flatten(1), *self.head]


class TextEmbedder(Embedder):
    """The embedding of each of k texts, of another net that reads bytes.

    One that `embeds` takes them with their places, (b, k, L); any other one (b * k, L), each text by itself. Of one
    that `ranks`, whose scores have no width, it gives the scores.
    """

    @staticmethod
    def example(input_shape: Sequence[int]) -> Tensor:
        return torch.zeros(2, *input_shape, dtype=torch.uint8)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings (..., D) of texts (..., L), bytes that zeros fill up."""
        if getattr(self.net, "embeds", False):
            read = self.net(inputs)
        else:
            places = inputs.shape[:-1]
            with slice_rows(0, None, places[1:].numel())():
                read = self.net(inputs.flatten(0, -2)).flatten(1).unflatten(0, places)
        embeddings: Tensor = self.head(read)
        return embeddings


def _inside(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"net.{path}" for path in paths)


def leave_out_classifier(net: nn.Module) -> str:
    """Put nothing in the place of a net's classifier: what has its `pooled_layer` as input, else its last linear layer.

    Return its path; BadInput if there is neither.
    """
    path = resolve(net, "pooled").removesuffix(INPUT)
    if not path:
        linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
        if not linear:
            expected = "a net with a linear layer, or with the attribute pooled_layer, whose input is its embedding"
            raise BadInput("net", type(net).__name__, expected)
        path = linear[-1]
    parent, _, name = path.rpartition(".")
    setattr(net.get_submodule(parent), name, nn.Sequential())
    return path
