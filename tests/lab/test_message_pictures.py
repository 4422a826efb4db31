"""The pictures of messages and of ranks in two dimensions show what ranks do."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import in_ranks

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = runpy.run_path(str(DOCS / "message_pictures.py"))
VALUES = {"": 0, "a": 1, "b": 2, "c": 4}


@pytest.mark.parametrize(("name", "draw"), [("send_receive", "draw_messages"), ("hybrid", "draw_hybrids")])
def test_pictures_are_up_to_date(name: str, draw: str) -> None:
    assert PICTURES[draw]() == (DOCS / "images" / f"{name}.svg").read_text(), "python docs/message_pictures.py"


@in_ranks(3, backend="gloo")
def test_messages_leave_what_the_picture_shows() -> None:
    rank = dist.get_rank()
    for name, panel in PICTURES["MESSAGES"].items():
        mine = torch.tensor(VALUES[panel.before[rank]])
        received = torch.zeros_like(mine)
        sources = [source for source, target in panel.sent if target == rank]
        targets = [target for source, target in panel.sent if source == rank]
        if name == "along a chain":
            if sources:
                dist.recv(received, sources[0])
            mine += received
            for target in targets:
                dist.send(mine, target)
        else:
            calls = [dist.P2POp(dist.isend, mine, target) for target in targets]
            calls += [dist.P2POp(dist.irecv, received, source) for source in sources]
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
            mine = received if sources else mine
        assert mine == sum(VALUES[letter] for letter in panel.after[rank].split("+")), name


@in_ranks(4, backend="gloo")
def test_consecutive_ranks_lie_in_a_row() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "inside"))
    row, column = divmod(dist.get_rank(), 2)
    assert dist.get_process_group_ranks(mesh.get_group("inside")) == [2 * row, 2 * row + 1]
    assert dist.get_process_group_ranks(mesh.get_group("data")) == [column, column + 2]


def test_ranks_of_a_picture_store_each_layer_as_often_as_there_are_replicas() -> None:
    for name, hybrid in PICTURES["HYBRIDS"].items():
        quarters = [i for first, last in hybrid.layers for i in range(first, last)]
        copies = 1 if name.startswith("fsdp") else 2
        assert sorted(quarters) == sorted([*range(4 if hybrid.every_layer else 16)] * copies), name
