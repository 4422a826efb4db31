"""Quantisation-aware training of a trained student, from labels alone or with distillation."""

from typing import Any, cast

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from apprentice.errors import BadInput, naming
from deploy.int8.fake_quantization import FakeQuantized
from lit_modules.distillation import Distillation
from lit_modules.nets.layers import input_names, layer, run
from lit_modules.objectives.base import Objective
from lit_modules.objectives.cross_entropy import CrossEntropy

NAME, BEST = "int8-qat", "best."


class QuantizationAware(Distillation):
    """Trains a student that computes as its int8 form will (Jacob et al. 2018), with torchao's PT2E.

    It is a distillation of one student, `int8-qat`, so it works with every objective. Evaluation converts a copy to
    int8. The module keeps the state of the epoch with the most correct answers in validation (the first of several; the
    last epoch without validation), as part of its own state, so it returns from ranks and checkpoints.

    Args:
        net: the trained student, in floats; it is copied.
        objective: what it learns by; default: cross-entropy.
        teacher: a trained net, for objectives that use one.
        input_shape: of one input, such as (C, H, W).
        freeze_epoch: the epoch, counted from 0, from which ranges and BatchNorm statistics no longer change.
        options: those of Distillation.

    Raises:
        BadInput: the objective needs a teacher or refuses the nets; the net can't be captured as a graph;
            `freeze_epoch` is 0, before any range is known.
        Missing: torchao is not installed.
    """

    has_teacher = False  # what is tested is the int8 net, which no forward beside a teacher computes

    def __init__(
        self,
        net: nn.Module,
        objective: Objective | None = None,
        teacher: nn.Module | None = None,
        input_shape: tuple[int, ...] = (3, 32, 32),
        *,
        freeze_epoch: int | None = None,
        **options: Any,
    ) -> None:
        if freeze_epoch is not None and freeze_epoch < 1:
            raise BadInput("freeze_epoch", freeze_epoch, "at least 1, as ranges are learnt before")
        objective = objective or CrossEntropy()
        if objective.uses_teacher and teacher is None:
            raise BadInput("objective", type(objective).__name__, "CrossEntropy, or a teacher to distil from")
        with naming("objective"):
            objective.choose(net, teacher or net)
        for flag, path in objective.student_layers.items():
            layer(net, path, f"objective.{flag}", objective.needs)
            if input_names(net, [path]):
                expected = "the output of a layer: inputs are not seen while a net learns to be int8"
                raise BadInput(f"objective.{flag}", path, expected)
        example = torch.zeros(1, *input_shape, dtype=next(net.parameters()).dtype)
        fake = FakeQuantized(net, example, list(objective.student_layers.values()))
        try:
            super().__init__(teacher or nn.Identity(), {NAME: (fake, objective)}, input_shape, **options)
        except BadInput as fault:  # the flag is that of one objective, not of variants
            raise BadInput(
                fault.argument.replace(f"variants.{NAME}", "objective"), fault.value, fault.expected
            ) from None
        self.freeze_epoch = freeze_epoch
        self.best: dict[str, Tensor] = {}  # epoch and correct answers, () int64; the net's state under net.<name>
        self._int8: list[nn.Module] = []
        self.register_state_dict_post_hook(_add_best)  # type: ignore[no-untyped-call]  # torch's has no hints
        self.register_load_state_dict_pre_hook(_take_best)  # type: ignore[no-untyped-call]  # torch's has no hints

    @property
    def net(self) -> FakeQuantized:
        """The net in training."""
        return cast("FakeQuantized", self.students[NAME].net)

    @property
    def best_epoch(self) -> int:
        """The epoch of `best_state`, counted from 0."""
        return int(self.best["epoch"]) if self.best else self.current_epoch

    def best_state(self) -> dict[str, Tensor]:
        """The state of `net` in the best epoch, for its `int8`; without validation, the current state."""
        best = {name.removeprefix("net."): value for name, value in self.best.items() if name.startswith("net.")}
        return best or self.net.state_dict()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """This rank's part of the loss; freezes first if it is time, also after a resume in mid-epoch."""
        if self.freeze_epoch is not None and self.current_epoch >= self.freeze_epoch and not self.net.frozen:
            self.net.freeze()
        return super().training_step(batch, batch_idx)

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        """The int8 net's logits, in float32 whatever the precision of training."""
        if NAME in self.failed:
            return {}
        with torch.autocast(inputs.device.type, enabled=False):
            return {NAME: run(self._int8[0], inputs.float()).logits}

    def on_validation_epoch_start(self) -> None:
        """Convert the current state; for a test, that of the best epoch."""
        super().on_validation_epoch_start()
        state = self.best_state() if self.trainer.testing else self.net.state_dict()
        self._int8[:] = [self.net.int8(state).to(self.device)]

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()
        super().on_test_epoch_start()

    def on_validation_epoch_end(self) -> None:
        """Log the int8 net's scores; keep the state if this is the best epoch so far."""
        super().on_validation_epoch_end()
        trainer = self.trainer
        if NAME in self.failed or trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        correct = int(self.scores_of(NAME).compute()["correct"])
        if not self.best or correct > self.best["correct"]:
            state = {f"net.{name}": value.clone() for name, value in self.net.state_dict().items()}
            self.best = {"epoch": torch.tensor(self.current_epoch), "correct": torch.tensor(correct), **state}


def _add_best(module: QuantizationAware, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
    state.update({f"{prefix}{BEST}{name}": value for name, value in module.best.items()})


def _take_best(module: QuantizationAware, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    names = [name for name in state if name.startswith(f"{prefix}{BEST}")]
    module.best = {name.removeprefix(f"{prefix}{BEST}"): state.pop(name) for name in names}
