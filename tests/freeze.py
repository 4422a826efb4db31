"""Writes down what must not move, from the code as it is: python -m tests.freeze [NAME ...], see FROZEN for the names.

tests/test_frozen.py compares the code with tests/frozen/. Write a file again only where a change of it is meant.
"""

import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from harness.runs.environment import hardware
from tests.language import written
from tests.launching import Command
from tests.processes import Run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "frozen"

KD = (
    "kd --data Digits --teacher LightNN --seeds 1 --trainer.max_epochs 2 --data.train_size 150 --data.test_size 50 "
    "--data.batch_size 40 --out run"
)
GPT = (
    "gpt --net.num_layers 2 --net.num_heads 2 --net.embed_dim 16 --net.dropout 0.1 --net.tie_weights false "
    "--trainer.max_steps 8 --trainer.val_check_interval 4 --trainer.log_every_n_steps 1 --data.block_size 16 "
    "--model.warmup_steps 3 --data.path text --out run"
)
QUANTIZE = (
    "quantize --data.train_size 150 --data.test_size 50 --trainer.max_epochs 1 --freeze_epoch 1 "
    "--latency.repeats 1 --latency.batch_sizes 1 --out run"
)
EXACT = {"kd": f"{KD} --exact 8", "gpt": f"{GPT} --exact 8"}
# What gives equal bits under --exact. "torchrun N" is a launcher, the others are flags.
WAYS = [
    "--trainer.devices 1", "--trainer.devices 3", "--trainer.devices 8", "torchrun 3",
    "--trainer.devices 3 --trainer.strategy ddp_zero1", "--trainer.devices 3 --trainer.strategy pipeline",
]  # fmt: skip
FLOAT64 = "--trainer.precision 64-true"
# The commands of a study, one after the other in one folder, and the file that the last one leaves.
RESULTS = {
    "kd": [f"{KD} --seeds 2 {FLOAT64}"],
    "kd-float32": [KD],
    "kd-zoo": [f"{KD} {FLOAT64} --zoo true --trainer.max_epochs 1"],
    "kd-tune": [f"{KD} {FLOAT64} --tune 2 --only ce kd"],
    "kd-students": [
        f"{KD} {FLOAT64} --only ce small-kd --students.small LightNN --students.res ResNet --students.res.depth 8"
    ],
    "gpt": [f"{GPT} --seeds 2 {FLOAT64}"],
    "compare": [f"{KD} --seeds 2 {FLOAT64} --only ce kd --out t2",
                f"{KD} --seeds 2 {FLOAT64} --only ce kd --variants.kd.temperature 8 --out t8",
                "compare t2 t8 --out run"],
    "quantize": [QUANTIZE],
}  # fmt: skip
MACHINE_BOUND = {"kd-float32", "quantize"}  # their last digits are those of a processor and of a version of torch
TIMES = re.compile(r".*(seconds|step_ms|latency_ms|images_per_second|tokens_per_second)")
OF_THE_INVOCATION = {"out", "resume", "overwrite", "list_layers"}  # settings that a run's config.yaml has not
OF_SETTINGS = {"config", "free"}  # of results.json: print_config.yaml has settings
TEXT = "tag:yaml.org,2002:str"
OF_A_CALL = {"hardware", "versions", "commits", "commit", "out", "folder", "bytes"}


def describe_machine() -> dict[str, str]:
    """What bits in float32 depend on."""
    return {
        "cpu": hardware()["cpu"],
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
    }


def call(folder: Path, words: list[str]) -> None:
    os.chdir(folder)
    importlib.import_module(f"experiments.{words[0]}").main(words[1:])


def run(folder: Path, line: str, way: str = "") -> None:
    """A command, `kd --seeds 1`, in the folder: in a fork, which starts its ranks as the flags say, or by torchrun."""
    launcher, _, number = way.partition(" ")
    name, *flags = shlex.split(line)
    if name == "gpt":
        written(folder)
    process: Run | Command
    if launcher == "torchrun":
        script = ROOT / "experiments" / f"{name}.py"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", number]
        process = Command(*torchrun, script, *flags, log=folder / "log")
    else:
        process = Run(call, folder, [name, *flags, *shlex.split(way)], log=folder / "log")
    assert process.wait() == 0, process.output


