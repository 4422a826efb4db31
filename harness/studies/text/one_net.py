"""A language model alone: a comparison of one, which then writes."""

import json
from collections.abc import Sequence
from typing import Any, cast

from apprentice.errors import BadInput
from datamodules.text.plain_text import Text
from harness import cli
from harness.reports.html import Section
from harness.reports.results import Results
from harness.reports.search import Search
from harness.runs.callbacks import check_callbacks
from harness.runs.files import read_text, write_json
from harness.runs.plans import Arm, FitPlan
from harness.runs.records import FitRecord
from harness.runs.session import Session
from harness.runs.tensorboard import indent, log_text
from harness.studies.choices import build_net, check_exact_step, check_modules, check_net
from harness.studies.launcher import KEY
from harness.studies.text.costs import check_decoding
from harness.studies.text.language_model import NAME, write_samples
from harness.studies.text.variants import Variants
from harness.studies.text.vocabularies import write_vocabularies
from lit_modules.language_model import LitLanguageModel
from lit_modules.training.loop import Loop
from strategies.base.shared_replica import SharedReplica

FILE = "samples.json"  # in the net's folder


class OneNet(Variants):
    """The net of `net`, for each seed in a fit of its own."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.arms = {NAME: Arm(NAME, "net")}

    def build(self, plan: FitPlan) -> Loop:
        return self.lone_module(plan.seed)

    def lone_module(self, seed: int) -> LitLanguageModel:
        """Build a seed's module."""
        session, config = self.session, self.config
        rate = cast("Text", session.data).tokens_per_character
        options: dict[str, Any] = {"tokens_per_character": rate, "compiled": config.compile, "seed": seed}
        model: LitLanguageModel = cli.build(config.model, "model", net=build_net(session, "net", seed), **options)
        return model

    def check(self) -> None:
        """Build everything once; raise BadInput if something can't be trained, or an option is of a comparison."""
        session, config, launcher = self.session, self.config, self.launcher
        trainer = session.checked_trainer()
        if config.compile and isinstance(trainer.strategy, SharedReplica):
            expected = "false with this `trainer.strategy`, under which the net is not called as a whole"
            raise BadInput("compile", True, expected)
        model = self.lone_module(config.seeds[0])
        if not all(hasattr(model.net, name) for name in ("generate", "block_size")):
            raise BadInput("net", config.net.name, "a language model with generate() and block_size, as GPT")
        check_decoding(model.net, "net")
        check_net(session, "net", trainer)
        check_modules(session, trainer, model)
        check_exact_step(session, trainer, model)
        check_callbacks(session, trainer, {NAME: model})
        if launcher is not None and launcher.students is not None:
            raise BadInput(f"{KEY}.students", launcher.students, "not allowed, as a seed has one net")

    def plans(self, seed: int) -> list[FitPlan]:
        return [FitPlan(seed, NAME, (*self.arms.values(),), self.config.trainer.init_args["max_epochs"])]

    def fit(self, plan: FitPlan, plans: Sequence[FitPlan] = ()) -> FitRecord:
        record = super().fit(plan, plans)
        if fault := record.fault(NAME):
            rate = self.config.model.init_args["lr"]
            raise BadInput("model.lr", rate, f"settings that train the net; with seed {plan.seed} {fault}")
        return record

    def _report(self, records: Sequence[Sequence[FitRecord]], search: Search | None) -> None:
        session = self.session
        start = cast("Text", session.data).vocabulary.start
        write_vocabularies(session, [NAME])
        folders = [session.out / f"seed{seed}" / NAME for seed in self.config.seeds]
        for folder in folders:
            samples = write_samples(folder, start, self.config)
            write_json(folder / FILE, samples)
            if session.tensorboard:
                log_text(folder, "sample", "\n\n".join(samples))
        print(json.loads(read_text(folders[0] / FILE))[0], end="\n\n")
        super()._report(records, search)

    def sections(self, results: Results) -> list[Section]:
        first = json.loads(read_text(self.session.out / f"seed{results.seeds[0]}" / NAME / FILE))[0]
        return [
            *super().sections(results),
            Section("A sample", f"The net of seed {results.seeds[0]} writes:\n\n{indent(first)}"),
        ]
