"""A trained net as two files that need nothing else of us: its weights, and the class and arguments to rebuild it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from harness.config.classes import imported
from apprentice.errors import BadInput
from harness.runs.files import atomic, write_text

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
    write_spec(net_spec, folder)
    weights = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
    with atomic(folder / "weights.pt") as temporary:
        torch.save(weights, temporary)


def write_spec(net_spec: Spec, folder: Path) -> None:
    """Write `net.yaml` into the folder."""
    write_text(folder / "net.yaml", yaml.safe_dump(net_spec, sort_keys=False))


def read_spec(folder: Path, flag: str) -> Spec:
    """What a net's folder has in `net.yaml`.

    Raises:
        BadInput: there is no such file, or something else is in it.
    """
    path = folder / "net.yaml"
    try:
        found = yaml.safe_load(path.read_text())
        if set(found) == {"class_path", "init_args"}:
            return found
    except (OSError, TypeError, UnicodeDecodeError, yaml.YAMLError):
        pass
    raise BadInput(flag, folder, "a net's folder, as RUN/seed0/kd, with weights.pt and net.yaml")


def load_net(folder: str | Path) -> nn.Module:
    """The net that `save_net` wrote, rebuilt and in eval mode, on the CPU."""
    return rebuilt(folder, torch.load(Path(folder) / "weights.pt", weights_only=True, map_location="cpu"))


def rebuilt(folder: str | Path, weights: Mapping[str, Tensor]) -> nn.Module:
    """The net of a folder's `net.yaml` with these weights, in their type and in eval mode.

    Raises:
        RuntimeError: they are another net's.
    """
    found = yaml.safe_load((Path(folder) / "net.yaml").read_text())
    net = imported(found["class_path"], "net.yaml", (nn.Module,))(**found["init_args"])
    if kinds := {value.dtype for value in weights.values()} & {torch.float64, torch.bfloat16}:
        net.to(kinds.pop())  # trained in double precision: nothing is rounded
    net.load_state_dict(weights)
    return net.eval()
