"""Links of pages and notebooks lead somewhere, and the site of mkdocs.yml is built without a warning."""

import html
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlsplit

import markdown
import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
NOTEBOOKS = list(ROOT.glob("notebooks/*.ipynb"))
EXPORTING = ("lit_modules.objectives", "lit_modules.nets", "datamodules", "strategies")  # from their __init__


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def rendered(path: Path) -> str:
    """A page, or a notebook's Markdown cells, as HTML by CommonMark's rules and with tables, as GitHub has it."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return MarkdownIt().enable("table").render(text)


def words(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", page)).split())


def anchors(page: Path) -> set[str]:
    """GitHub's names of a page's headings."""
    headings = re.findall(r"<h\d>(.*?)</h\d>", rendered(page), re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", words(heading).lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(link: str, page: Path, root: Path) -> bool:
    """To a file of the repository, and a heading in it; a folder is no page. Elsewhere, an address has to be whole."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return parts.scheme in {"http", "https"} and "." in parts.netloc
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file() or not target.is_relative_to(root):
        return False
    return not parts.fragment or (target.suffix == ".md" and unquote(parts.fragment) in anchors(target))


def links(page: Path) -> list[str]:
    return [html.unescape(link) for link in re.findall(r'(?:href|src)="([^"]*)"', rendered(page))]


def broken(page: Path, root: Path = ROOT) -> list[str]:
    return [link for link in links(page) if not leads_somewhere(link, page, root)]


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.md").touch()
    (root / "data.csv").touch()
    (root / "other.md").write_text("# A `--flag N`: two_words, and more\n")
    good = ["other.md", "other.md#a---flag-n-two_words-and-more", "#here", "data.csv", "https://example.com/a#b"]
    bad = ["gone.md", "other.md#gone", "#gone", "data.csv#1", ".", "../outside.md", "/root"]
    bad += ["https:/example.com", "htp://example.com"]
    text = "# Here\n\n" + "\n".join(f"[a]({link}) ![a]({link})" for link in [*good, *bad]) + "\n\n`[a](code.md)`\n"
    (root / "page.md").write_text(text)
    cells = [{"cell_type": "code", "source": "[a](code.md)"}, {"cell_type": "markdown", "source": ["[a]", "(gone.md)"]}]
    (root / "notebook.ipynb").write_text(json.dumps({"cells": cells}))
    assert broken(root / "page.md", root) == [link for link in bad for _ in range(2)]
    assert broken(root / "notebook.ipynb", root) == ["gone.md"]


ROW = re.compile(r"^\| \[.*?\]\((.*?)\)", re.MULTILINE)  # of the tables of pages


def test_every_page_is_in_one_group_of_the_list_of_pages() -> None:
    """The site's navigation is made from it."""
    docs = ROOT / "docs"
    listed = ROW.findall((docs / "README.md").read_text())
    assert sorted([*listed, "README.md"]) == sorted(page.relative_to(docs).as_posix() for page in docs.rglob("*.md"))


def test_each_group_of_pages_says_where_to_begin() -> None:
    _, *groups = (ROOT / "docs" / "README.md").read_text().split("\n## ")
    assert len(groups) == 8
    for group in groups:
        first = re.search(r"\n\nBegin with \[.*?\]\((.*?)\)", group)
        assert first, group
        assert first[1] in ROW.findall(group)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=name)
def test_a_long_page_says_what_it_answers_and_what_to_read_next(page: Path) -> None:
    text = page.read_text()
    if text.count("\n") > 150:
        paragraphs = text.split("\n\n")
        assert paragraphs[1].startswith("This page answers: ")
        assert paragraphs[-1].startswith("Next: [")


@pytest.mark.parametrize("page", [page for page in PAGES if page.suffix == ".md"], ids=name)
def test_lines_end_at_120_characters(page: Path) -> None:
    """But for tables, commands and what can't be broken: code and links."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "![", "    "))]
    assert [line for line in lines if len(re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)) > 120] == []


def public_names() -> dict[str, list[str]]:
    """The names in the table of docs/public-api.md, by module."""
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", (ROOT / "docs" / "public-api.md").read_text(), re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def test_public_names_are_there() -> None:
    names = public_names()
    assert "Distillation" in names["lit_modules.distillation"]
    for module, listed in names.items():
        assert [name for name in listed if not hasattr(importlib.import_module(module), name)] == [], module


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pages_import_public_modules(page: Path) -> None:
    imported = re.findall(
        r"^from ((?:apprentice|lit_modules|datamodules|strategies)[\w.]*) import", page.read_text(), re.MULTILINE
    )
    assert {*imported} <= public_names().keys()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_site_reads_a_page_as_github_does(page: Path) -> None:
    """To Python-Markdown a list needs an empty line before it, and 4 spaces for each level."""
    here = markdown.markdown(page.read_text("utf-8"), extensions=["tables", "fenced_code"])
    assert Counter(re.findall(r"<\w+", here)) == Counter(re.findall(r"<\w+", rendered(page)))


@pytest.mark.slow
@pytest.mark.extras("mkdocs", "material", "mkdocstrings")
def test_the_site(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr

    searched = {entry["location"] for entry in json.loads((tmp_path / "search/search_index.json").read_text())["docs"]}
    for page in PAGES:
        place = page.relative_to(ROOT).with_name("index.html" if page.name == "README.md" else f"{page.stem}.html")
        assert (tmp_path / place).is_file()
        assert str(place) in searched

    for package in EXPORTING:
        markup = (tmp_path / "api" / f"{package}.html").read_text()
        text = words(markup)
        module = importlib.import_module(package)
        public = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module)) if name[0] != "_"}
        for name, thing in public.items():
            if (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__.startswith(package):
                assert f'id="{package}.{name}"' in markup, name
                assert words(MarkdownIt().render(inspect.getdoc(thing).splitlines()[0])) in text, name
    for package in ("lit_modules", "apprentice"):
        ids = set(re.findall(r'id="([\w.]+)"', (tmp_path / "api" / f"{package}.html").read_text()))
        assert {f"{package}.{path.stem}" for path in (ROOT / package).glob("[!_]*.py")} <= ids

    for file in (path for path in tmp_path.rglob("*") if path.suffix in {".html", ".json", ".js", ".css", ".xml"}):
        text = file.read_text("utf-8")
        assert str(ROOT) not in text, file
        assert re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="?(?:https?:)?//[^>]*', text) == [], file
