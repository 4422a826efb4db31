"""First weights from a file, for nets with a head of their own."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from apprentice.weights import check_weights
from lit_modules.nets.weights import load_checked, named_as_in


def load_backbone(
    net: nn.Module, weights: Mapping[str, Tensor], head: str, name: str, unused: Sequence[str] = ()
) -> bool:
    """Load a net's weights, but not those of its head, a child, that have another shape; whether it has its head now.

    `unused` begin the keys that the net ignores; `name` is what `--weights` was given.

    Raises:
        BadInput: others don't fit.
    """
    own = net.state_dict()
    named, other = named_as_in(net, weights, unused), False
    for key, value in named.items():
        if key.startswith(f"{head}.") and key in own and value.shape != own[key].shape:
            named[key], other = own[key], True
    check_weights(own, named, name, "weights", type(net).__name__)
    load_checked(net, named)
    return not other
