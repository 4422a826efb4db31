"""The question that a bake-off asks, and its answer in words."""

from collections.abc import Sequence

from harness.reports.bakeoff.few_labels import labelled_samples
from harness.reports.conclusions import conclude
from harness.reports.results import Results, differences_to
from harness.reports.tables import NONE, count, join_words

MOST_NAMED = 6  # students in a question


def lead_paragraph(results: Results) -> str:
    """Say in words what the comparison asks, what its answer is, and how sure that is."""
    metric = results.metric
    scores = {name: metric.mean(net.scores[metric.name]) for name, net in results.nets.items()}
    unit = f" {metric.unit if metric.scale == 1 else '%'}"
    reached = join_words([f"{name} {score}{unit * (score != NONE)}" for name, score in scores.items()])
    answer = " ".join(conclusions(results)) or f"{reached}."
    return f"**Question.** {question(results)}\n\n**Answer, and how sure it is.** {answer}"


def conclusions(results: Results) -> list[str]:
    """Say for each baseline which students differ from it, and how sure that is."""
    students, metric = results.students, results.metric
    sentences = []
    for baseline in dict.fromkeys(student.baseline for student in students.values()):
        if baseline in students:
            paired = differences_to(baseline, students, metric)
            others = {name: values for name, values in paired.items() if name != baseline}
            sentences.append(conclude(baseline, others, metric))
    return [sentence for sentence in sentences if sentence]


def question(results: Results) -> str:
    """Ask in words what the comparison answers."""
    students, labelled = results.students, labelled_samples(results)
    score = results.metric.title.partition(",")[0]
    where = f"On {results.data['name']}"
    if labelled is not None:
        where += f" with labels of {count(labelled)} of {count(results.data.get('train'))} training samples"
    baselines = {of.baseline: students[of.baseline] for of in students.values() if of.baseline in students}
    others = [name for name in students if name not in baselines]
    if not baselines or not others:
        return f"{where}: which {score} {'do' if len(students) > 1 else 'does'} {_some(list(students))} reach?"
    to = next(iter(baselines)) if len(baselines) == 1 else "the ce of the same net"
    alone = results.teacher and all(student.objective == "CrossEntropy" for student in baselines.values())
    which = f"{where}: is the {score} of {_some(others, 'or')} better than that of {to}"
    return f"{which}, which learns from labels alone?" if alone else f"{which}?"


def _some(names: Sequence[str], word: str = "and") -> str:
    """Name some students, or count many."""
    return join_words(names, word) if len(names) <= MOST_NAMED else f"{len(names)} students"
