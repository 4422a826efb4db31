"""Whether nets follow their teacher, and whether their confidence is right."""

from harness.reports.measures import ON_PAGE, columns_on_page
from harness.reports.results import Results
from harness.reports.tables import table_of


def text(results: Results) -> str:
    """Write a table in Markdown, and what its columns are; nothing of nets without such figures."""
    metric = results.metric
    nets = {name: (net, net.with_means()) for name, net in results.nets.items()}
    nets = {name: pair for name, pair in nets.items() if any(pair[1][f.key] is not None for f in ON_PAGE)}
    if not nets:
        return ""
    scores = [metric.mean(net.scores[metric.name]) for net, _ in nets.values()]
    figures = columns_on_page([values for _, values in nets.values()])
    columns = [("net", list(nets)), (metric.title, scores), *figures]
    if metric.counted != "samples":
        explained = (
            "Agreement: tokens of the test that count of which a student finds the teacher's token the likeliest, too. "
            "KL: mean divergence of its distributions of such a token from the teacher's. Means over seeds."
        )
    else:
        explained = (
            "Agreement: test samples of which a student predicts the teacher's class. KL: mean divergence of its "
            "predictions from the teacher's. ECE: expected calibration error, the mean distance of confidence and "
            "accuracy in 15 bins of confidence. Means over seeds."
        )
    return f"{explained}\n\n{table_of(columns).markdown()}"
