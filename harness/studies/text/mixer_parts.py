"""The test loss of a net with a part of its attention switched off: a window alone can hide a dead linear part."""

from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import IGNORED
from harness.runs.plans import FitOutcome, FitPlan
from harness.runs.records import NetRecord
from harness.runs.session import Session
from harness.studies import costs
from lit_modules.nets.attention.parts import Part, has_parts, with_part
from lit_modules.nets.layers import run as run_net

ALONE = tuple(part for part in get_args(Part) if part != "both")


def add_parts(session: Session, plan: FitPlan, net: nn.Module, outcome: FitOutcome, record: NetRecord) -> NetRecord:
    """Return a tested net's record with the loss of each part of its attention alone, if that has two."""
    if not (has_parts(net) and plan.tested and plan.until is None and record.failed is None):
        return record
    figures: dict[str, Any] = dict(record.figures)
    for part in ALONE:
        with with_part(net, part), outcome.autocast(), costs.alone(outcome.device):
            figures[f"test_loss_{part}"] = test_loss(session, net, outcome.device)
    return replace(record, figures=figures)


@torch.no_grad()
def test_loss(session: Session, net: nn.Module, device: torch.device) -> float:
    """Return the mean cross-entropy, in nats, of a net's logits (b, T, V) with the test's labels that count."""
    data, total, count = session.data, 0.0, 0
    net.eval()
    for rows in data.evaluated("test").split(data.batch_size):
        inputs, labels = (x.to(device) for x in data.samples("test", rows))
        logits: Tensor = run_net(net, inputs).logits
        values = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten().long(), reduction="none")
        counts = labels.flatten() != IGNORED
        total, count = total + values[counts].double().sum().item(), count + int(counts.sum())
    return total / max(count, 1)
