"""The programs of the pages about ranks and calls print what the pages say; what the pages name is there."""

import os
import re
import runpy
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from lab.strategies import ParamServer, RPCHybrid
from lab.strategies.rpc import RPCStrategy, Worker
from tests.launching import ended
from tests.processes import launch

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
    classes = {kind.__name__: kind for kind in (RPCStrategy, ParamServer, RPCHybrid, Worker)}
    named = re.findall(r"`(\w+)\.(\w+)`", TEXTS["rpc.md"])
    exist = [hasattr(classes[name], method) for name, method in named if name in classes]
    assert len(exist) >= 8
    assert all(exist)
