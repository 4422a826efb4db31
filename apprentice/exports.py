"""A trained net as two files that need nothing else of us: its weights, and the class and arguments to rebuild it."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from apprentice.files import atomic, write_text

Spec = dict[str, Any]


def spec(net_class: str, arguments: dict[str, Any]) -> Spec:
    """What `net.yaml` holds: the class's import path and its constructor's arguments."""
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    return {"class_path": net_class, "init_args": plain}


def save_net(net: nn.Module, net_spec: Spec, folder: Path) -> None:
    """Write `weights.pt` (a bare state dict on the CPU) and `net.yaml` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "net.yaml", yaml.safe_dump(net_spec, sort_keys=False))
    weights = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
    with atomic(folder / "weights.pt") as temporary:
        torch.save(weights, temporary)


def load_net(folder: str | Path) -> nn.Module:
    """The net that `save_net` wrote, rebuilt and in eval mode, on the CPU."""
    found = yaml.safe_load((Path(folder) / "net.yaml").read_text())
    module, _, name = found["class_path"].rpartition(".")
    net = getattr(import_module(module), name)(**found["init_args"])
    net.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True, map_location="cpu"))
    return net.eval()