def hash_weights(out: Path) -> dict[str, str]:
    """For each file of weights below a run's folder, a hash of its tensors."""
    hashes = {}
    for path in sorted(out.glob("seed*/*/weights.pt")):
        digest = hashlib.sha256()
        for name, tensor in torch.load(path, weights_only=True).items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        hashes[str(path.parent.relative_to(out))] = digest.hexdigest()
    return hashes


def without_times(value: Any) -> Any:
    """The value without times and without what is of this call, with nine digits of each number."""
    if isinstance(value, dict):
        lasting = {key: part for key, part in value.items() if not TIMES.fullmatch(key) and key not in OF_A_CALL}
        return {key: without_times(part) for key, part in lasting.items()}
    if isinstance(value, list):
        return [without_times(part) for part in value]
    return float(f"{value:.9g}") if isinstance(value, float) and math.isfinite(value) else value


def page_without_times(text: str) -> list[str]:
    """The lines of a Markdown page without what is of a machine or a commit, and with # for each time."""
    lines: list[str] = []
    timed: list[int] | None = None  # the columns of times, in a table
    for line in text.splitlines():
        cells = line.split("|")
        if not line.startswith("|"):
            timed = None
            if not re.match("- (Hardware|Versions|Commit)", line):
                lines.append(re.sub(r"[\d.,]*\d (ms|s|seconds|minutes?|h)\b", r"# \1", line))
        elif timed is None:
            timed = [i for i, cell in enumerate(cells) if re.search(r", (ms|s)$|second|/s$", cell.strip())]
            lines.append(line)
        else:
            lines.append("|".join(" # " if i in timed else cell for i, cell in enumerate(cells)))
    return lines


def measure(folder: Path, name: str) -> dict[str, Any]:
    """What the study leaves: the names of its files, what its results say, and what its page shows."""
    for line in RESULTS[name]:
        run(folder, line)
    out, stem = folder / "run", "compare" if name == "compare" else "results"
    paths = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.name[0] != ".")
    files = sorted({re.sub(r"events\.out\.tfevents\..*", "events", path) for path in paths})
    page = (out / f"{stem}.md").read_text().replace(str(folder), "FOLDER") if name != "quantize" else ""  # of times
    contents = json.loads((out / f"{stem}.json").read_text())
    results = {key: part for key, part in without_times(contents).items() if key not in OF_SETTINGS}
    return {"files": files, "page": page_without_times(page), "results": results}


def print_settings(folder: Path, line: str) -> Any:
    """The settings that a command prints with --print_config; None where it is refused for want of a file."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            name, *flags = shlex.split(line)
            importlib.import_module(f"experiments.{name}").main([*flags, "--print_config"])
        except SystemExit as end:
            return None if end.code else yaml.safe_load(out.getvalue())
    raise AssertionError(f"{line} --print_config goes on")


def list_on(settings: Any) -> Any:
    """The settings that are on, so that a new option, which is off, moves nothing."""
    if not isinstance(settings, dict):
        return settings
    return {key: list_on(value) for key, value in settings.items() if value is not None and value is not False}


def flatten(settings: Any, name: str = "") -> dict[str, Any]:
    """Nested settings as flags."""
    if not isinstance(settings, dict) or not settings:
        return {name: settings}
    parts = {key: flatten(value, f"{name}.{key}" if name else key) for key, value in settings.items()}
    return {key: value for part in parts.values() for key, value in part.items()}


def list_changes(settings: Any, defaults: Any) -> dict[str, Any]:
    """What a command sets apart from its script's defaults; "<none>" is what it lacks."""
    one, other = flatten(defaults), flatten(settings)
    changed = {key: value for key, value in other.items() if key not in one or one[key] != value}
    return changed | {key: "<none>" for key in one if key not in other}


