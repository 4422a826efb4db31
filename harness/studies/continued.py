"""Training that goes on where somebody else's ended: the states of optimizer and scheduler in a file of weights."""

from typing import Any

from torch import Tensor

from apprentice.errors import BadInput
from apprentice.weights import read_saved
from lit_modules.learner import Learner

FLAG = "teacher_continue"
# Keys of a parameter group by which kinds of optimizers differ.
KINDS = frozenset({"alpha", "betas", "etas", "lambd", "lr_decay", "momentum", "rho"})


def go_on(module: Learner, path: str) -> None:
    """Let the module's fit begin with the states in the file: `optimizer` and `scheduler`, or as Lightning names them.

    Raises:
        BadInput: the file has no optimizer's state, or one of another kind, or of other parameters.
    """
    saved = read_saved(path, FLAG)
    state = _find_state(saved, "optimizer", "optimizer_states")
    scheduler = _find_state(saved, "scheduler", "lr_schedulers")
    if not isinstance(state, dict) or not state.get("param_groups") or "state" not in state:
        raise BadInput(FLAG, "true", f"the state of an optimizer in {path}, as optimizer or optimizer_states")
    optimizers, schedulers = module.configure_optimizers()
    groups = optimizers[0].state_dict()["param_groups"]
    if {*state["param_groups"][0]} & KINDS != {*groups[0]} & KINDS:
        name = type(optimizers[0]).__name__
        raise BadInput(FLAG, "true", f"the state of {name} in {path}; it is of another optimizer")
    if not _fits(state, module, len(groups)):
        raise BadInput(FLAG, "true", f"the state of an optimizer of this net's parameters, in one group, in {path}")
    if bool(schedulers) != bool(scheduler):
        expected = "--scheduler beside it" if scheduler else "no --scheduler"
        raise BadInput(FLAG, "true", f"{expected}: {path} has {'' if scheduler else 'no '}state of one")
    module.start = state, scheduler


def _find_state(saved: Any, name: str, several: str) -> Any:
    """Return a state by its usual names."""
    states = saved if isinstance(saved, dict) else {}
    listed = states.get(several) or [None]
    return next((states[key] for key in (name, f"{name}_state_dict", f"lr_{name}") if key in states), listed[0])


def _fits(state: dict[str, Any], module: Learner, groups: int) -> bool:
    """Return whether it has as many groups, and for each parameter tensors of its shape."""
    shapes = [p.shape for group in module.parameter_groups().values() for p in group]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if len(state["param_groups"]) != groups or len(numbers) != len(shapes):
        return False
    states = (state["state"].get(number, {}).values() for number in numbers)
    return all(
        value.shape == shape
        for values, shape in zip(states, shapes, strict=True)
        for value in values
        if isinstance(value, Tensor) and value.dim()
    )
