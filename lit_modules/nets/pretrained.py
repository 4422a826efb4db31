"""First weights from a file, for nets with a head of their own."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from apprentice.weights import check_weights


def load_backbone(
    net: nn.Module, weights: Mapping[str, Tensor], head: str, name: str, unused: Sequence[str] = ()
) -> bool:
    """Load a net's weights, but not those of its head, a child, that have another shape; whether it has its head now.

    `unused` begin the keys that the net ignores; `name` is what `--weights` was given.

    Raises:
        BadInput: others don't fit.
    """
    own = net.state_dict()
    other = {
        key for key in own if key.startswith(f"{head}.") and key in weights and weights[key].shape != own[key].shape
    }
    known = {key: value for key, value in weights.items() if not key.startswith(tuple(unused))}
    found = {key: own[key] if key in other else value for key, value in known.items()}
    check_weights(own, found, name, "weights", type(net).__name__)
    net.load_state_dict(found)
    return not other
