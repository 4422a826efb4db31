"""The programs of the pages about ranks and calls print what the pages say; what the pages name is there."""

import os
import re
import runpy
import warnings
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from lab.strategies import ParamServer, rpc
from tests.launching import ended
from tests.processes import launch
from tests.ranks import in_ranks

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
# A program, which begins with its command, and the block below it.
PROGRAM = re.compile(
    r"^```python\n(# torchrun [^\n]* (\d) (\w+)\.py\n.*?)^```\n```\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRAMS = {found[3]: found for text in TEXTS.values() for found in PROGRAM.finditer(text)}


def program(_rank: int, path: Path, port: int) -> None:
    os.environ.update(MASTER_PORT=f"{port}", TORCHELASTIC_USE_AGENT_STORE="True")
    warnings.simplefilter("ignore")  # torch's, about its own RPC
    runpy.run_path(str(path / "program.py"), run_name="__main__")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    code, size, _, printed = PROGRAMS[name].groups()
    (tmp_path / "program.py").write_text(code)
    # As under torchrun the store outlives all ranks: rpc.shutdown() needs it when rank zero may have ended.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ended(launch(partial(program, port=store.port), tmp_path, int(size))) == printed


def test_every_program_has_an_output() -> None:
    assert len(PROGRAMS) == sum(text.count("\n# torchrun ") for text in TEXTS.values()) > 0


def test_the_ladder_s_launchers_are_those_of_the_clusters() -> None:
    ladder, clusters = (
        re.findall(r"^torchrun .*", TEXTS[name].replace("\\\n", ""), re.MULTILINE)
        for name in ("ladder.md", "clusters.md")
    )
    assert ladder
    assert {*ladder} <= {*clusters}


def test_the_methods_that_the_page_names_are_there() -> None:
    owners = {"rpc": rpc, "ParamServer": ParamServer}
    named = re.findall(r"`(\w+)\.(\w+)`", TEXTS["rpc.md"].partition("## In this suite")[2])
    exist = [hasattr(owners[name], method) for name, method in named]
    assert len(exist) >= 6
    assert all(exist)


def drawn(panel: ElementTree.Element, after: bool) -> list[list[int]]:
    """What each rank holds in a diagram: a, b and c are 1, 2 and 4, plus ten times the digit."""
    cells: list[list[int]] = [[], [], []]
    for text in panel.findall("{*}text"):
        x, y, said = float(text.get("x", "")), float(text.get("y", "")), text.text or ""
        if text.get("class") is None and (x > 100) is after:
            letters, digit = said.replace("Σ", "abc").replace("+", "").rstrip("012"), re.sub(r"\D", "", said)
            cells[int(y) // 32 - 1].append(sum(2 ** "abc".index(letter) + 10 * int(digit or 0) for letter in letters))
    return cells


def collect(name: str, mine: list[int]) -> list[int]:
    """Call a collective with rank 0 as the root; what this rank holds afterwards."""
    x, one, root = torch.tensor(mine or [0]), torch.zeros(1, dtype=torch.int64), dist.get_rank() == 0
    three = torch.zeros(3, dtype=torch.int64)
    into = [*three.split(1)]
    match name:
        case "broadcast" | "reduce" | "all-reduce":
            getattr(dist, name.replace("-", "_"))(x, *([] if name == "all-reduce" else [0]))
            return x.tolist() if root or name != "reduce" else []
        case "scatter":
            dist.scatter(one, [*x.split(1)] if root else None)
        case "gather":
            dist.gather(x, into if root else None)
            return three.tolist() if root else []
        case "all-gather":
            dist.all_gather(into, x)
            return three.tolist()
        case "reduce-scatter":
            dist.reduce_scatter(one, [*x.split(1)])
        case "all-to-all":
            dist.all_to_all(into, [*x.split(1)])
            return three.tolist()
    return one.tolist()


@in_ranks(3)
def test_collectives_leave_what_the_diagram_shows() -> None:
    panels = ElementTree.parse(DOCS / "images" / "collectives.svg").getroot().findall("{*}g")
    assert len(panels) == 8
    for panel in panels:
        name, rank = panel.get("id", ""), dist.get_rank()
        assert collect(name, drawn(panel, after=False)[rank]) == drawn(panel, after=True)[rank], name
