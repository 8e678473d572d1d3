"""The documentation is run: code, commands, names, numbers and links are what the package has."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import bisls
from bisls.console import SWEPT, TASKS
from bisls.data import DATASETS
from bisls.experiments import BACKENDS, NAMES, READINGS, SCALES
from bisls_cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = {"bisls", "make", "python", "torchrun", "pip"}  # the programs that the pages may show


def fenced(page, language):
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (page.name == "own_problem.md")) for page in PAGES],
    ids=[page.name for page in PAGES],
)
def test_the_code_on_the_page_runs(page, tmp_path, monkeypatch):
    """Every Python block, in order, as one script."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for block in fenced(page, "python"):
        exec(compile(block, str(page), "exec", dont_inherit=True), names)
    assert names.get("works", True)  # bfloat16, where the page tries it: the tests have seen to that


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_the_first_example_prints_what_the_page_says(page, capsys):
    (told,) = re.findall(r"It prints (\d\.\d\d) and (\d\.\d\d):", page.read_text())
    names: dict = {"__name__": "__main__"}
    for block in fenced(page, "python")[: 1 + (page.name == "index.md")]:
        exec(compile(block, str(page), "exec", dont_inherit=True), names)
    (printed,) = re.findall(r"^(\d\.\d\d) (\d\.\d\d)$", capsys.readouterr().out, re.MULTILINE)
    # one in the last digit, as CPUs round differently
    assert all(abs(float(a) - float(b)) < 0.011 for a, b in zip(told, printed, strict=True)), (told, printed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_escapes(page):
    """A fence that is indented, or has another language, would not be looked at."""
    text = page.read_text()
    assert {name for name, _ in FENCE.findall(text)} <= {"python", "bash", "text"}  # text: output, not run
    assert not re.search("```|~~~", FENCE.sub("", text))


def test_there_is_code_to_run():
    written_by_hand = ("index", "own_problem", "methods", "record", "optimisers", "data")
    assert all(fenced(DOCS / f"{name}.md", "python") for name in written_by_hand)


# --- commands


def commands(page):
    """What a page shows to be typed: bash blocks, indented lines and inline code that begin with a program."""
    text = page.read_text()
    lines = [line for body in fenced(page, "bash") for line in body.splitlines()]
    rest = FENCE.sub("", text)
    lines += re.findall(r"^ {4,}(.*)$", rest, re.MULTILINE) + re.findall(r"`([^`\n]+)`", rest)
    for line in lines:
        for part in line.split("&&"):
            if "..." in part or part.strip() in RUN:
                continue
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a formula
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and words[0].removeprefix(".venv/bin/") in RUN:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def everything_shown():
    return sorted({(page.name, tuple(words)) for page in PAGES for words in commands(page)})


@pytest.mark.parametrize(
    ("page", "words"), everything_shown(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_the_commands_on_the_page_exist(page, words):
    program, *rest = words
    CHECKS[program](rest)


def of_bisls(words):
    group = typer.main.get_command(app)
    name, *rest = words
    if name.startswith("-"):
        assert any(name in option.opts for option in group.params), words
        return
    assert name in group.commands, words
    if not rest and any(option.required for option in group.commands[name].params):
        return  # the command is mentioned, not shown
    context = group.commands[name].make_context(name, list(rest))  # raises where an option is not known
    given = context.params
    known = {
        "reproduce": {"figures": NAMES, "scale": SCALES, "reading": READINGS, "backend": BACKENDS},
        "sensitivity": {"task": TASKS, "method": SWEPT},
        "data": {"names": DATASETS},
        "bench": {"name": [path.stem for path in (ROOT / "benchmarks").glob("*.py")]},
    }
    for argument, values in known.get(name, {}).items():
        for value in [given[argument]] if isinstance(given[argument], str) else given[argument] or ():
            assert not value or value in values, (words, value)


def of_make(words):
    (line,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {word for word in words if "=" not in word}  # NAME=value sets a variable
    assert targets <= set(line.split()), words


def of_a_script(words):
    (at,) = [i for i, word in enumerate(words) if word.endswith(".py")]
    source = (ROOT / words[at]).read_text()
    for option in words[at + 1 :]:
        assert not option.startswith("--") or f'"{option}"' in source, (words, option)


def of_pip(words):
    assert words[0] == "install", words
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        for names in re.findall(r"^(?:bisls|\.)\[(.*)\]$", word):
            assert set(names.split(",")) <= set(extras), word


CHECKS = {"bisls": of_bisls, "make": of_make, "python": of_a_script, "torchrun": of_a_script, "pip": of_pip}


def test_bash_blocks_hold_nothing_else():
    for page in PAGES:
        for body in fenced(page, "bash"):
            for line in body.splitlines():
                words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
                assert not words or words[0].removeprefix(".venv/bin/") in RUN, (page.name, line)


# --- names


def table(page, heading):
    """The cells of the rows of all tables below a heading."""
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `|") for cell in row] for row in rows]


def test_the_page_on_records_has_every_field():
    shown = [row[0] for row in table(DOCS / "record.md", "Every field")]
    wanted = {field.name for kind in (bisls.Record, bisls.Cost) for field in fields(kind)}
    assert wanted == set(shown) - {"field", "column", "---", "---|---", "---|---|---"}


def test_the_page_on_records_has_every_status():
    rows = {row[0]: row[1] for row in table(DOCS / "record.md", "Every status")[2:]}
    assert rows == {status.name: "yes" if status.failed else "no" for status in bisls.Status}


@pytest.mark.parametrize("module", ["bisls", "bisls.optim", "bisls.tasks", "bisls.data", "bisls.sklearn"])
def test_the_reference_has_every_public_name(module):
    source = ROOT / "src" / module.replace(".", "/") / ("_names.py" if module == "bisls" else "__init__.py")
    names = {
        alias.asname
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and not alias.name.startswith("_")
    }
    reference = (DOCS / "reference.md").read_text()
    told = set(re.findall(r"^::: (\S+)$", reference, re.MULTILINE)) | set(
        re.findall(r"heading: (\S+)$", reference, re.MULTILINE)
    )
    modules = {"optim", "tasks"}
    assert {f"{module}.{name}" for name in names - modules} <= told


# --- numbers and links


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_nothing_is_left_to_be_filled_in(page):
    assert re.findall(r"^\s*[A-Z]+(?:_[A-Z]+)+\s*$", FENCE.sub("", page.read_text()), re.MULTILINE) == []


def test_numbers_on_the_first_page_are_those_of_the_page_that_is_linked():
    text = (DOCS / "index.md").read_text().split("## Why this one")[1].split("\n## ")[0]
    found = 0
    for bullet in re.split(r"^- ", text, flags=re.MULTILINE)[1:]:
        numbers = re.findall(r"\*\*([\d. of]+)\*\*", bullet)
        linked = "".join((DOCS / name).read_text() for name in re.findall(r"\]\((\w+\.md)", bullet))
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", linked), number
        found += len(numbers)
    assert found >= 5


@pytest.mark.parametrize("page", PAGES[:3], ids=lambda page: page.name)
def test_files_that_are_linked_exist(page):
    """Links between the pages of the site are mkdocs' to check."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (ROOT / target).exists(), target


def build(folder, out):
    """The site as `make docs` builds it: any warning, such as a link or an anchor that leads nowhere, is an error.

    Not with --quiet, under which mkdocs counts no warnings.
    """
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_a_link_that_leads_nowhere_and_a_page_that_nobody_lists_fail_the_build(tmp_path):
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    with (tmp_path / "docs" / "theory.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md) and [no heading](data.md#none)\n")
    (tmp_path / "docs" / "unlisted.md").write_text("# Unlisted\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    said = [part for part in re.split("^(?=[A-Z]+ +-)", done.stderr, flags=re.MULTILINE) if part.startswith("WARNING")]
    for words in ("'nowhere.md'", "'#none'", "unlisted.md"):
        assert any(words in warning for warning in said), done.stderr


@pytest.mark.slow
def test_the_site_asks_no_other_host(site):
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(\s*[\"']?(?:https?:)?//|@import", style.read_text()), style


@pytest.mark.slow
def test_the_site_can_be_searched_and_has_every_name(site):
    assert "check_hypergradient" in (site / "search" / "search_index.json").read_text()
    reference = (site / "reference" / "index.html").read_text()
    assert 'id="bisls.Bilevel"' in reference
    assert 'id="bisls.fit.Progress"' not in reference  # the function, not the module of the same name