def documented_commands() -> list[str]:
    """The commands of README, docs and notebooks that start anew, each once, but for compare's, without settings."""
    from tests.experiments.test_documented import COMMANDS, goes_on

    lines = [shlex.join([name, *flags]) for name, flags in COMMANDS if name != "compare" and not goes_on(flags)]
    return [*dict.fromkeys(lines)]


def set_up(folder: Path, case: Any, files: Any) -> None:
    """Leave in the folder what a wrong input needs: a module of the user's, my.yaml, a text, the settings of a run."""
    for name, text in files.get(case.get("files"), {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if "config" in case:
        (folder / "my.yaml").write_text(case["config"])
    if "text" in case:
        written(folder)
    if "begun" in case:
        settings = print_settings(folder, f"{case['command'].split()[0]} {case['begun']}")
        kept = {key: value for key, value in settings.items() if key not in OF_THE_INVOCATION}
        (folder / "run").mkdir()
        (folder / "run" / "config.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))


def read_refusal(folder: Path, case: Any, files: Any) -> str:
    """The one line with which the command ends, before anything is computed."""
    set_up(folder, case, files)
    name, *flags = shlex.split(case["command"])
    path, err, code = list(sys.path), io.StringIO(), 0
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            importlib.import_module(f"experiments.{name}").main(flags)
    except SystemExit as end:
        code = end.code
    finally:
        sys.path[:] = path
        for module in [name for name in sys.modules if name.partition(".")[0] in files]:
            del sys.modules[module]
    said = err.getvalue()
    assert (code, said.count("\n")) == (2, 1), said
    assert not [*folder.rglob("seed*"), *folder.rglob("results*")]
    said = re.sub(r"(ucc, mpi, fake), .*", r"\1", said)  # and those that other tests have registered
    return re.sub(r"(Available names are): .*", r"\1", said).rstrip("\n")  # Lightning's, in any order


# What is written


def freeze_weights() -> Any:
    hashes: dict[str, Any] = {"machine": describe_machine()}
    for name, line in EXACT.items():
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), line, WAYS[0])
            hashes[name] = hash_weights(Path(folder) / "run")
    return hashes


def freeze_results() -> Iterator[tuple[str, Any]]:
    for name in RESULTS:
        with tempfile.TemporaryDirectory() as folder:
            yield name, {"machine": describe_machine()} | measure(Path(folder), name)


def freeze_settings() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        lines = documented_commands()
        defaults = {
            name: list_on(print_settings(Path(folder), name)) for name in sorted({line.split()[0] for line in lines})
        }
        settings = {line: list_on(print_settings(Path(folder), line)) for line in lines}
    commands = {line: list_changes(values, defaults[line.split()[0]]) for line, values in settings.items() if values}
    return {"defaults": defaults, "commands": commands}


def freeze_wrong_inputs() -> Any:
    """The table as it is, with the lines that there are now."""
    table = yaml.safe_load((FOLDER / "wrong_inputs.yaml").read_text())
    for case in table["cases"]:
        with tempfile.TemporaryDirectory() as folder:
            case["line"] = read_refusal(Path(folder), case, table["files"])
    return table


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(TEXT, text, style="|" if "\n" in text.strip("\n") else None)
)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    else:
        path.write_text(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=118, allow_unicode=True))


def main(names: list[str]) -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # as for the tests
    warnings.simplefilter("ignore")  # as in the tests
    if "weights" in names:
        write(FOLDER / "weights.yaml", freeze_weights())
    if "results" in names:
        for name, contents in freeze_results():
            write(FOLDER / "results" / f"{name}.json", contents)
    if "print_config" in names:
        write(FOLDER / "print_config.yaml", freeze_settings())
    if "wrong_inputs" in names:
        write(FOLDER / "wrong_inputs.yaml", freeze_wrong_inputs())


FROZEN = ["weights", "results", "print_config", "wrong_inputs"]
if __name__ == "__main__":
    main(sys.argv[1:] or FROZEN)
