"""The bake-off: one teacher, many students, one honest table.

    python experiments/kd.py                        # Digits, embedded: three seeds in under a minute on 2 cores
    python experiments/kd.py --trainer.devices 8    # the same, up to rounding, from 8 processes
    python experiments/kd.py --data Text --teacher GPT --student GPT --only ce kd    # a language model's tokens
    python experiments/kd.py --help

For each seed a teacher is trained (or loaded), every student is distilled from it in one pass over the data, and each
is tested once. OUT/ holds the table (results.json, .md, .png), and for each net a TensorBoard run and its weights.
"""

import os

# Before torch is loaded: threads that spin while they wait cost small nets most of their time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

import datamodules
import strategies
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from apprentice.weights import load_weights
from harness import config as cli
from harness.reports.metrics import ACCURACY, BITS
from harness.reports.pages import save_results, text
from harness.reports.results import bake_off_results
from harness.runs import environment, job, launch, session, signals
from harness.runs.fit import MakeTrainer
from harness.runs.nets import load_net, spec
from harness.runs.progress import quiet
from harness.runs.trainer import trainers
from harness.studies.distillation import Candidate, DistillationStudy
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.scores import TokenScores


@dataclass
class Options(cli.RunOptions):
    """Options of the bake-off.

    Args:
        only: train just these students, as in --only ce kd.
        teacher_ckpt: a trained teacher, loaded, not trained; {seed} in its path is replaced by each seed.
        teacher_cache_mb: memory for stored teacher outputs; 0 runs the teacher every batch.
    """

    only: list[str] | None = None
    teacher_ckpt: str | None = None
    teacher_cache_mb: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_cache_mb < 0:
            raise BadInput("teacher_cache_mb", self.teacher_cache_mb, "a number of megabytes, 0 or more")


