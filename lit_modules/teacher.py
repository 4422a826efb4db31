"""The teacher of a distillation: a trained net, which is neither optimised nor saved."""

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets import unwrap_logits
from lit_modules.nets.recorded import Spec, rebuild
from lit_modules.nets.weights import load_weights


def trained_teacher(teacher: nn.Module | Spec, weights: str | Path | None) -> nn.Module:
    """The frozen teacher, with weights of a file if one is given; BadInput for one that would have none."""
    net: nn.Module = unwrap_logits(rebuild(teacher, "teacher"))
    if weights is not None:
        for line in load_weights(net, str(weights), "teacher_weights"):
            warnings.warn(f"{weights}: {line}", stacklevel=3)
    elif net is not teacher and not getattr(net, "is_trained", False):
        expected = "a trained net, or beside it teacher_weights=FILE: a checkpoint has no weights of the teacher"
        raise BadInput("teacher", type(net).__name__, expected)
    return net.requires_grad_(False).eval()


def leave_out_of_state(module: nn.Module) -> None:
    """Let a module's state dict not have the parameters of its `teacher`, nor ask for them."""
    module.register_state_dict_post_hook(_remove_teacher)
    module.register_load_state_dict_post_hook(_allow_missing_teacher)


def _remove_teacher(_module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    for key in [k for k in state if k.startswith(f"{prefix}teacher.")]:
        del state[key]


def _allow_missing_teacher(_module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [k for k in keys.missing_keys if not k.startswith("teacher.")]
