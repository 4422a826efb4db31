"""A run's row of TensorBoard's HPARAMS tab: its score, its settings, its cost."""

from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from harness import cli
from harness.reports.measures import FIGURES
from harness.runs.facts import Spec
from harness.runs.plans import Arm
from harness.runs.session import Session
from harness.runs.tensorboard import COSTS, open_writer
from lit_modules.tasks import TASKS, task_class

# TensorBoard ticks the first five settings, by name, of those that are said to differ. So the score is a setting too,
# and four settings sum up all others. Each table has the tasks' default scores, and the one by which its run is judged.
SCORES = tuple(next(iter(task_class(name).metrics.values())).score for name in TASKS)
TICKED = ("net", "objective", "seed", "training")  # beside the score
METRICS = {
    "test/loss": "test loss",
    **{f"{COSTS}/{figure.key}": figure.curve for figure in FIGURES if figure.curve},
}
ALWAYS = ("lr", "batch_size")  # written even where they are the default


def _words(choice: cli.Choice, fixed: Iterable[str] = ()) -> str:
    """Write a class with its options, but for defaults and those that are `fixed`, as `Adam(lr=0.001)`."""
    defaults = _tuples_to_lists(choice.signature.defaults)
    options = _tuples_to_lists({name: value for name, value in choice.init_args.items() if name not in fixed})
    return _call(choice.name, {k: v for k, v in options.items() if k in ALWAYS or v != defaults.get(k, v)})


def _tuples_to_lists(options: Mapping[str, Any]) -> dict[str, Any]:
    """With lists for tuples, as files have them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _call(name: str, options: Mapping[str, Any]) -> str:
    """`Hinton` and {"temperature": 2.0} as `Hinton(temperature=2)`."""
    arguments = (f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items())
    return f"{name}({', '.join(arguments)})" if options else name


def _settings(config: Namespace) -> dict[str, Any]:
    """Return how all nets of an experiment are trained: `training` in words, and each setting by itself."""
    trainer, data = config.trainer.init_args, config.data
    limit = "epochs" if trainer["max_epochs"] not in {None, -1} else "steps"
    length, precision = trainer[f"max_{limit}"], trainer["precision"] or "32-true"
    method = next(key for key in ("optimizer", "model") if hasattr(config, key))
    rates = [(key, choice) for key in (method, "scheduler") if (choice := vars(config).get(key)) is not None]
    strategy = trainer["strategy"].name if isinstance(trainer["strategy"], cli.Choice) else str(trainer["strategy"])
    parts = [*(_words(choice) for _, choice in rates), _words(data), f"{length} {limit}"]
    parts += [strategy, f"devices {trainer['devices']}", precision]
    if config.exact:
        parts.append(f"exact {config.exact}")
    return {
        "training": ", ".join(map(str, parts)), "data": data.name, "batch_size": data.init_args.get("batch_size"),
        **{key: choice.name for key, choice in rates}, "lr": rates[0][1].init_args.get("lr"), limit: length,
        "strategy": strategy, "devices": str(trainer["devices"]), "precision": str(precision),
        "exact": str(config.exact), "accumulate_grad_batches": trainer["accumulate_grad_batches"],
        "gradient_clip_val": str(trainer["gradient_clip_val"]),
    }  # fmt: skip


def log_row(session: Session, seed: int, arm: Arm, spec: Spec, figures: Mapping[str, float | None], score: str) -> None:
    """Write an arm's row, whose net `spec` rebuilds, and its figures by key; nets are judged by `score`."""
    options, net = arm.method.init_args, cli.Choice(spec["class_path"], spec["init_args"])
    row = {
        score: figures[f"test_{score}"], "net": _words(net, session.data.net_arguments), "seed": str(seed),
        "objective": _call(arm.method.name, options), **_settings(arm.settings(session.config)), **options,
    }  # fmt: skip
    others = {name for choice in vars(session.config).get("variants", {}).values() for name in choice.init_args}
    log_run(session.out / f"seed{seed}" / arm.name, row, figures, score, sorted(others))


def log_run(
    folder: Path, row: Mapping[str, Any], figures: Mapping[str, float | None], score: str, others: Iterable[str] = ()
) -> None:
    """Write a finished run's row, its settings and its `score` by name, and its figures by key as scalars.

    `others` are names of settings that other rows have.
    """
    with open_writer(folder, ".hparams") as writer:
        for figure in FIGURES:
            value = figures.get(figure.key)
            if figure.curve and value is not None:
                writer.add_scalar(f"{COSTS}/{figure.key}", value)
        for summary in summaries(row, score, others):
            writer._get_file_writer().add_summary(summary)


def summaries(row: Mapping[str, Any], score: str, others: Iterable[str] = ()) -> list[Summary]:
    """Return the events of a row; `others` names settings that other rows have.

    The table has the columns that some row of it names, so all rows of an experiment name the same ones.
    """
    plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in row.items() if v is not None}
    columns = dict.fromkeys([*SCORES, score, *TICKED, *plain, *others])
    types = {bool: api_pb2.DATA_TYPE_BOOL, str: api_pb2.DATA_TYPE_STRING}
    # Infos have no list of values: with one, the table would hide the rows of other experiments.
    infos = [
        api_pb2.HParamInfo(
            name=name,
            type=types.get(type(plain.get(name, 0.0 if name in {*SCORES, score} else "")), api_pb2.DATA_TYPE_FLOAT64),
            differs=name in {score, *TICKED},
        )
        for name in columns
    ]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag), display_name=name) for tag, name in METRICS.items()]
    described = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics)
    start = plugin_data_pb2.SessionStartInfo()
    for name, value in plain.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(start.hparams[name], kind, value)
    data = plugin_data_pb2.HParamsPluginData
    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS)
    return [
        _summary(metadata.EXPERIMENT_TAG, data(experiment=described)),
        _summary(metadata.SESSION_START_INFO_TAG, data(session_start_info=start)),
        _summary(metadata.SESSION_END_INFO_TAG, data(session_end_info=end)),
    ]


def _summary(tag: str, content: plugin_data_pb2.HParamsPluginData) -> Summary:
    described = metadata.create_summary_metadata(content)
    return Summary(value=[Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)])
