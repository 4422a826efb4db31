"""report.html: one file with everything, which asks for nothing from a network."""

import itertools
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.reports import html, samples
from harness.reports.bakeoff import curves, differences, mistakes, page, plots, question
from harness.reports.bakeoff.pairs import compare_pairs, pairs
from harness.reports.bakeoff.save import save_results
from harness.reports.bakeoff.texts import markdown
from harness.reports.combine import combine
from harness.reports.measures import PARAMETERS
from harness.reports.report import Report
from harness.reports.results import Results
from harness.reports.tables import Table
from harness.reports.uncertainty import holm, p_value
from harness.runs.records import NetRecord
from lit_modules.tasks import ACCURACY, Classification, ClassScores
from lit_modules.tasks.classification import calibration_error
from lit_modules.tasks.scores import fidelity
from tests.bake_off_facts import CE, FAILED, HINT, KD, TEST, header, student, teacher
from tests.bake_off_facts import results as made_up
from tests.browser import FAULTS, browser
from tests.figures import drawn

CLASSES, LIMIT = 4, 200_000  # bytes of a page
WIDTHS = 1400, 390  # pixels of a window
NAMES = [f"class {number}" for number in range(CLASSES)]


def with_samples(correct: int, seed: int) -> NetRecord:
    """A student's record, with samples of which so many are right."""
    truth = np.arange(TEST) % CLASSES
    wrong = np.random.default_rng([correct, seed]).permutation(TEST)[correct:]
    predicted = truth.copy()
    predicted[wrong] = (truth[wrong] + 1) % CLASSES
    values = {
        "place": np.arange(TEST), "right": predicted == truth, "predicted": predicted, "label": truth,
        "confidence": np.full(TEST, 0.75), "kl": np.full(TEST, 0.5), "agreement": predicted == truth,
    }  # fmt: skip
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    means, packed = samples.summarize(Classification(CLASSES), tensors)
    rows = [{"train/loss": 2.0 / (epoch + seed + 1), "val/acc": 0.5 + 0.1 * epoch} for epoch in range(3)]
    record = student(correct)
    return replace(record, figures={**record.figures, **means}, samples=packed, epochs=rows)


@pytest.fixture(scope="module")
def found() -> Results:
    rows = {
        name: [with_samples(count, seed) for seed, count in enumerate(counts)]
        for name, counts in {"ce": CE, "kd": KD, "hint": HINT}.items()
    }
    record = with_samples(390, 9)
    figures = {key: value for key, value in record.figures.items() if key not in {"test_kl", "test_agreement"}}
    fit = teacher()
    taught = replace(record, figures={**figures, **fit.nets["teacher"].figures})
    results = combine(header(), [replace(fit, nets={"teacher": taught})] * 3, rows, [12.0] * 3)
    return replace(results, classes=NAMES)


def images(places: Any) -> np.ndarray:
    return np.stack([np.full((1, 8, 8), float(place)) for place in places])


