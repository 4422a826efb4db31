"""The members of an ensemble that the command line names: folders of runs, and classes that bring weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness import cli
from harness.runs.nets import Spec, load_net, read_classes, read_expects, read_spec, spec
from harness.runs.quiet import notice
from lit_modules import nets
from lit_modules.nets.base import unwrap_logits
from lit_modules.nets.classes import classes_of
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.recorded import Recorded
from lit_modules.nets.weights import load_weights

WEIGHTS = "weights"  # beside class_path: a file of weights


def is_ensemble(choice: cli.Choice) -> bool:
    """Return whether a chosen net is made of trained nets."""
    return issubclass(choice.target, Ensemble)


def make_members(choice: cli.Choice, key: str, seed: int, arguments: Mapping[str, Any]) -> list[nn.Module]:
    """Build an ensemble's trained members, with the arguments that the data gives to nets of a class.

    Raises:
        BadInput: a member is neither the folder of a net nor a class, or has no weights.
    """
    return [_make(entry, flag, seed, arguments) for flag, entry in _entries(choice, key)]


def _make(entry: Any, flag: str, seed: int, arguments: Mapping[str, Any]) -> nn.Module:
    if isinstance(entry, str):
        return load_net(entry, flag)
    member, file = _choose(entry, flag, arguments), entry.get(WEIGHTS)
    of_ensemble = {"members": make_members(member, flag, seed, arguments)} if is_ensemble(member) else {}
    net: nn.Module = unwrap_logits(with_seed(seed, lambda: cli.build(member, flag, **arguments, **of_ensemble)))
    if file is not None:
        for line in load_weights(net, str(file), f"{flag}.{WEIGHTS}"):
            notice(f"{flag}: {file}: {line}")
        net.class_names = read_classes(Path(file).parent)  # type: ignore[assignment]
        if expects := read_expects(Path(file).parent):
            net.expects = expects  # type: ignore[assignment]
    brings_weights = getattr(net, "is_trained", False) or member.init_args.get(getattr(net, "trained_if", ""), False)
    if classes_of(net) is None and not brings_weights:
        expected = "a trained net: the folder of one, a class whose options bring weights for all classes of the data"
        raise BadInput(flag, member.name, f"{expected}, or `weights: FILE` beside class_path and init_args")
    return net


def _entries(choice: cli.Choice, key: str) -> list[tuple[str, Any]]:
    members = choice.init_args["members"]
    return [(f"{key}.members.{number}", entry) for number, entry in enumerate(members)]


def _choose(entry: Any, flag: str, arguments: Mapping[str, Any]) -> cli.Choice:
    """Read a class and its options."""
    if not isinstance(entry, Mapping) or "class_path" not in entry:
        raise BadInput(flag, entry, "the folder of a trained net, or a mapping with class_path and init_args")
    chosen = {key: value for key, value in entry.items() if key != WEIGHTS}
    return cli.choose(chosen, flag, cli.Classes((nets.Net, nn.Module), nets, frozenset(arguments)))


def choice_spec(choice: cli.Choice, key: str, arguments: Mapping[str, Any]) -> Spec:
    """Return how to rebuild the net of a choice, without weights."""
    extra = dict(arguments)
    if is_ensemble(choice):
        extra["members"] = [
            read_spec(entry, flag) if isinstance(entry, str)
            else choice_spec(_choose(entry, flag, arguments), flag, arguments)
            for flag, entry in _entries(choice, key)
        ]  # fmt: skip
    values = cli.arguments(choice, key, **extra)
    if issubclass(choice.target, Recorded):
        values = choice.target.rebuild_arguments(values)
    return spec(choice.class_path, values)
