"""Checks of a user's net before it is trained."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput, first_line
from apprentice.keyed import with_seed
from lit_modules.nets.base import typed


def check_fits(
    net: nn.Module, example: Tensor, logits_shape: Sequence[int], flag: str = "net", trained: bool = True
) -> None:
    """Run a copy of the net on inputs (b, ...), b at least 2, in eval mode, and if `trained` in training mode.

    Raises:
        BadInput: it can't take such inputs, gives another shape, or raises BadInput itself.
    """
    name, shape = type(net).__name__, tuple(example.shape[1:])
    tried = copy.deepcopy(net)  # training changes BatchNorm's statistics
    for mode in (True, False) if trained else (False,):
        found: Any = None
        try:
            with torch.no_grad():
                found = with_seed(0, partial(tried.train(mode), typed(tried, example)))
        except BadInput as fault:
            raise BadInput(f"{flag}.{fault.flag}", fault.value, fault.expected) from None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            wanted = f"a net that takes inputs {shape}, as this data has them"
            raise BadInput(flag, name, f"{wanted}; it says: {first_line(error)}") from None
        if not isinstance(found, Tensor) or tuple(found.shape) != (len(example), *logits_shape):
            given = tuple(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
            raise BadInput(flag, name, f"a net that gives logits {tuple(logits_shape)} for an input; it gives {given}")


def check_same_start(net: nn.Module, again: nn.Module, flag: str = "net") -> None:
    """Raise BadInput, which names the first difference, if two nets made with one seed differ in initial weights."""
    first, second = net.state_dict(), again.state_dict()
    made = [key for key, x in first.items() if isinstance(x, Tensor) and not nn.parameter.is_lazy(x)]
    same = {key: first[key].shape == second[key].shape and first[key].allclose(second[key], 0, 0, True) for key in made}
    if differ := [key for key in made if not same[key]]:
        sources = "torch's, numpy's and Python's global random numbers"
        found = f"two made with one seed differ in {differ[0]}"
        raise BadInput(flag, type(net).__name__, f"a net whose first weights come from {sources} alone; {found}")