@pytest.fixture(scope="module")
def report(found: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with drawn():
        save_results(folder, found, images, ["python experiments/kd.py --seeds 3"])
    return folder / "report.html"


def test_it_is_one_file_that_asks_for_nothing(report: Path) -> None:
    text = report.read_text("utf-8")
    assert len(text.encode()) < LIMIT
    for found in re.findall(r"\b(?:src|href|_url)\s*[:=]\s*[\"'`]([^\"'`]*)", text):
        assert "//" not in found[:10], found[:100]
    assert not re.findall(r"url\(['\"]?https?:|@import|<link|<script src", text)


@pytest.mark.drawn
def test_two_reports_of_a_run_are_equal(report: Path, found: Results, tmp_path: Path) -> None:
    save_results(tmp_path, found, images, ["python experiments/kd.py --seeds 3"])
    assert (tmp_path / "report.html").read_bytes() == report.read_bytes()


@pytest.mark.slow
@pytest.mark.drawn
def test_a_page_of_the_whole_zoo_is_as_small(found: Results, tmp_path: Path) -> None:
    """28 nets, 5 seeds, 10 classes and 10,000 samples, with pictures as large as real ones."""
    generator = np.random.default_rng(0)
    truth = np.arange(10_000) % 10
    seeds = range(5)

    def entry() -> dict[str, Any]:
        predicted = [np.where(generator.random(10_000) < 0.9, truth, generator.integers(0, 10, 10_000)) for _ in seeds]
        right = [each == truth for each in predicted]
        epochs = [[{"train/loss": u, "val/acc": 1 - u} for u in generator.random(240).tolist()] for _ in seeds]
        kept = {
            "test_right": [samples.pack_bits(each) for each in right],
            "test_predicted": [samples.pack_classes(each) for each in predicted],
        }
        return {"scores": {"test_acc": [float(each.mean()) for each in right]}, "epochs": epochs, "samples": kept}

    names = ["ce", *(f"method{number}" for number in range(26))]
    students = {name: replace(found.students["kd"], **entry()) for name in names}
    teacher = replace(found.teacher, **entry(), sampled={"test_labels": samples.pack_classes(truth)})
    zoo = replace(found, seeds=[*seeds], students=students, teacher=teacher, classes=[*"0123456789"])

    def noise(places: Any) -> np.ndarray:
        return generator.random((len(places), 3, 32, 32))  # nothing compresses less

    save_results(tmp_path, zoo, noise, ["python experiments/kd.py"])
    assert (tmp_path / "report.html").stat().st_size < 10 * LIMIT
    with browser(tmp_path) as page:
        for width in WIDTHS:
            page.open(tmp_path / "report.html", width)
            assert page.evaluate(FAULTS) == []


def test_it_says_everything(report: Path) -> None:
    text = report.read_text("utf-8")
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for said in (
        "Differences", "Intervals", "All pairs", "Curves", "Accuracy against cost and size", "Fidelity and calibration",
        "Confusion",
        "The most confused test samples", "python experiments/kd.py --seeds 3", "Settings", "Versions", "Holm",
    ):  # fmt: skip
        assert said in shown, said
    pictures = re.findall('data:image/png;base64,([^"]*)', shown)
    assert len(pictures) == len({*pictures}) == 5  # a matrix for each net, the most confused images


def test_it_begins_with_question_and_answer(report: Path, found: Results) -> None:
    text = re.sub(r"<[^>]*>", "", report.read_text("utf-8").partition("<body>")[2])
    lead = text.partition("variant")[0]
    assert question.question(found) == "On Digits: is the test accuracy of kd or hint better than that of ce?"
    assert question.question(found) in lead
    (sentence,) = question.conclusions(found)
    assert text.count(unescape(sentence)) == lead.count(unescape(sentence)) == 1


def test_the_question_is_that_of_the_run(found: Results) -> None:
    alone = replace(found, students={"ce": found.students["ce"]})
    assert question.question(alone) == "On Digits: which test accuracy does ce reach?"
    assert "teacher 97.50" in question.lead_paragraph(alone)
    few = replace(found, config={**found.config, "data": {"init_args": {"labelled": 30}}})
    assert question.question(few).startswith("On Digits with labels of 30 of ")
    many = {f"m{number}": found.students["kd"] for number in range(9)}
    assert "of 9 students better than" in question.question(
        replace(found, students={"ce": found.students["ce"], **many})
    )


def test_in_a_browser_it_is_drawn_and_its_tables_sort(report: Path, tmp_path: Path) -> None:
    order = ["teacher", "ce", "kd", "hint"]
    means = {"teacher": 390, **{name: np.mean(counts) for name, counts in {"ce": CE, "kd": KD, "hint": HINT}.items()}}
    up, down = (sorted(order, key=means.__getitem__, reverse=reverse) for reverse in (False, True))
    names = "[...document.querySelector('tbody').rows].map(row => row.cells[0].textContent)"
    state = f"[{names}, ...[...document.querySelector('thead tr').cells].map(head => head.ariaSort)]"
    accuracy = "[...document.querySelectorAll('thead button')].find(head => head.textContent === 'test accuracy, %')"

    with browser(tmp_path) as page:
        for width in WIDTHS:
            page.open(report, width)
            assert page.evaluate(FAULTS) == []
            assert page.evaluate(names) == order
            assert page.evaluate("document.querySelectorAll('.plot').length") == 1 + 1 + 1 + 2 + 2
            assert page.evaluate("document.querySelectorAll('.plot > svg').length") == 6  # and a table of pairs
            # Name, score and difference are in view, without scrolling.
            cells = "[...document.querySelector('table').rows].map(row => row.cells[2])"
            assert page.evaluate(f"Math.max(...{cells}.map(cell => cell.getBoundingClientRect().right))") < width
            assert page.evaluate("document.querySelectorAll('.names').length") == 2  # validation and training
            assert page.evaluate("Math.min(...[...document.images].map(image => image.naturalWidth))") > 100
        page.evaluate(f"{accuracy}.click()")
        assert page.evaluate(names) == up
        page.evaluate(f"{accuracy}.click()")
        assert page.evaluate(names) == down
        page.open(report, WIDTHS[0])
        while page.evaluate("document.activeElement.closest('th')?.textContent") != "test accuracy, %":
            page.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.press("Enter")
        shown, *sorted_by = page.evaluate(state)
        assert shown == up
        assert [order for order in sorted_by if order] == ["ascending"]
        page.press("Enter")
        assert page.evaluate(names) == down
        page.press("Tab")
        page.press("Enter")
        assert [order for order in page.evaluate(state)[1:] if order] == ["ascending"]


def test_a_click_on_a_name_hides_its_line(report: Path, tmp_path: Path) -> None:
    chart = "document.querySelector('svg:has(.names)')"
    hidden = f"[...{chart}.querySelectorAll('[data-net]')].filter(part => getComputedStyle(part).display === 'none')"
    nets = f"[...new Set({hidden}.map(part => part.dataset.net))]"
    name = f"[...{chart}.querySelectorAll('.names [role]')].find(name => name.textContent.includes('kd'))"
    with browser(tmp_path) as page:
        page.open(report, WIDTHS[0])
        assert page.evaluate(nets) == []
        page.evaluate(f"{name}.dispatchEvent(new Event('click'))")
        assert page.evaluate(nets) == ["kd"]
        assert page.evaluate(f"{hidden}.length") == 1 + 3  # the line, and a marker an epoch
        assert float(page.evaluate(f"getComputedStyle({name}).opacity")) < 0.5
        page.evaluate(f"{name}.focus()")
        page.press("Enter")
        assert page.evaluate(nets) == []


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_it_is_read_in_light_and_in_dark(scheme: str, is_dark: bool, report: Path, tmp_path: Path) -> None:
    """Texts of the page and of its pictures differ from the paper by 150 of 255 and more."""
    shade = "color => color.match(/\\d+/g).slice(0, 3).reduce((sum, x) => sum + x / 3, 0)"
    paper = f"({shade})(getComputedStyle(document.body).backgroundColor)"
    texts = "[...document.querySelectorAll('p, td:not([style*=background]), th, svg text')]"
    inks = f"{texts}.map(e => ({shade})(getComputedStyle(e)[e.tagName === 'text' ? 'fill' : 'color']))"
    with browser(tmp_path) as page:
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.open(report, WIDTHS[0])
        assert (page.evaluate(paper) < 50) == is_dark
        assert page.evaluate(f"Math.min(...{inks}.map(ink => Math.abs(ink - {paper})))") > 150


def titles(svg: str) -> list[str]:
    """What the mouse is told over an SVG's marks."""
    return [unescape(title) for title in re.findall("<title>(.*?)</title>", svg, re.DOTALL)]


def test_differences_have_the_interval_alone_and_the_corrected_one(found: Results) -> None:
    with drawn():
        (plot,) = plots.differences(found)
    compared = [*differences.baseline_differences(found)]
    assert [row.name for row in compared] == ["kd", "hint"]
    assert {*titles(plot)} == {
        f"{row.name}\nΔ alone {ACCURACY.difference(row.single)}\nΔ corrected {ACCURACY.difference(row.corrected)}"
        for row in compared
        if row.corrected
    }
    assert plots.differences(made_up(1)) == []


def test_every_net_has_its_values_under_the_mouse(found: Results) -> None:
    with drawn():
        (intervals,), (against,) = plots.intervals(found), plots.against(found, PARAMETERS)
        (curve,) = curves.curves(found, "val/acc", "validation accuracy, %", 100)
    for name, net in found.students.items():
        mean = f"{100 * np.mean([score or 0.0 for score in net.scores['test_acc']]):.3f}"
        assert any(title.startswith(f"{name}\nmean {mean}\n95 % interval ") for title in titles(intervals))
        assert f"{name}\nparameters: 2.677e+05\ntest accuracy, %: {mean}" in titles(against)
        assert [title for title in titles(curve) if title.startswith(f"{name}\n")] == [
            f"{name}\nepoch {epoch}: {value}" for epoch, value in ((3, 70), (2, 60), (1, 50))
        ]
    assert "teacher 97.500" in titles(intervals)


def test_all_pairs_are_corrected_together(found: Results) -> None:
    values = {name: np.array(net.scores["test_acc"]) for name, net in found.students.items()}
    names = list(itertools.combinations(values, 2))
    expected = holm({(a, b): p_value((values[a] - values[b]).tolist()) for a, b in names})
    compared = compare_pairs(found)
    assert [(pair.one, pair.other) for pair in compared] == names
    for pair in compared:
        assert pair.p == pytest.approx(expected[pair.one, pair.other])
        assert pair.difference == pytest.approx(float((values[pair.one] - values[pair.other]).mean()))
    assert pairs(made_up(1)) == []


def test_a_pair_with_the_same_difference_on_every_seed_has_no_colour() -> None:
    rows = {"ce": (300, 310, 320), "kd": (320, 330, 340), "hint": (200, 211, 220)}
    three = made_up(3, **{name: [student(count) for count in counts] for name, counts in rows.items()})
    p = {(pair.one, pair.other): pair.p for pair in compare_pairs(three)}
    assert p["ce", "kd"] is None
    smallest = p_value([120 / TEST, 119 / TEST, 120 / TEST])
    assert p["kd", "hint"] == pytest.approx(3 * smallest)  # of three pairs, not of two
    (table,) = pairs(three)
    cells = {title.partition("\n")[0]: rest for title, rest in re.findall('<td title="([^"]*)"([^>]*)>', table)}
    assert cells["ce to kd"] == ""
    assert "background" in cells["hint to ce"]
    assert "p, Holm: none, as it was the same on each seed" in table


def test_curves_are_means_over_seeds_that_have_the_epoch() -> None:
    epochs = [[{"val/acc": 0.5}, {"val/acc": 0.7}], None, [{"val/acc": 0.7}, {"val/acc": None}], [{}, {}]]
    assert curves.mean_curve(epochs, "val/acc") == [(1, pytest.approx(0.6)), (2, 0.7)]
    assert curves.curves(made_up(), "val/acc", "accuracy") == []


def test_confusions_count_every_sample(found: Results) -> None:
    shares = mistakes.confusions(found)
    assert list(shares) == ["teacher", "ce", "kd", "hint"]
    for name, counts in {"ce": CE, "kd": KD, "hint": HINT}.items():
        assert shares[name].sum(1) == pytest.approx(np.ones(CLASSES))
        assert shares[name].trace() / CLASSES == pytest.approx(np.mean(counts) / TEST)
    assert mistakes.class_names(found) == NAMES
    assert mistakes.class_names(replace(found, classes=[])) == ["0", "1", "2", "3"]
    truth, taken, share = mistakes.frequent(found)[0]
    assert taken == (truth + 1) % CLASSES
    others = np.mean([shares[name] for name in ("ce", "kd", "hint")], axis=0) - 2 * np.eye(CLASSES)
    assert share == pytest.approx(others.max())
    unseen = replace(found, classes=[*NAMES, "in training alone"])
    assert mistakes.confusions(unseen)["ce"].shape == (CLASSES + 1, CLASSES + 1)
    assert len(mistakes.matrices(unseen)) == len(found.nets)


def test_the_most_confused_are_wrong_most_often(found: Results) -> None:
    truth = samples.labels(found)
    nets = [net for student in found.students.values() for net in mistakes.predictions(student, TEST)]
    wrong = np.mean([net != truth for net in nets], axis=0)
    shown = mistakes.list_most_confused(found)
    assert [share for *_, share in shown] == pytest.approx(np.sort(wrong)[::-1][: len(shown)])
    for row, label, taken, share in shown:
        assert (label, taken) == (truth[row], (truth[row] + 1) % CLASSES)
        assert share == wrong[row]


def test_calibration_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    confidence, right = rng.uniform(0.05, 1, 500), rng.integers(0, 2, 500).astype(float)
    expected = 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    assert calibration_error(confidence, right) == pytest.approx(expected)


def test_fidelity_is_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    student, taught = (torch.randn(6, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, 4, (6, 5), generator=generator)
    labels[0, 2:] = -100
    p, q = taught.softmax(-1), student.softmax(-1)
    kl, same = (p * (p / q).log()).sum(-1), (p.argmax(-1) == q.argmax(-1)).double()
    one = fidelity(student[:, 0], taught[:, 0], labels[:, 0])
    assert torch.allclose(one["kl"], kl[:, 0])
    assert torch.equal(one["agreement"], same[:, 0])
    texts = fidelity(student, taught, labels)
    for name, values in (("kl", kl), ("agreement", same)):
        expected = torch.cat([values[:1, :2].mean(1), values[1:].mean(1)])
        assert torch.allclose(texts[name], expected)


def test_a_sample_has_its_prediction() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    values = ClassScores(2).of_sample(logits, torch.tensor([0, 0]))
    assert [values[name].tolist() for name in ("right", "predicted", "label")] == [[True, False], [0, 1], [0, 0]]
    assert values["confidence"].tolist() == pytest.approx([0.880797, 0.731059])


def test_what_looks_like_html_is_text() -> None:
    named = '<script>alert(1)</script> & "a"'
    page = html.page(f"# {named}\n\n- {named}\n\n{Table(['a'], [[named]]).markdown()}\n", {})
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 4  # title, heading, line and cell


def test_any_report_has_a_page(tmp_path: Path) -> None:
    picture = mistakes.picture(np.zeros((1, 3, 4, 4)), ["none"])
    parts = [Table(["a", "b"], [["x", "1"]]), "![lines](lines.png)", "![gone](gone.png)"]
    made = Report({"Data": "Digits"}, parts, parts, {"lines.png": picture})
    made.save(tmp_path, "hardware", ["python experiments/hardware.py --quick true"])
    text = (tmp_path / "report.html").read_text()
    assert re.search(r"<td[^>]*>x</td>", text)
    assert "data:image/png;base64," in text
    assert "gone.png" not in text
    assert "python experiments/hardware.py --quick true" in text.partition("The command that repeats it")[2]


@pytest.mark.drawn
def test_a_picture_of_samples_shows_images_and_titles() -> None:
    image = np.random.default_rng(0).random((1, 1, 4, 4))
    drawn = mistakes.picture(image, ["a"])
    assert drawn != mistakes.picture(1 - image, ["a"])
    assert drawn != mistakes.picture(image, ["b"])


@pytest.mark.drawn
def test_results_without_samples_have_a_page_without_what_they_lack() -> None:
    failed = [student(0, failed=FAILED)] * 3
    assert [section.title for section in page.sections(made_up(ce=failed))] == [
        "Accuracy against cost and size", "What was run",
    ]  # fmt: skip
    titles = [section.title for section in page.sections(made_up())]
    assert titles == [
        "Differences", "Intervals", "All pairs", "Accuracy against cost and size", "What was run",
    ]  # fmt: skip
    assert ACCURACY.columns["test_acc"] in markdown(made_up())
