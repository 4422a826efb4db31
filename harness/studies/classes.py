"""Trained nets on the data of a run: their logits in the order of its classes, by name, before anything is trained."""

from pathlib import Path

from torch import nn

from apprentice.errors import BadInput
from harness.cli.messages import with_flag
from harness.runs.nets import read_classes
from harness.runs.session import Session
from lit_modules.nets.classes import are_named, class_order, classes_of, members_of, reorder_classes


def match_classes(
    run: Session, net: nn.Module, key: str, value: object, trained: bool = False, may_move: bool = True
) -> None:
    """Bring the logits of a net's weights into the order of the data's classes; a line says where that is not known.

    `key` and `value` say where the net was chosen. One that is `trained` from there may have learnt other classes; a
    line says so.

    Raises:
        BadInput: the net has other classes, or another order and logits may not move (`may_move`).
    """
    wanted = tuple(getattr(run.data, "class_names", ()))
    for member in members_of(net):
        known = classes_of(member)
        if not wanted or known is None or len(known) not in {0, len(wanted)}:
            continue  # the head is new, or else its size is refused
        try:
            order = class_order(known, wanted, key, value)
        except BadInput as fault:
            if not trained:
                raise
            run.tell(f"{with_flag(fault)}; its head begins with the weights of other classes")
            continue
        if order.note and (known or are_named(wanted)):  # if neither has names, there is nothing to tell
            run.tell(f"{key} {value}: {order.note}, in this order")
        if order.moves:
            if not may_move:
                expected = f"a net with the data's order of classes; its first is {known[0]}, and not {wanted[0]}"
                raise BadInput(key, value, expected)
            reorder_classes(member, order.places, run.data.example, key)
            run.tell(f"{key} {value}: its logits are put into the order of the data's classes")
        member.class_names = wanted  # type: ignore[assignment]


def classes_beside(path: str | Path) -> tuple[str, ...]:
    """Names of the classes of a file of weights, if a run of ours has written it; none otherwise."""
    return read_classes(Path(path).parent)
