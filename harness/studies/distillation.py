"""The stages of a bake-off in a run's folder: each leaves weights and facts, and is not done twice."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apprentice.batch import Batch
from harness.runs.files import write_json
from harness.runs.fit import Fitted, MakeTrainer, fit_and_test
from harness.runs.job import is_main_process
from harness.runs.nets import Spec, save_net
from harness.runs.tensorboard import log_run
from harness.studies import costs

Facts = dict[str, Any]


@dataclass
class Candidate:
    """One net that a stage trains.

    Attributes:
        net: the bare net, to be exported.
        spec: how to rebuild it.
        objective: name of what it learns by.
        options: the settings that its row in the HPARAMS tab shows.
    """

    net: nn.Module
    spec: Spec
    objective: str
    options: Mapping[str, Any]


@dataclass
class DistillationStudy:
    """Trains and tests the modules of a bake-off, stage by stage.

    Attributes:
        folder: the run's folder, OUT.
        data: the data module, set up.
        make_trainer: makes a Trainer with the user's settings.
        every: seconds between checkpoints.
        tensorboard: whether TensorBoard's files are written.
    """

    folder: Path
    data: Any
    make_trainer: MakeTrainer
    every: float = 30.0
    tensorboard: bool = True

    def stage(
        self, seed: int, name: str, make: Callable[[], tuple[Any, dict[str, Candidate]]], trained: bool = False
    ) -> Facts:
        """Fit and test a module of one or several runs, export its nets, measure their costs.

        Args:
            seed: the training seed; keys order and augmentation.
            name: of the stage, and of its only run where the module has but one.
            make: makes the module and its candidates by name; not called if the stage is finished.
            trained: the module's weights are there already: only test it.

        Returns:
            `fit_seconds`, and by the candidates' names `runs`, the facts that `results.bake_off_results` takes.

        Raises:
            Interrupted: the user asked to stop; what was trained is kept.
        """
        folder = self.folder / f"seed{seed}"
        record, checkpoint = folder / f"{name}.json", folder / f"{name}.ckpt"
        if record.exists():
            if is_main_process():
                checkpoint.unlink(missing_ok=True)  # a crash may have come just before
            return json.loads(record.read_text())
        self.data.order_seed = seed
        module, candidates = make()
        names = list(candidates)
        found = fit_and_test(
            module, self.data, self.make_trainer, checkpoint,
            runs=names, every=self.every, tensorboard=self.tensorboard, label=f"seed {seed} {name:8}", trained=trained,
        )  # fmt: skip
        facts: Facts = {"fit_seconds": found.seconds, "runs": {}}
        if is_main_process():
            module.to(found.device)  # a fit on a GPU ends on the CPU
            for run, candidate in candidates.items():
                facts["runs"][run] = self._facts(module, run if module.runs != [""] else "", candidate, found)
                save_net(candidate.net, candidate.spec, folder / run)
                self._track(folder / run, candidate, facts["runs"][run])
            write_json(record, facts)
            checkpoint.unlink(missing_ok=True)
        if dist.is_initialized():
            dist.barrier()  # ranks of a launcher's go on to read what the first has written
        return facts

    def _facts(self, module: Any, run: str, candidate: Candidate, found: Fitted) -> Facts:
        scores = found.scores
        prefix = f"{run}/test" if run else "test"
        failed, names = module.failed.get(run), module.scores_of(run).names
        facts: Facts = {
            "objective": candidate.objective,
            "parameters": costs.parameters(candidate.net),
            **{f"test_{name}": None if failed else scores[f"{prefix}/{name}"] for name in names},
            "step_ms": None,
            "train_flops": None,
            "failed": failed,
        }
        if "test_correct" in facts and not failed:
            facts["test_correct"] = round(facts["test_correct"])
        if module.samples and not failed:  # a loaded net's training was paid for elsewhere
            batch = self._batch(module)
            with found.autocast():
                step = module.step_alone(run, batch)
                if (operations := costs.flops(step)) is not None:
                    facts["train_flops"] = round(operations / batch.count * module.samples)
                facts["step_ms"] = costs.milliseconds(step)
        return facts

    def _batch(self, module: nn.Module) -> Batch:
        """The training set's first samples as one whole batch."""
        parameter = next(module.parameters())
        train = self.data.split("train")
        rows = torch.arange(min(self.data.batch_size, len(train.labels)))
        inputs, labels = train.take(rows)
        inputs = self.data.normalize(inputs.to(parameter.device), parameter.dtype)
        rows = rows.to(parameter.device)
        return Batch(inputs, labels.to(parameter.device), rows, rows, len(rows), 1, 0)

    def _track(self, folder: Path, candidate: Candidate, facts: Facts) -> None:
        if self.tensorboard:
            options = {"objective": candidate.objective, **candidate.options}
            log_run(folder, options, {f"cost/{key}": facts[key] for key in ("parameters", "train_flops", "step_ms")})
