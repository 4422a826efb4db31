"""Where a student comes from: the folder that its run has left."""

import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from apprentice.checkpoints import fitting, read_weights
from apprentice.cli.imports import imported
from apprentice.cli.sources import flags, load
from apprentice.exports import Spec, read_spec


def with_data_of_run(argv: Sequence[str], default: str) -> list[str]:
    """The flags, and before them the data that the student's run was on: what is given beside it changes that."""
    run = flags(argv).get("run")
    settings = Path(run).parent.parent / "config.yaml" if isinstance(run, str) else None
    if settings is None or not settings.is_file():
        return list(argv)
    return ["--data", json.dumps(load(settings, "run").get("data", default)), *argv]


def read_net(folder: str | Path, flag: str) -> tuple[nn.Module, Spec]:
    """A user's net from `weights.pt` and `net.yaml`, in float32 and in eval mode, and how to rebuild it.

    Raises:
        BadInput: there are no such files, or they are broken; or the weights don't fit, when all that differs is named.
    """
    spec = read_spec(Path(folder), flag)
    net = imported(spec["class_path"], flag, (nn.Module,))(**spec["init_args"])
    path = str(Path(folder) / "weights.pt")
    net.load_state_dict(fitting(net.state_dict(), read_weights(path, flag), path, flag))
    return net.eval(), spec
