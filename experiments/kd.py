"""Knowledge distillation: one teacher, many students, one table.

    python experiments/kd.py                        # Digits with 30 labels, embedded: three seeds in half a minute
    python experiments/kd.py --recipe tutorial      # all labels, as in PyTorch's tutorial; --data CIFAR10 beside it
    python experiments/kd.py --trainer.devices 8    # the same, up to rounding, from 8 processes
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from lightning.pytorch import LightningDataModule
from torch import nn

import datamodules
from apprentice.errors import BadInput
from apprentice.keyed import fold_in
from datamodules.base import LARGEST_BATCH
from harness import cli
from harness.jobs.engines import LAUNCHERS
from harness.runs.files import can_be_written
from harness.runs.plans import Arm, of_teacher
from harness.runs.session import session
from harness.runs.taught import TEACHER, row_of
from harness.studies import zoo
from harness.studies.bakeoff import BakeOff
from harness.studies.choices import build_net, given_by_data, is_from_teacher, learner_options
from harness.studies.deploy import leaving
from harness.studies.deploy.language import write_language_models
from harness.studies.launched import is_job
from harness.studies.layers import print_layers
from harness.studies.other_tokens import in_tokens_of_students
from harness.studies.recipes import DEFAULT, DEFAULT_OF_TEXTS, RECIPES, Recipe
from harness.studies.teachers import checkpoint_of, go_on, load_teacher
from harness.studies.tuning import Tuning
from harness.studies.tuning.options import check_options
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.stored_teacher import Stored


@dataclass
class Options(cli.RunOptions):
    """Options of the distillation study.

    Args:
        recipe: the settings of a published table; flags beside it change single ones, --print_config shows all. Where
            no --data is chosen it is few-labels, and with --data Chat without a path texts; null gives the options' own
            defaults.
        only: train just these students, as in --only ce kd; with --students, small-kd, or kd for that of each net.
        zoo: train by every method that fits the nets, and say which don't; the best comes first.
        best_epoch: test and keep each net's weights of its best epoch by a score of the validation, as val/acc or
            val/loss; the earliest of equals; the teacher's, too. Default: of the last epoch.
        early_stopping: stop each net by itself, once this score of the validation, as val/loss, has not become better
            for --patience validations; the teacher, too. The others train on.
        patience: validations that --early_stopping waits; default: 3.
        student_seconds: time for each student: the steps of its own training, timed alone beforehand, that fit into it.
            Numbers depend on the machine then. Training ends at --trainer.max_epochs all the same.
        ema: decay, as 0.999, of moving averages of students' weights; they are tested beside the weights.
        tune: compare the best of N settings of each method; --search.kd.kd_weight log(1,16).
        tune_seeds: how many seeds the search has, or a list of them, as [7,8]; default: 2.
        tune_optimizer: search learning rate and weight decay too, for every method; default: true.
        tune_wave: settings that train side by side, at most; default: what memory holds.
        save_ckpt: write classifier.ckpt beside weights.pt, for LitClassifier.load_from_checkpoint.
        export: a folder for the students of the first seed, each in files that run without this project.
        list_layers: print the nets' layers and the shapes of their outputs, and train nothing.
        teacher_ckpt: a trained teacher, loaded, not trained; {seed} in its path is replaced by each seed.
        teacher_ckpt_partial: load what fits of teacher_ckpt, and name what doesn't; train the rest: teacher_epochs.
        teacher_ckpt_ema: of a teacher_ckpt with two sets of weights, whether to load the moving averages.
        teacher_epochs: of a teacher that is trained, from teacher_ckpt too; default: the students', or none from there.
        teacher_continue: train on with the states of optimizer and scheduler that teacher_ckpt has beside the weights.
        teacher_batch_size: of a teacher that is trained here; default: --data.batch_size, as the students'.
        teacher_tokenizer: of texts, the teacher's tokenizer, if its tokens are not the students', as --data.tokenizer
            has it; students learn from it by ULD.
        teacher_head_only: train the teacher's last linear layer alone; the rest keeps the weights that it has loaded.
        teacher_cache_dir: a folder that keeps the teacher's outputs for other runs with the same teacher and data.
        teacher_cache_mb: memory for stored teacher outputs; 0 runs the teacher every batch.
        teacher_top_k: of texts, keep in --teacher_cache_dir the teacher's probabilities of so many tokens in each place
            that is learned, or of all; later runs read them, and do not load the teacher.
        teacher_tail: what stands for other tokens: their mass as one bucket, which is the default; nothing, as the
            tokens are a sample of the distribution; or nothing, as those kept are renormalised.
        generated_prompts: of conversations, prompts of the test that nets answer, a token at a time the likeliest one;
            0 for none; default: 12, or 100 with generated_metric. Answers of the first seed are in report.html.
        generated_tokens: of an answer at most; default: 64.
        generated_metric: the import path of a function (answer, reference) of texts that gives a number, such as
            harness.studies.answers.exact_match; its mean is in the table.
        loss_chunk: of texts, tokens whose logits are held at once; 0: all; default: 128 if V is 4,096 or more.
    """

    recipe: Recipe | None = None
    only: list[str] | None = field(default=None, metadata=cli.GROWS.metadata)
    zoo: bool = field(default=False, metadata=cli.GROWS.metadata)
    best_epoch: str | None = None
    early_stopping: str | None = None
    patience: int | None = None
    student_seconds: float | None = None
    ema: float | None = None
    tune: int | None = None
    tune_seeds: int | list[int] | None = None
    tune_optimizer: bool | None = None
    tune_wave: int | None = field(default=None, metadata=cli.FREE.metadata)
    save_ckpt: bool = field(default=False, metadata=cli.FREE.metadata)
    export: str | None = field(default=None, metadata=cli.CALL.metadata)
    list_layers: bool = field(default=False, metadata=cli.CALL.metadata)
    teacher_ckpt: str | None = None
    teacher_ckpt_partial: bool = False
    teacher_ckpt_ema: bool | None = None
    teacher_epochs: int | None = None
    teacher_continue: bool = False
    teacher_batch_size: int | None = None
    teacher_tokenizer: str | None = None
    teacher_head_only: bool = False
    teacher_cache_dir: str | None = field(default=None, metadata=cli.FREE.metadata)
    teacher_cache_mb: int = 1024
    teacher_top_k: int | Literal["all"] | None = None
    teacher_tail: Literal["bucket", "sample", "renormalize"] | None = None
    generated_prompts: int | None = None
    generated_tokens: int | None = None
    generated_metric: str | None = None
    loss_chunk: int | None = None
    common: ClassVar[Collection[str]] = (
        "data", "data.batch_size", "data.augment", "data.labelled", "teacher", "teacher_ckpt", "student",
        "variants", "only", "zoo", "tune", "metric", "best_epoch", "optimizer", "optimizer.lr", "scheduler",
        "trainer.max_epochs", "trainer.devices", "trainer.strategy", "trainer.precision", "exact", "seeds", "out",
        "resume", "overwrite",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self)
        self._check_ends()
        if self.teacher_epochs is not None and self.teacher_epochs < 1:
            raise BadInput("teacher_epochs", self.teacher_epochs, "a number of epochs, at least 1")
        if self.teacher_batch_size is not None and not 1 <= self.teacher_batch_size <= LARGEST_BATCH:
            raise BadInput(
                "teacher_batch_size", self.teacher_batch_size, f"a number of samples, 1 to {LARGEST_BATCH:,}"
            )
        if self.teacher_ckpt_partial and (self.teacher_ckpt is None or self.teacher_epochs is None):
            expected = "--teacher_ckpt FILE and --teacher_epochs N beside it: what is not loaded has to be trained"
            raise BadInput("teacher_ckpt_partial", "true", expected)
        if self.teacher_ckpt_ema is not None and self.teacher_ckpt is None:
            raise BadInput("teacher_ckpt_ema", self.teacher_ckpt_ema, "--teacher_ckpt FILE beside it")
        whole = self.teacher_ckpt is not None and not self.teacher_ckpt_partial
        if self.teacher_continue and not (whole and self.teacher_epochs):
            expected = "--teacher_ckpt FILE and --teacher_epochs N beside it, and all weights in the file"
            raise BadInput("teacher_continue", "true", expected)
        if self.generated_prompts is not None and self.generated_prompts < 0:
            raise BadInput("generated_prompts", self.generated_prompts, "a number of prompts, or 0 for none")
        if self.generated_tokens is not None and self.generated_tokens < 1:
            raise BadInput("generated_tokens", self.generated_tokens, "a number of tokens, at least 1")
        if self.generated_metric is not None and self.generated_prompts == 0:
            raise BadInput("generated_metric", self.generated_metric, "prompts: --generated_prompts 1 or more")
        if self.loss_chunk is not None and self.loss_chunk < 0:
            raise BadInput("loss_chunk", self.loss_chunk, "a number of tokens, or 0 for all of a batch at once")
        if self.teacher_cache_mb < 0:
            raise BadInput("teacher_cache_mb", self.teacher_cache_mb, "a number of megabytes, 0 or more")
        if self.teacher_cache_dir is not None and not can_be_written(Path(self.teacher_cache_dir)):
            raise BadInput("teacher_cache_dir", self.teacher_cache_dir, "a folder that can be written")
        self._check_stored()
        if self.teacher_tokenizer is not None and self.teacher_top_k is not None:
            expected = "it left out beside --teacher_top_k, which keeps probabilities of the students' tokens"
            raise BadInput("teacher_tokenizer", self.teacher_tokenizer, expected)

    def _check_stored(self) -> None:
        if self.teacher_top_k is None:
            if self.teacher_tail is not None:
                raise BadInput("teacher_tail", self.teacher_tail, "--teacher_top_k N beside it")
            return
        Stored(self.teacher_top_k)
        if self.teacher_tail is not None and self.teacher_top_k == "all":
            raise BadInput("teacher_tail", self.teacher_tail, "it left out: with --teacher_top_k all there is no tail")
        if self.teacher_cache_dir is None:
            raise BadInput("teacher_top_k", self.teacher_top_k, "--teacher_cache_dir DIR beside it, to keep outputs in")

    def _check_ends(self) -> None:
        if self.ema is not None and not 0 < self.ema < 1:
            raise BadInput("ema", self.ema, "a decay between 0 and 1, such as 0.999")
        if self.early_stopping is None and self.patience is not None:
            raise BadInput("patience", self.patience, "--early_stopping val/loss, or another score, beside it")
        if self.early_stopping is not None:
            self.patience = 3 if self.patience is None else self.patience
            if self.patience < 1:
                raise BadInput("patience", self.patience, "a number of validations, at least 1")
        if self.student_seconds is not None and not self.student_seconds > 0:
            raise BadInput("student_seconds", self.student_seconds, "seconds, above 0")
        if self.student_seconds is not None and self.exact is not None:
            expected = "it left out: --exact has the same bits on any machine, and how many steps fit into it depends"
            raise BadInput("student_seconds", self.student_seconds, f"{expected} on the machine")
        for name in ("best_epoch", "early_stopping", "student_seconds"):
            if self.tune is not None and (value := vars(self)[name]) is not None:
                raise BadInput(name, value, "it left out: --tune compares settings by their last epochs")


def parser() -> cli.Parser:
    """The command line: data, nets, distillation methods, optimizer, trainer."""
    parser = cli.Parser("kd.py", (__doc__ or "").split("\n", 1)[0], Options)
    sets = (datamodules.InMemoryData, datamodules.ImageData, LightningDataModule)
    parser.add_choice("data", cli.Classes(sets, datamodules), "Digits", about="the data set")
    net = cli.Classes((nets.Net, nn.Module), nets)
    method = cli.Classes((objectives.Objective, objectives.FeatureObjective), objectives)
    parser.add_choice("teacher", net, "DeepNN", fixed=given_by_data, about="the net that teaches")
    about = "the net that learns"
    parser.add_choice("student", net, "LightNN", fixed=given_by_data, unless="students", about=about)
    parser.add_variants("teachers", net, {}, fixed=given_by_data, about="one more teacher, for --taught_by")
    parser.add_variants("students", net, {}, fixed=given_by_data)
    variants = {"ce": "CrossEntropy", "kd": "Hinton", "cosine": "Cosine", "hint": "Hint"}
    parser.add_variants("variants", method, variants, about="one more student")
    parser.add_recipes("only", {name: {"variants": {name: method}} for name, method in zoo.named(variants).items()})
    parser.add_recipes("zoo", {True: {"variants": zoo.methods(variants)}})
    why = "the epochs so far have its rate; with --teacher_ckpt another run learns from the same teachers"
    parser.add_optimizer(scheduler_on_resume=cli.OnResume(why=why), apart=["teacher"])
    judged = cli.OnResume(why="what is tested is tested once")
    about = "what nets are judged by, in the table and beside the accuracy of the validation"
    parser.add_choice("metric", cli.MetricClasses(), "accuracy", about=about, on_resume=judged)
    parser.add_trainer(on_resume={"max_epochs": cli.GROWS}, max_epochs=10, log_every_n_steps=10)
    parser.add_texts(
        "search", "of a method, or of the optimizer, the values that --tune tries: log(1,16), linear(0,1), [1,2,4]"
    )
    parser.add_texts("taught_by", "of a student, the teacher that it learns from, or the weight of each of several")
    parser.add_recipes("recipe", RECIPES)
    parser.default_experiment("recipe", DEFAULT, unless="data")
    parser.default_experiment("recipe", DEFAULT_OF_TEXTS, unless="data.path", choices={"data": "Chat"})
    parser.add_choice("launcher", LAUNCHERS, on_resume=cli.FREE)
    return parser


class KD(BakeOff):
    """What is built: a teacher, and students that differ in their nets and methods alone."""

    def teacher(self, seed: int, key: str = TEACHER) -> LitClassifier:
        """Build a seed's teacher; options such as `--teacher_ckpt` are those of `--teacher`, not of `--teachers`."""
        session, config = self.session, self.config
        is_first = key == TEACHER
        if is_first and (stored := self.stored.net(seed)) is not None:
            return LitClassifier(stored, session.data.num_classes, **learner_options(config, session.data), seed=seed)
        net = build_net(session, key, seed)
        if config.teacher_ckpt is not None and is_first:
            load_teacher(session, net, seed)
        head_only = config.teacher_head_only and is_first
        if head_only:
            nets.heads(net, key)  # or it is refused by its flag
        options = learner_options(of_teacher(config), session.data)
        module = LitClassifier(net, session.data.num_classes, **options, seed=seed, head_only=head_only)
        if config.teacher_continue and is_first:
            go_on(module, checkpoint_of(session, seed))
        return module

    def students(self, seed: int, arms: Iterable[Arm], teacher: nn.Module) -> Distillation:
        """Build the module of some students of a teacher."""
        session, config, data = self.session, self.config, self.session.data
        students, optimizers, arms = {}, {}, list(arms)
        teacher = in_tokens_of_students(session, teacher, arms)
        for arm in arms:
            objective = arm.objective(config)
            # Equal peers would teach one another nothing.
            seed_of_net = fold_in(seed, *arm.variant.encode()) if objective.peers else seed
            if is_from_teacher(config, arm.net):
                students[arm.name] = self.made.student(arm.net, seed, teacher), objective
            else:
                students[arm.name] = build_net(session, arm.net, seed_of_net), objective
            if arm.optimizer:
                optimizers[arm.name] = arm.optimizer
        return Distillation(
            teacher, students, data.input_shape, data.num_classes, seed=seed, **learner_options(config, data),
            teacher_cache_mb=config.teacher_cache_mb, teacher_cache_dir=config.teacher_cache_dir,
            stored=self.stored.options(seed),
            loss_chunk=config.loss_chunk,
            input_dtype=data.example.dtype, samples=data.places, labelled=data.labelled is None,
            optimizer_options=optimizers, ema=config.ema, end_tokens=data.end_tokens,
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the study that the command line describes."""
    with session("kd", parser(), argv) as run:
        if run.config.list_layers:
            teachers = [TEACHER, *(f"teachers.{name}" for name in run.config.teachers)]
            print_layers(run, [*teachers, *dict.fromkeys(row.net for row in cli.rows(run.config).values())])
            return
        if run.config.search and not run.config.tune:
            flag, value = next(iter(run.config.search.items()))
            raise BadInput(f"search.{flag}", value, "--tune N beside it")
        if run.config.taught_by and run.config.tune:
            flag, value = next(iter(run.config.taught_by.items()))
            raise BadInput(f"taught_by.{flag}", value, "no --tune beside it: settings are searched with one teacher")
        if is_job():
            KD(run).do_job()
            return
        run.announce()
        bake_off = KD(run)
        bake_off.check()
        tuning = Tuning(bake_off) if run.config.tune else None
        if tuning:
            tuning.check()
        if run.config.export:
            leaving.check_students(run, bake_off.arms)
        with run.folder():
            run.describe()
            if tuning:
                bake_off.arms = tuning.search()
            bake_off.run(tuning.facts() if tuning else None)
            with run.tokens_of_teacher():
                write_language_models(run, map(row_of, bake_off.teachers), (), {})
            write_language_models(run, (), bake_off.arms, bake_off.failed)
            if run.config.export:
                leaving.export_students(run, bake_off.arms, bake_off.failed)


if __name__ == "__main__":
    start.run(main)
