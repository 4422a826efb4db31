"""The fits of an experiment: each leaves its nets and a record in the run's folder and is not repeated."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from apprentice.batch import Batch
from datamodules import InMemoryData
from harness.reports.report import Facts
from harness.runs.files import write_json
from harness.runs.fit import Fit, fit_and_test
from harness.runs.launch import is_main_process
from harness.runs.nets import Spec, save_net
from harness.runs.session import Session
from harness.runs.tensorboard import log_run
from harness.studies import costs
from lit_modules.learner import Learner


@dataclass
class Candidate:
    """One of the nets that a fit trains."""

    net: nn.Module  # the bare net, which is exported
    spec: Spec  # how to rebuild it
    objective: str  # name of what it learns by
    options: Mapping[str, Any]  # the settings that its row in the HPARAMS tab shows


Make = Callable[[], tuple[Learner, dict[str, Candidate]]]


def train(run: Session, seed: int, name: str, make: Make, trained: bool = False, **options: Any) -> Facts:
    """Fit and test a module of one or several candidates, export their nets, measure their costs.

    Args:
        run: the session, its folder open.
        seed: the training seed; keys order and augmentation.
        name: of the fit.
        make: makes the module and its candidates by name; not called if the fit is finished.
        trained: whether the module has its weights already and is only tested.
        options: of the Trainer, over the user's.

    Returns:
        `fit_seconds`, and by the candidates' names `runs`: `objective`, `parameters`, test scores, `step_ms`,
        `train_flops`, and `failed`: None, or the {"step", "term"} in which the loss stopped being finite.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    folder = run.out / f"seed{seed}"
    record, checkpoint = folder / f"{name}.json", folder / f"{name}.ckpt"
    if record.exists():
        if is_main_process():
            checkpoint.unlink(missing_ok=True)  # the process may have been killed just before
        return json.loads(record.read_text())
    run.data.order_seed = seed
    module, candidates = make()
    fit = fit_and_test(
        module, run.data, partial(run.trainer, **options), checkpoint, runs=list(candidates), trained=trained,
        every=run.config.checkpoint_every, tensorboard=run.tensorboard, label=f"seed {seed} {name:8}",
    )  # fmt: skip
    facts: Facts = {"fit_seconds": fit.seconds, "runs": {}}
    if is_main_process():
        module.to(fit.device)  # a fit on a GPU ends on the CPU
        for key, candidate in candidates.items():
            facts["runs"][key] = found = _facts(module, key if key in module.runs else "", candidate, fit, run.data)
            save_net(candidate.net, candidate.spec, folder / key)
            if run.tensorboard:
                shown = {f"cost/{name}": found[name] for name in ("parameters", "train_flops", "step_ms")}
                log_run(folder / key, {"objective": candidate.objective, **candidate.options}, shown)
        write_json(record, facts)
        checkpoint.unlink(missing_ok=True)
    wait_for_main()
    return facts


def wait_for_main() -> None:
    """Where a launcher started the ranks, wait until the first has written its files."""
    if dist.is_initialized():
        dist.barrier()


def failure(facts: Facts, name: str) -> str | None:
    """In which term and step a candidate's loss stopped being finite."""
    fault = facts["runs"].get(name, {}).get("failed")
    return fault and f"its {fault['term']} is not finite at step {fault['step']}"


def _facts(module: Learner, run: str, candidate: Candidate, fit: Fit, data: InMemoryData) -> Facts:
    prefix = f"{run}/test" if run else "test"
    failed, names = module.failed.get(run), module.scores_of(run).names
    facts: Facts = {
        "objective": candidate.objective,
        "parameters": sum(p.numel() for p in candidate.net.parameters()),
        **{f"test_{name}": None if failed else fit.scores[f"{prefix}/{name}"] for name in names},
        "step_ms": None,
        "train_flops": None,
        "failed": failed,
    }
    if "test_correct" in facts and not failed:
        facts["test_correct"] = round(facts["test_correct"])
    if module.samples and not failed:  # a loaded net has no training to measure
        weight, train = next(module.parameters()), data.split("train")
        inputs, labels = train.take(torch.arange(min(data.batch_size, len(train.labels))))
        pair = data.normalize(inputs.to(weight.device), weight.dtype), labels.to(weight.device)
        with fit.autocast():
            step = module.step_alone(run, Batch.of(pair, 0, shared=False))
            if (operations := costs.flops(step)) is not None:
                facts["train_flops"] = round(operations / len(labels) * module.samples)
            facts["step_ms"] = costs.milliseconds(step)
    return facts
