"""A trained net as two files that need nothing else of us: its weights, and the class and arguments to rebuild it."""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from apprentice.cli.imports import imported
from apprentice.errors import BadInput
from apprentice.files import atomic, write_text

Spec = dict[str, Any]


def spec(net_class: str, arguments: dict[str, Any]) -> Spec:
    """What `net.yaml` holds: the class's import path and its constructor's arguments.

    Raises:
        BadInput: an argument can't be written down.
    """
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    try:
        yaml.safe_dump(plain)
    except yaml.YAMLError:
        raise BadInput(net_class, plain, "arguments that a file can hold: numbers, texts, lists of them") from None
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
    net = imported(found["class_path"], "net.yaml", (nn.Module,))(**found["init_args"])
    weights = torch.load(Path(folder) / "weights.pt", weights_only=True, map_location="cpu")
    if any(value.dtype == torch.float64 for value in weights.values()):
        net.double()  # trained in double precision: nothing is rounded
    net.load_state_dict(weights)
    return net.eval()
