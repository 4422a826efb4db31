"""Initial weights from a file, for nets whose head may have another size."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from apprentice.weights import check_weights
from lit_modules.nets.weights import load_checked, match_names


def load_backbone(
    net: nn.Module, weights: Mapping[str, Tensor], head: str, name: str, unused: Sequence[str] = ()
) -> bool:
    """Load weights into a net; those of its head, a child, stay new if their shapes differ. Returns whether all fit.

    `unused` are prefixes of keys that the net ignores; `name` is the value of `weights` in messages.

    Raises:
        BadInput: weights beside the head's don't fit.
    """
    state, has_head = net.state_dict(), True
    matched = match_names(net, weights, unused)
    for key, value in matched.items():
        if key.startswith(f"{head}.") and key in state and value.shape != state[key].shape:
            matched[key], has_head = state[key], False
    check_weights(state, matched, name, "weights", type(net).__name__)
    load_checked(net, matched)
    return has_head
