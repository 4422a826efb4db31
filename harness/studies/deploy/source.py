"""What a study starts from: the folder that a student's run has left, and the images of its data."""

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput
from harness.config.imports import imported
from harness.config.layers import layers_of
from harness.config.sources import flags, load
from harness.runs.nets import Spec, load_net, read_spec


def data_of_run(argv: Sequence[str], default: Any, kind: type) -> Any:
    """What `--data` is when it is not given: what the student's run was on, `default` where no run is named.

    Args:
        argv: the flags; they or a file of theirs name the run.
        default: a class by its short name.
        kind: what the run's data has to be.

    Returns:
        As `config.yaml` has it; None where no such file says it.

    Raises:
        BadInput: the run was on another kind of data.
    """
    given: dict[str, Any] = {}
    for layer in layers_of(flags(argv)):
        given |= layer.given
    run = given.get("run")
    if not isinstance(run, str):
        return default
    settings = Path(run).resolve().parent.parent / "config.yaml"
    data = load(settings, "run").get("data") if settings.is_file() else None
    if isinstance(data, dict) and "class_path" in data:
        try:
            imported(data["class_path"], "data", (kind,))
        except BadInput as fault:
            raise BadInput("run", run, f"a student of images; its run's data is {fault.value}") from None
    return data


def read_net(folder: str | Path, flag: str, input_shape: tuple[int, ...]) -> tuple[nn.Module, Spec]:
    """A user's net from `weights.pt` and `net.yaml`, in float32 and in eval mode, and how to rebuild it.

    Args:
        folder: where these are.
        flag: that names it.
        input_shape: of the data's images, for which the net has to be made.

    Raises:
        BadInput: there are no such files, or they are broken; they are of a net for other images; or the weights don't
            fit, when all that differs is named.
    """
    spec, net = read_spec(folder, flag), load_net(folder, flag)
    made = tuple(spec["init_args"].get("input_shape", input_shape))
    if made != tuple(input_shape):
        raise BadInput(flag, folder, f"a net for inputs {tuple(input_shape)}, as this data has them; it is for {made}")
    return net.float(), spec


@contextmanager
def of_net(flag: str, value: object, *more: str) -> Iterator[None]:
    """What is wrong with a net is said in one line, of the flag that names it.

    Args:
        flag: that one.
        value: what it says.
        more: other names under which faults are told of that net.

    Raises:
        BadInput: whatever torch.export and torchao say of a net that they don't take.
    """
    told = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(told):  # where it fails, torch.export prints the whole graph
            yield
        sys.stderr.write(told.getvalue())
    except BadInput as fault:
        if fault.flag.partition(".")[0] not in {flag, *more}:
            raise
        raise BadInput(flag, value, fault.expected) from None
    except Exception as error:
        raise BadInput(flag, value, f"a net that can be quantised; it says: {_line(error)[:200]}") from error
    finally:
        logging.disable(logging.NOTSET)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def images_of(data: Any, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Images of a split, normalised, float32 (N, C, H, W), and their labels (N,).

    Args:
        data: the data module.
        split: of which.
        count: so many, drawn by the data's seed, as the first of a sorted folder are of one class; None for all.
    """
    samples = data.split(split)
    size = len(samples.labels)
    chosen = torch.arange(size) if count is None else keyed.permutation(size, keyed.fold_in(data.seed, 5))[:count]
    images, labels = samples.take(chosen)
    return data.normalize(images.cpu(), torch.float32), labels.cpu()
