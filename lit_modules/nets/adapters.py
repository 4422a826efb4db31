"""LoRA (Hu et al. 2021, arXiv:2106.09685) by the package peft: small trained matrices beside frozen layers."""

import importlib
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.extras import need
from lit_modules.nets.attention.precision import widen

SCALE = 2  # alpha / rank


def add_adapters(model: nn.Module, rank: int) -> None:
    """Put adapters beside all linear layers of a model's blocks, in place, and freeze the rest.

    Raises:
        Missing: peft is not installed.
        BadInput: the rank is less than 1.
    """
    if rank < 1:
        raise BadInput("lora_rank", rank, "0, or a rank of at least 1")
    need("language", "peft")
    peft = importlib.import_module("peft")
    peft.inject_adapter_in_model(adapter_config(rank), model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # of the type of the layers beside them, whose rounding is larger than most steps
            parameter.data = widen(parameter.data)


def adapter_config(rank: int) -> Any:
    """Return peft's configuration of the adapters."""
    peft = importlib.import_module("peft")
    return peft.LoraConfig(
        r=rank, lora_alpha=SCALE * rank, target_modules="all-linear", exclude_modules=["lm_head"], task_type="CAUSAL_LM"
    )


def merge_adapters(model: nn.Module) -> None:
    """Add adapters to the weights of their layers, in place; the model has the plain layers then."""
    for path, layer in list(model.named_modules()):
        if hasattr(layer, "get_base_layer"):
            layer.merge()
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer.get_base_layer())
    model.requires_grad_(True)


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' weights, as files of peft name them."""
    peft = importlib.import_module("peft")
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(model)
    return {f"base_model.model.{key}": value.detach().cpu().contiguous() for key, value in state.items()}
