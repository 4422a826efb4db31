"""The site's files and its navigation, for mkdocs.yml.

A file has the place that it has in the repository, so that a link leads to the same file here and on GitHub.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "lit_modules",
    "lit_modules.objectives",
    "lit_modules.nets",
    "datamodules",
    "strategies",
    "lab.strategies",
    "apprentice",
)


def on_config(config: MkDocsConfig) -> None:
    """Group and order the pages as docs/README.md does; the strict build names a page that is in no table there."""
    text = (ROOT / "docs" / "README.md").read_text("utf-8")
    groups = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        pages = re.findall(r"^\| \[.*?\]\((.*?)\)", section, re.MULTILINE)
        groups.append({section.split("\n", 1)[0]: [f"docs/{page}" for page in pages]})
    config.nav = [
        {"Home": "README.md"},
        {"Documentation": ["docs/README.md", *groups]},
        {"API": [{package: f"api/{package}.md"} for package in PACKAGES]},
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Put the repository's files in place of mkdocs' own choice, to which docs/ is the top, and add the API."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted(set(shown())):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{package}.md", content=api(package)))


def shown() -> Iterator[Path]:
    """The pages, the files that they link to or show, and the site's style."""
    yield ROOT / "docs" / "site.css"
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        yield page
        targets = re.findall(r"\]\(([^)#:]+)", page.read_text("utf-8"))
        yield from filter(Path.is_file, ((page.parent / target).resolve() for target in targets))


def api(package: str) -> str:
    """The page of a package: what its `__init__` imports and defines, or its modules where that is nothing."""
    folder = ROOT.joinpath(*package.split("."))
    names: list[str] = []
    body = ast.parse((folder / "__init__.py").read_text("utf-8")).body
    for_type_checkers = [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    for node in [*body, *for_type_checkers]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            names.append(node.name)
    names = names or sorted(path.stem for path in folder.glob("[!_]*.py"))
    return f"# {package}\n\n::: {package}\n    options:\n      members: [{', '.join(names)}]\n"