def parser() -> cli.Parser:
    """What can be chosen: data, nets, distillation methods, optimizer, trainer."""
    parser = cli.Parser("kd.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_choice("data", (datamodules.InMemoryData, datamodules.ImageData), datamodules, "Digits")
    parser.add_choice("teacher", (nets.Net, nn.Module), nets, "DeepNN", given=("data", "given_to_nets"))
    parser.add_choice("student", (nets.Net, nn.Module), nets, "LightNN", given=("data", "given_to_nets"))
    variants = {"ce": "CrossEntropy", "kd": "Hinton", "cosine": "Cosine", "hint": "Hint"}
    parser.add_variants("variants", (objectives.Objective, objectives.FeatureObjective), objectives, variants)
    parser.add_optimizer()
    parser.add_trainer(strategies.NAMES, max_epochs=10, log_every_n_steps=10)
    return parser


class Builder:
    """What is made of the configuration, for each seed anew."""

    def __init__(self, config: Namespace, data: Any, trainer: MakeTrainer) -> None:
        self.config, self.trainer, self.variants = config, trainer, cli.pick(config.variants, config.only)
        self.double = config.trainer.init_args.get("precision") in {"64-true", "64", 64}
        self.given, self.metric = data.net_arguments, ACCURACY
        self.shape = {"input_shape": data.input_shape, "num_classes": data.num_classes}
        self.dtype = data.example.dtype
        self.logits_shape = (data.num_classes,)
        self.used: dict[str, int] = {}
        self.learning: dict[str, Any] = {"optimizer": cli.factory(config.optimizer, "optimizer")}
        if data.tokens_per_character is not None:
            self.metric, self.logits_shape = BITS, (*data.input_shape, data.num_classes)
            self.learning["scores"] = partial(TokenScores, data.tokens_per_character)
        if config.scheduler is not None:
            self.learning["scheduler"] = cli.factory(config.scheduler, "scheduler")

    def net(self, key: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
        """A fresh net, its first weights from the seed alone, and how to rebuild it."""
        choice = getattr(self.config, key)
        net = with_seed(seed, lambda: cli.build(choice, key, **self.given))
        arguments = cli.arguments(choice, key, **self.given)
        return net.double() if self.double else net, spec(choice.class_path, arguments)

    def teacher(self, seed: int) -> tuple[LitClassifier, dict[str, Candidate]]:
        """The teacher's module."""
        net, rebuilt = self.net("teacher", seed)
        if self.config.teacher_ckpt is not None:
            load_weights(net, self.config.teacher_ckpt.replace("{seed}", str(seed)), "teacher_ckpt")
        module = LitClassifier(net, self.shape["num_classes"], **self.learning, seed=seed)
        return module, {"teacher": Candidate(net, rebuilt, "CrossEntropy", {"net": self.config.teacher.name})}

    def students(self, seed: int, teacher: nn.Module) -> tuple[Distillation, dict[str, Candidate]]:
        """All students' module."""
        students, candidates = {}, {}
        for name, choice in self.variants.items():
            net, rebuilt = self.net("student", seed)
            students[name] = net, cli.build(choice, f"variants.{name}")
            shown = {"net": self.config.student.name, **choice.init_args}
            candidates[name] = Candidate(net, rebuilt, choice.name, shown)
        options = {"seed": seed, "teacher_cache_mb": self.config.teacher_cache_mb, "input_dtype": self.dtype}
        return Distillation(teacher, students, **self.shape, **self.learning, **options), candidates

    def taught(self, seed: int, teacher: Path) -> tuple[Distillation, dict[str, Candidate]]:
        """All students' module, with the teacher in that folder."""
        return self.students(seed, load_net(teacher))

    def check(self, data: Any) -> None:
        """Build everything once, so that what can't work is refused before anything is trained."""
        trainer = self.trainer()
        place = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        data.check_replicas(place["num_replicas"], self.config.exact)
        self.used = data.used(trainer)
        for key in ("teacher", "student"):
            self.check_net(key, data.example, trainer.strategy)
        for seed in self.config.seeds[1:] if "{seed}" in (self.config.teacher_ckpt or "") else ():
            self.teacher(seed)
        teacher, _ = self.teacher(self.config.seeds[0])
        students, _ = self.students(self.config.seeds[0], teacher.net)
        if isinstance(trainer.strategy, strategies.DataParallel):
            trainer.strategy.check_module(teacher)
            trainer.strategy.check_module(students)

    def check_net(self, key: str, example: Tensor, strategy: Strategy) -> None:
        """Try a net out here, with its own kernels if it will train on the CPU, and see whether it can be cut."""
        net, again = (self.net(key, self.config.seeds[0])[0] for _ in range(2))
        trained = key == "student" or self.config.teacher_ckpt is None
        if trained:
            nets.check_same_start(net, again, key)
        with nullcontext() if strategy.root_device.type == "cpu" else nets.any_kernel(net):
            nets.check_fits(net, example, self.logits_shape, key, trained)
        if isinstance(strategy, strategies.PipelineStrategy) or getattr(strategy, "devices_per_worker", 1) > 1:
            with cli.refusals(getattr(self.config, key), key):
                nets.pipeline_stages(net, key)


def run(config: Namespace, builder: Builder, data: Any, out: Path, settings: dict[str, Any]) -> None:
    """Train, test, tell."""
    tensorboard = config.trainer.init_args["logger"] is not False
    bake_off = DistillationStudy(out, data, builder.trainer, config.checkpoint_every, tensorboard)
    teachers, students = [], []
    for seed in config.seeds:
        loaded = config.teacher_ckpt is not None
        teachers.append(bake_off.stage(seed, "teacher", partial(builder.teacher, seed), trained=loaded))
        if fault := teachers[-1]["runs"].get("teacher", {}).get("failed"):
            when = f"with seed {seed} its {fault['term']} is not finite at step {fault['step']}"
            raise BadInput("optimizer", config.optimizer.name, f"settings that train the teacher; {when}")
        students.append(
            bake_off.stage(seed, "students", partial(builder.taught, seed, out / f"seed{seed}" / "teacher"))
        )
    if not job.is_main_process():
        return
    header = session.header("kd", data, builder.used, settings, config.seeds)
    taught = [{**stage["runs"]["teacher"], "fit_seconds": stage["fit_seconds"]} for stage in teachers]
    learned = {name: [stage["runs"][name] for stage in students] for name in builder.variants}
    seconds = [stage["fit_seconds"] for stage in students]
    one = config.teacher_ckpt is not None and "{seed}" not in config.teacher_ckpt
    results = bake_off_results(header, taught, learned, seconds, builder.metric, one_teacher=one)
    save_results(out, results)
    print(f"{text(results)}\n\n{out}/results.md, .png, .json; curves: tensorboard --logdir {out}")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bake-off that the command line describes."""
    command = parser()
    with cli.one_line_errors(command), signals.handled(), quiet():
        config = command.parse(argv)
        strategies.register()
        trainer = trainers(config.trainer, config.exact, strategies.NAMES)
        launch.join(trainer)
        data = cli.build(config.data, "data")
        with job.main_first("data"):
            data.prepare_data()
            data.setup()
        environment.limit_threads(data.input_shape)
        environment.keep_memory()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        builder = Builder(config, data, trainer)
        builder.check(data)
        with session.opened("kd", command, config) as out:
            session.describe(out, command, config)
            run(config, builder, data, out, command.as_dict(config))


if __name__ == "__main__":
    main()
