"""Language models side by side: each variant of a net on the same batches, and one table of all seeds."""

from collections.abc import Iterable, Mapping, Sequence

from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from harness.runs.arm_names import VARIANTS, pick
from harness.runs.callbacks import check_callbacks
from harness.runs.plans import Arm, FitOutcome, FitPlan
from harness.runs.records import NetRecord
from harness.runs.session import Session
from harness.studies import zoo
from harness.studies.choices import build_net, check_batch_size, check_exact_step, check_modules, check_net, chosen_task
from harness.studies.side_by_side import Builder, SideBySide
from harness.studies.text.costs import add_costs, check_decoding
from harness.studies.text.equal import scale_widths
from lit_modules.language_models import LanguageModels
from lit_modules.training.loop import Loop
from strategies.base.shared_replica import SharedReplica

ZOO: Mapping[str, Mapping[str, object]] = {  # options of GPT, by name
    "mha": {},
    "one_head": {"num_heads": 1},
    "eight_heads": {"num_heads": 8},
    "no_bias": {"bias": False},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "rotary": {"position": "rotary"},
    "alibi": {"position": "alibi"},
    "nope": {"position": None},
    "window": {"position": "rotary", "window": 32},
    "qk_norm": {"qk_norm": True},
    "gate": {"gate": True},
    "rms_swiglu": {"norm": "rms", "mlp": "swiglu"},
    "moe": {"mlp": "moe"},
    "latent": {"mixer": "latent"},
    "differential": {"mixer": "differential"},
    "linear": {"mixer": "linear"},
    "gated": {"mixer": "gated"},
    "delta": {"mixer": "delta"},
    "windowed": {"mixer": "windowed", "position": "rotary", "window": 16},
    "hybrid": {"mixer": "delta", "softmax_every": 2},
}


def zoo_variants() -> dict[str, dict[str, object]]:
    """Return the variants of `zoo true` as the command line takes choices."""
    return {name: {"class_path": "GPT", "init_args": dict(options)} for name, options in ZOO.items()}


def arms_of(names: Iterable[str]) -> dict[str, Arm]:
    """Return the arms of some variants."""
    return {name: Arm(name, f"{VARIANTS}.{name}", variant=name) for name in names}


class Variants(SideBySide):
    """A comparison of language models that learn from the text alone."""

    keeps_checkpoints = False  # a longer training has other learning rates from the start

    def __init__(self, session: Session) -> None:
        config = session.config
        super().__init__(session, arms_of(pick(config.variants, config.only)))

    def module(self, seed: int, arms: Iterable[Arm]) -> LanguageModels:
        """Build the module of some arms."""
        session, config, data = self.session, self.config, self.session.data
        arms = list(arms)
        nets = {arm.name: build_net(session, arm.net, seed) for arm in arms}
        return LanguageModels(
            nets, data.input_shape, data.num_classes, **config.model.init_args, compiled=config.compile, seed=seed,
            task=chosen_task(config, data), **data.module_arguments,
            optimizer_options={arm.name: dict(arm.optimizer) for arm in arms if arm.optimizer},
        )  # fmt: skip

    def build(self, plan: FitPlan) -> Loop:
        return self.module(plan.seed, plan.arms)

    def builder(self, seed: int) -> Builder:
        return lambda arms: self.module(seed, arms)

    def check(self) -> None:
        """Build everything once; under `zoo`, leave out nets that can't be trained here, with a line that says why.

        Raises:
            BadInput: something can't be trained.
        """
        session, config = self.session, self.config
        trainer = session.checked_trainer()
        if config.compile and isinstance(trainer.strategy, SharedReplica):
            expected = "false with this `trainer.strategy`, under which the net is not called as a whole"
            raise BadInput("compile", True, expected)
        if config.equal is not None:
            scale_widths(session, VARIANTS, list(self.arms), config.equal)
        if config.zoo:
            asked_for = {*(config.only or ()), *({*self.arms} - {*ZOO})}
            self.arms = arms_of(
                zoo.keep_fitting(self.arms, asked_for, session.parser, lambda names: self._try(trainer, names))
            )
            if not self.arms:
                raise BadInput("zoo", "true", "a text that at least one net fits")
        module = self._try(trainer, list(self.arms))
        check_batch_size(session, module)
        check_callbacks(session, trainer, {"students": module})

    def _try(self, trainer: Trainer, names: Sequence[str]) -> LanguageModels:
        arms = [self.arms[name] for name in names]
        for arm in arms:
            check_net(self.session, arm.net, trainer)
        module = self.module(self.config.seeds[0], arms)
        check_modules(self.session, trainer, module)
        check_exact_step(self.session, trainer, module)
        module.check_data(self.session.data)
        for arm in arms if self.config.decode_at else ():
            check_decoding(module.net_of(arm.name), arm.net, is_timed=True)
        return module

    def measure(self, plan: FitPlan, module: Loop, arm: Arm, run: str, outcome: FitOutcome) -> NetRecord:
        """Also measure what a token costs; decoding once, with the first seed, as it depends on no weights."""
        record = super().measure(plan, module, arm, run, outcome)
        is_timed = arm.trial is None and module.seed == self.config.seeds[0]
        timed_at = (self.config.decode_at or []) if is_timed else []
        return add_costs(record, module.net_of(run), self.session.data, timed_at)
