"""What a fit leaves beside its nets: figures of each, and rows and means in TensorBoard."""

import math
from collections.abc import Mapping, Sequence

import torch

from apprentice.batch import Batch
from datamodules import InMemoryData
from harness import cli
from harness.reports import hparams, means, samples
from harness.runs.fit import Fit
from harness.runs.launch import is_main_process
from harness.runs.nets import Spec
from harness.runs.plans import Arm
from harness.runs.records import Failure, NetRecord
from harness.runs.session import Session
from harness.studies import costs
from harness.studies.choices import judged_by
from lit_modules.learner import Learner


def measure(module: Learner, arm: Arm, outcome: Fit, data: InMemoryData) -> NetRecord:
    """Measure an arm: its scores in the test, and what a step of its training costs."""
    run = run_of(module, arm)
    prefix, failed = f"{run}/test" if run else "test", module.failed.get(run)
    scores = {} if failed else outcome.scores
    figures: dict[str, float | None] = {
        "parameters": sum(p.numel() for p in module.net_of(run).parameters()),
        **{f"test_{name}": scores.get(f"{prefix}/{name}") for name in module.scores_of(run).names},
        "step_ms": None,
        "train_flops": None,
    }
    if (correct := figures.get("test_correct")) is not None:
        figures["test_correct"] = round(correct)
    of_samples, values = samples.summarize(module.task, outcome.samples.get(run, {}))
    if module.samples and scores:  # a loaded net has no training to measure
        weight, count = next(module.parameters()), min(data.batch_size, data.sizes["train"])
        inputs, labels = data.samples("train", torch.arange(count), weight.dtype)
        pair = inputs.to(weight.device), labels.to(weight.device)
        with outcome.autocast():
            step = module.step_alone(run, Batch.of(pair, 0, shared=False))
            if (operations := costs.flops(step)) is not None:
                figures["train_flops"] = round(operations / len(labels) * module.samples)
            figures["step_ms"] = costs.milliseconds(step)
    return NetRecord(
        arm.method.name, {**figures, **of_samples}, Failure(**failed) if failed else None, outcome.epochs,
        list_epochs(module, run), samples=values,
    )  # fmt: skip


def run_of(module: Learner, arm: Arm) -> str:
    """Return the name of an arm's run in a module of several, "" in a module that is one run."""
    return arm.name if arm.name in module.runs else ""


def list_epochs(module: Learner, run: str) -> list[dict[str, float | None]]:
    """Return a run's values of each epoch by their names in the log without the run's: `train/loss`, `val/acc`.

    None stands for what is infinite, such as a perplexity.
    """
    prefix = f"{run}/" if run else ""
    epochs = []
    for epoch in module.epochs:
        values = {name.removeprefix(prefix): x for name, x in epoch.items() if name.startswith(prefix)}
        epochs.append({name: x if math.isfinite(x) else None for name, x in values.items()})
    return [values for values in epochs if values]


def log_row(run: Session, seed: int, arm: Arm, spec: Spec, figures: Mapping[str, float | None]) -> None:
    """Write an arm's row in TensorBoard's HPARAMS tab."""
    score, options = judged_by(run.config, run.data).score, arm.method.init_args
    net = cli.Choice(spec["class_path"], spec["init_args"])
    row = {
        score: figures[f"test_{score}"], "net": hparams.words(net, "net", run.data.net_arguments), "seed": str(seed),
        "objective": hparams.call(arm.method.name, options), **hparams.settings(arm.settings(run.config)), **options,
    }  # fmt: skip
    folder = run.out / f"seed{seed}" / arm.name
    hparams.log_run(folder, row, figures, score, hparams.options_of_all(run.config))


def log_means(run: Session, nets: Sequence[str]) -> None:
    """Write the TensorBoard runs of methods, over the seeds that have finished all these nets."""
    if run.tensorboard and is_main_process():
        means.log_means(run.out, run.config.seeds, nets)
