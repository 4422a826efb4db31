"""Knowledge distillation: one teacher, many students, one table.

    python experiments/kd.py                        # Digits with 30 labels, embedded: three seeds in a minute
    python experiments/kd.py --recipe tutorial      # all labels, as in PyTorch's tutorial; --data CIFAR10 beside it
    python experiments/kd.py --trainer.devices 8    # the same bits from 8 processes
    python experiments/kd.py --out FOLDER --resume true --seeds 5    # go on, or let a finished run grow
    python experiments/kd.py --data Text --teacher GPT --student GPT --only ce kd    # a language model's tokens
    python experiments/kd.py --zoo true             # every method that fits the nets, the best first
    python experiments/kd.py --data CIFAR100 --recipe repdistiller --seeds 5         # a row of a published table
    python experiments/kd.py --students.small LightNN --students.deep DeepNN         # each method for several nets

For each seed a teacher is trained (or loaded), every student is distilled from it in one pass over the data, and each
is tested once. OUT/ holds report.html, results.json, .md and .png, and for each net a TensorBoard run and its weights.
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")  # threads that spin while they wait slow small nets down

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar

from lightning.pytorch import LightningDataModule
from torch import nn

import datamodules
from apprentice.errors import BadInput
from apprentice.keyed import fold_in
from datamodules.base import LARGEST_BATCH
from harness import cli
from harness.cli import CALL, FREE, GROWS, Limit, at_least, option
from harness.runs.arm_names import NAMES, arm_names
from harness.runs.exactness import settle_exact
from harness.runs.files import can_be_written
from harness.runs.plans import Arm, of_teacher
from harness.runs.session import session
from harness.runs.teacher_weights import TEACHER, teacher_row_name
from harness.runs.training_options import add_optimizer, add_trainer
from harness.studies.bakeoff import BakeOff
from harness.studies.choices import arguments_set_by_data, build_net, is_from_teacher, learner_options
from harness.studies.kinds import options_by_task, settings_by_task
from harness.studies.launcher import LAUNCHERS, do_job
from harness.studies.metrics import MetricClasses
from harness.studies.recipes import DEFAULT, DEFAULT_OF_PAIRS, DEFAULT_OF_TEXTS, RECIPES, Recipe
from harness.studies.teachers import load_teacher
from harness.studies.tuning.options import TuningOptions
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets.output_file import Outputs
from lit_modules.nets.stored import TeacherInFile

WRITABLE = Limit(lambda path: can_be_written(Path(path)), "a folder that can be written")
BY_LAST_EPOCH = "which compares settings by their last epochs"
# Imported where a run asks for them:
ZOO, LAYERS = "harness.studies.zoo", "harness.studies.layers"
OF_PAIRS = "harness.studies.embedding.text_settings"
PRETRAINED = "harness.studies.text.pretrained_settings"
EXPORT = "deploy.students"  # what follows training


@dataclass
class Options(TuningOptions):
    """Options of the distillation study."""

    recipe: Recipe | None = None
    """the settings of a published table; flags beside it change single ones, --print_config shows all. Where no --data
    is chosen it is few-labels, with --data Chat and no path texts, with --data Pairs and no net pairs; null gives the
    options' own defaults."""
    only: list[str] | None = option(None, on_resume=GROWS)
    """train just these students, as in --only ce kd; with --students, small-kd, or kd for that of each net."""
    zoo: bool = option(False, on_resume=GROWS)
    """train by every method that fits the nets, and say which don't; the best comes first."""
    best_epoch: str | None = option(None, excludes={"tune": BY_LAST_EPOCH})
    """test and keep each net's weights of its best epoch by a score of the validation, as val/acc or val/loss; the
    earliest of equals; the teacher's, too. Default: of the last epoch."""
    early_stopping: str | None = option(None, excludes={"tune": BY_LAST_EPOCH})
    """stop each net by itself, once this score of the validation, as val/loss, has not become better for --patience
    validations; the teacher, too. The others train on."""
    patience: int | None = option(
        None, at_least(1, "validations"), needs={"early_stopping": "val/loss, or another score,"}
    )
    """validations that --early_stopping waits; default: 3."""
    ema: float | None = option(None, Limit(lambda ema: 0 < ema < 1, "a decay between 0 and 1, such as 0.999"))
    """decay, as 0.999, of moving averages of students' weights; they are tested beside the weights."""
    save_ckpt: bool = option(False, on_resume=FREE)
    """write classifier.ckpt beside weights.pt, for LitClassifier.load_from_checkpoint."""
    export: str | None = option(None, Limit(lambda path: bool(path.strip()), "a folder"), on_resume=CALL)
    """a folder for the students of the first seed, each in files that run without this project."""
    list_layers: bool = option(False, on_resume=CALL)
    """print the nets' layers and the shapes of their outputs, and train nothing."""
    teacher_ckpt: str | None = None
    """a trained teacher, loaded, not trained; {seed} in its path is replaced by each seed."""
    teacher_ckpt_partial: bool = option(False, needs={"teacher_ckpt": "FILE", "teacher_epochs": "N"})
    """load what fits of teacher_ckpt, and name what doesn't; train the rest: teacher_epochs."""
    teacher_ckpt_ema: bool | None = option(None, needs={"teacher_ckpt": "FILE"})
    """of a teacher_ckpt with two sets of weights, whether to load the moving averages."""
    teacher_epochs: int | None = option(None, at_least(1, "epochs"))
    """of a teacher that is trained, from teacher_ckpt too; default: the students', or none from there."""
    teacher_batch_size: int | None = option(
        None, Limit(lambda size: 1 <= size <= LARGEST_BATCH, f"a number of samples, 1 to {LARGEST_BATCH:,}")
    )
    """of a teacher that is trained here; default: --data.batch_size, as the students'."""
    teacher_head_only: bool = False
    """train the teacher's last linear layer alone; the rest keeps the weights that it has loaded."""
    teacher_cache_dir: str | None = option(None, WRITABLE, on_resume=FREE)
    """a folder that keeps the teacher's outputs for other runs with the same teacher and data."""
    teacher_cache_mb: int = option(1024, Limit(lambda size: size >= 0, "a number of megabytes, 0 or more"))
    """memory for stored teacher outputs; 0 runs the teacher every batch."""
    common: ClassVar[Collection[str]] = (
        "data", "data.batch_size", "data.augment", "data.labelled", "teacher", "teacher_ckpt", "student",
        "variants", "only", "zoo", "tune", "metric", "best_epoch", "optimizer", "optimizer.lr", "scheduler",
        "trainer.max_epochs", "trainer.devices", "trainer.strategy", "trainer.precision", "exact", "seeds", "out",
        "resume", "overwrite",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.early_stopping is not None and self.patience is None:
            self.patience = 3


def parser() -> cli.Parser:
    """The command line: data, nets, distillation methods, optimizer, trainer."""
    parser = cli.Parser("kd.py", (__doc__ or "").split("\n", 1)[0], Options)
    sets = (datamodules.InMemoryData, datamodules.ImageData, LightningDataModule)
    parser.add_choice("data", cli.Classes(sets, datamodules), "Digits", about="the data set")
    parser.groups += options_by_task()
    net = cli.Classes((nets.Net, nn.Module), nets, more=(Outputs,))
    method = cli.Classes((objectives.Objective, objectives.FeatureObjective), objectives)
    parser.add_choice("teacher", net, "DeepNN", fixed=arguments_set_by_data, about="the net that teaches")
    about = "the net that learns"
    parser.add_choice("student", net, "LightNN", fixed=arguments_set_by_data, replaced_by="students", about=about)
    parser.add_variants(
        "teachers", net, {}, NAMES, fixed=arguments_set_by_data, about="one more teacher, for --taught_by"
    )
    parser.add_variants("students", net, {}, NAMES, fixed=arguments_set_by_data)
    variants = {"ce": "CrossEntropy", "kd": "Hinton", "cosine": "Cosine", "hint": "Hint"}
    parser.add_variants("variants", method, variants, NAMES, about="one more student")
    parser.add_check(arm_names)
    parser.add_recipes("only", lambda flags: import_module(ZOO).recipes_of_one(variants, flags))
    parser.add_recipes("zoo", lambda flags: import_module(ZOO).recipes_of_all(variants, flags))
    why = "the epochs so far have its rate; with --teacher_ckpt another run learns from the same teachers"
    add_optimizer(parser, scheduler_on_resume=cli.OnResume(why=why), apart=["teacher"])
    judged = cli.OnResume(why="what is tested is tested once")
    about = "what nets are judged by, in the table and beside the accuracy of the validation"
    parser.add_choice("metric", MetricClasses(), "accuracy", about=about, on_resume=judged)
    add_trainer(parser, on_resume={"max_epochs": cli.GROWS}, max_epochs=10, log_every_n_steps=10)
    parser.add_texts(
        "search", "of a method, or of the optimizer, the values that --tune tries: log(1,16), linear(0,1), [1,2,4]"
    )
    parser.add_texts("taught_by", "of a student, the teacher that it learns from, or the weight of each of several")
    parser.add_texts("student_ckpt", "of --students.NAME, a run's net that embeds, with whose weights it begins")
    parser.add_recipes("only", lambda _: import_module(OF_PAIRS).BY_NAME)
    parser.add_recipes("data", lambda _: import_module(OF_PAIRS).BY_DATA)
    parser.add_recipes("data.task", lambda _: settings_by_task())
    parser.add_recipes("recipe", RECIPES)
    parser.add_recipes("data", lambda flags: import_module(PRETRAINED).of_pretrained(flags))
    parser.default_experiment("recipe", DEFAULT, unless=["data", "data.task"])
    parser.default_experiment("recipe", DEFAULT_OF_TEXTS, unless=["data.path"], choices={"data": "Chat"})
    nets_given = ["teacher", "teacher_ckpt", "student", "students"]
    parser.default_experiment("recipe", DEFAULT_OF_PAIRS, unless=nets_given, choices={"data": "Pairs"})
    parser.add_choice("launcher", LAUNCHERS, on_resume=cli.FREE)
    return parser


class KD(BakeOff):
    """What is built: a teacher, and students that differ in their nets and methods alone."""

    def teacher(self, seed: int, key: str = TEACHER) -> LitClassifier:
        """Build a seed's teacher; options such as `--teacher_ckpt` are those of `--teacher`, not of `--teachers`."""
        session, config = self.session, self.config
        is_first = key == TEACHER
        if is_first and (stand_in := self.kind.stand_in(seed)) is not None:
            return LitClassifier(stand_in, session.data.num_classes, **learner_options(config, session.data), seed=seed)
        net = build_net(session, key, seed)
        if config.teacher_ckpt is not None and is_first:
            load_teacher(session, net, seed)
        head_only = config.teacher_head_only and is_first
        if head_only:
            nets.heads(net, key)  # or it is refused by its flag
        options = learner_options(of_teacher(config), session.data)
        return LitClassifier(net, session.data.num_classes, **options, seed=seed, head_only=head_only)

    def students(self, seed: int, arms: Iterable[Arm], teacher: nn.Module) -> Distillation:
        """Build the module of some students of a teacher."""
        session, config, data = self.session, self.config, self.session.data
        students, optimizers, arms = {}, {}, list(arms)
        if not isinstance(teacher, TeacherInFile):
            teacher = self.kind.prepare_teacher(session, teacher, arms)
        for arm in arms:
            objective = self.kind.prepare_objective(arm.objective(config), teacher)
            # Equal peers would teach one another nothing.
            seed_of_net = fold_in(seed, *arm.variant.encode()) if objective.peers else seed
            if is_from_teacher(config, arm.net):
                students[arm.name] = self.nets_from_teachers.student(arm.net, seed, teacher), objective
            else:
                net = build_net(session, arm.net, seed_of_net)
                if config.student_ckpt:
                    import_module("harness.studies.student_weights").load_student(session, net, arm.net, seed)
                net = self.kind.prepare_student(session, net, teacher, seed_of_net)
                students[arm.name] = net, objective
            if arm.optimizer:
                optimizers[arm.name] = arm.optimizer
        return Distillation(
            teacher, students, data.input_shape, data.num_classes, seed=seed, **learner_options(config, data),
            teacher_cache_mb=config.teacher_cache_mb, teacher_cache_dir=config.teacher_cache_dir,
            input_dtype=data.example.dtype, samples=data.places, labelled=data.shows_labels,
            optimizer_options=optimizers, ema=config.ema,
            **data.module_arguments, **self.kind.module_arguments(seed),
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study that the command line describes."""
    with session("kd", parser(), argv) as run:
        if run.config.list_layers:
            import_module(LAYERS).print_layers(run)
            return
        if run.config.search and not run.config.tune:
            flag, value = next(iter(run.config.search.items()))
            raise BadInput(f"search.{flag}", value, "--tune N beside it")
        if run.config.taught_by and run.config.tune:
            flag, value = next(iter(run.config.taught_by.items()))
            raise BadInput(f"taught_by.{flag}", value, "not allowed with --tune, which searches with one teacher")
        if do_job(run, KD):
            return
        run.announce()
        bake_off = settle_exact(run, lambda: KD(run).prepare())
        if run.config.export:
            import_module(EXPORT).check_students(run, bake_off.arms)
        with run.folder():
            run.describe()
            bake_off.run()
            bake_off.kind.finish(run, map(teacher_row_name, bake_off.teachers), bake_off.arms)
            if run.config.export or bake_off.kind.exports_students:
                import_module(EXPORT).export_students(run, bake_off.arms, bake_off.failed)


if __name__ == "__main__":
    start.run(main)
