"""The layers of an experiment's nets, by the names and paths that objectives take, with the shapes of their outputs."""

from typing import Any

import torch
from torch import Tensor, nn

from harness.reports.tables import NONE, Table
from harness.runs.arm_names import arm_names, choice_at
from harness.runs.launch import is_main_process
from harness.runs.session import Session
from harness.runs.teacher_weights import TEACHER, TEACHERS
from harness.studies.choices import check_net, make_net
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.base import cast_inputs
from lit_modules.nets.layers import DEFAULT_LAYER, INPUT, MIDDLE, observe, resolve


def print_layers(session: Session) -> None:
    """Print a table for each teacher and each student's net of a run; BadInput for one that does not fit the data."""
    session = session.with_settings(exact=None)  # nothing is trained
    trainer = session.checked_trainer()
    students = (row.net for row in arm_names(session.config).values())
    for key in [TEACHER, *(f"{TEACHERS}.{name}" for name in session.config.teachers), *dict.fromkeys(students)]:
        check_net(session, key, trainer, trained=False)
        net = make_net(session.config, key, session.config.seeds[0], session.data.net_arguments, session.is_double)
        if is_main_process():
            lines = [list(line) for line in layers(net, session.data.example[:1])]
            table = Table(["layer", "is", "output"], lines, left=3)
            print(f"{key} {choice_at(session.config, key).name}\n\n{table.plain()}\n", flush=True)


def layers(net: nn.Module, example: Tensor) -> list[tuple[str, str, str]]:
    """Return a net's layers for an input (1, ...): name or path, what it is, the shape of its output for one sample."""
    modules = {path: module for path, module in net.named_modules() if path}
    named = {name: path for name in _names(net) if (path := resolve(net, name))}
    inputs = {path for path in named.values() if path.endswith(INPUT)}
    watched = modules | {path: modules[path.removesuffix(INPUT)] for path in inputs}
    with torch.no_grad(), any_kernel(net), observe(watched, inputs) as outputs:
        net.eval()(cast_inputs(net, example))
    lines = [(name, path, _shape(outputs.get(path))) for name, path in named.items()]
    return lines + [(path, type(module).__name__, _shape(outputs.get(path))) for path, module in modules.items()]


def _names(net: nn.Module) -> list[str]:
    """Return the names that any net of ours has, see `lit_modules.nets.layer`."""
    stages = [f"stage{number}" for number in range(1, len(getattr(net, "stages", ())) + 1)]
    before = [f"stage{number}.pre" for number in range(1, len(getattr(net, "preactivations", ())) + 1)]
    return [DEFAULT_LAYER, "pooled", MIDDLE, *stages, *before]


def _shape(output: Any) -> str:
    """Write (C, H, W) of a tensor (1, C, H, W), the type of another output, a dash for what did not run."""
    if isinstance(output, Tensor):
        return f"({', '.join(map(str, output.shape[1:]))})"
    return NONE if output is None else type(output).__name__
