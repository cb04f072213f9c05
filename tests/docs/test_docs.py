"""The pages of the site: their code runs, their manifests parse, what they quote is there."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pages
import pytest

import het_tf
from het_tf.distribute.cluster.tf_config import read_tf_config

HOOKS = runpy.run_path(str(pages.DOCS / "hooks.py"))


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, str]:
    """What the code of each page raised."""
    env = os.environ | {"PYTHONPATH": str(pages.ROOT)}
    ended = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("run_pages.py")],
        cwd=tmp_path_factory.mktemp("pages"),  # pages write files
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", pages.NAMES)
def test_code_of_page_runs(errors, name):
    assert errors[name] == ""


def test_files_that_are_named_are_there():
    files = [*pages.DOCS.glob("*.md"), *pages.ROOT.glob("*.md")]
    named = {
        (file.name, file.parent / target)
        for file in files
        for target in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", file.read_text())
    }
    assert len(named) > 20
    assert [(name, target) for name, target in named if not target.exists()] == []


def _named_tests(page: str) -> set[tuple[str, str]]:
    """(file, test) of what a page names as `file.py`: `test_name`, ..."""
    cells = re.findall(r"`(test_\w+\.py)`: ((?:`test_\w+`(?:, )?)+)", page)
    named = {(file, test) for file, tests in cells for test in re.findall(r"`(\w+)`", tests)}
    assert len(named) == page.count("`test_") - len(cells)
    return named


def _test_files() -> dict[str, str]:
    return {path.name: path.read_text() for path in (pages.ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("name", ["traps.md", "guarantees.md", "checkpoints.md"])
def test_tests_that_are_named_are_there(name):
    named, files = _named_tests((pages.DOCS / name).read_text()), _test_files()
    assert len(named) > 25
    assert [(f, test) for f, test in named if f"\ndef {test}(" not in files[f]] == []


def test_no_guarantee_is_shown_only_in_what_is_exhaustive():
    exhaustive = re.compile(r"^@pytest.mark.exhaustive\n(?:@.*\n)*def (\w+)", re.MULTILINE)
    only = {(f, test) for f, text in _test_files().items() for test in exhaustive.findall(text)}
    assert len(only) > 100
    assert _named_tests((pages.DOCS / "guarantees.md").read_text()) & only == set()


def test_attempts_are_numbered():
    assert re.findall(r"^\| (\d+) \|", _traps(), re.MULTILINE) == [str(i) for i in range(1, 14)]


def _traps() -> str:
    return (pages.DOCS / "traps.md").read_text()


def test_all_pages_are_in_the_navigation():
    # Lines of the file: it has tags that only mkdocs knows.
    nav = re.findall(r"^ +- .*: (\S+\.md)$", (pages.ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(nav) == sorted(pages.NAMES)


def test_pictures_are_drawn_by_their_script(tmp_path):
    script = pages.DOCS / "pictures.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    text = "".join((pages.DOCS / name).read_text() for name in ("concepts.md", "planned_input.md"))
    assert drawn == sorted(re.findall(r"!\[.*\]\((.*)\)", text))
    assert all((tmp_path / name).read_text().startswith("<?xml") for name in drawn)


# Errors.


def _texts_of_python(path: pathlib.Path) -> str:
    """The string literals of a file, each in one piece, with … for what is put in."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (x.value if isinstance(x, ast.Constant) else "…" for x in node.values)
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(re.sub(r"%[-+.\d]*[a-z]", "…", node.value))
    return "\n".join(texts)


def _texts_of_cpp(path: pathlib.Path) -> str:
    """The string literals of a file, in one piece where nothing but a comma is between them."""
    code = re.sub(r'",?\s*\n\s*"', "", path.read_text())
    return "\n".join(re.findall(r'"((?:[^"\\]|\\.)*)"', code))


def _parts(message: str) -> list[str]:
    return [part.strip() for part in message.split("…") if part.strip()]


# Messages that are TensorFlow's own.
OF_TENSORFLOW = {"Op type not registered 'Het>…'"}


def test_errors_that_are_quoted_are_raised():
    texts = [_texts_of_python(path) for path in (pages.ROOT / "het_tf").rglob("*.py")]
    texts += [_texts_of_cpp(p) for p in (pages.ROOT / "ops").rglob("*.cc") if "_test" not in p.name]
    page = (pages.DOCS / "errors.md").read_text()
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) == page.count("\n### ") > 20
    quoted = set(quoted) - OF_TENSORFLOW
    # By their parts: a message may be made of several literals, but all are in one file.
    missing = [m for m in quoted if not any(all(p in t for p in _parts(m)) for t in texts)]
    assert missing == []


# Parameters.


def test_parameters_by_use_are_those_that_there_are():
    page = (pages.DOCS / "parameters.md").read_text()
    listed = {
        title: set(re.findall(r"`(\w+)`", " ".join(row.split("|")[2] for row in table)))
        for title, table in (
            (part.split("\n", 1)[0], [row for row in part.splitlines() if row.startswith("|")][2:])
            for part in page.split("\n## ")[1:]
        )
    }
    strategy = het_tf.distribute.HetParameterServerStrategy
    positions = {"first", "second", "kwargs", "self"}  # HetEmbedding's two dimensions
    for title, function in (
        ("HetEmbedding", het_tf.layers.HetEmbedding.__init__),
        ("CacheConfig", het_tf.CacheConfig.__init__),
        ("HetParameterServerStrategy", strategy.__init__),
        ("Model.fit", het_tf.keras.Model.fit),
    ):
        assert listed.pop(title) == set(inspect.signature(function).parameters) - positions
    assert not listed


# Clusters.


def test_json_of_tf_config_is_read():
    ((_, text),) = pages.blocks("clusters.md", "json")
    assert read_tf_config(text).address == "worker1.example:2222"


# Hooks.


def test_links_to_sources_become_text():
    page = "see [the cache](../ops/core/cache/cache.h) and [Start](index.md)"
    assert HOOKS["on_page_markdown"](page) == "see the cache and [Start](index.md)"


def test_what_needs_a_network_or_became_bold_is_warned_of(caplog):
    class Page:
        class file:
            src_path = "x.md"

    HOOKS["on_post_page"]('<a href="https://x.org"><script src="a.js"></script>', Page)
    assert caplog.messages == []
    HOOKS["on_post_page"]('<link rel="stylesheet" href="https://x.org/a.css">', Page)
    assert len(caplog.messages) == 1
    HOOKS["on_post_page"]("<p>from 1 to 2<strong>31 - 1, or to 2</strong>63</p>", Page)
    assert "2<strong>31 - 1, or to 2" in caplog.messages[1]


@pytest.mark.exhaustive
def test_a_warning_fails_the_build(tmp_path):
    """With mkdocs's --quiet nothing would: `strict` counts what is logged.

    Of two pages, neither of which has docstrings to be read: `make docs` builds all.
    """
    recipe = re.search(r"^docs:.*\n\t(.*)$", (pages.ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    config = (pages.ROOT / "mkdocs.yml").read_text()
    pages_of_nav = re.compile(r"^nav:\n(?:[ #].*\n|\n)+", re.MULTILINE)
    config, shortened = pages_of_nav.subn("nav:\n  - a: index.md\n  - b: other.md\n", config)
    assert shortened == 1
    (tmp_path / "mkdocs.yml").write_text(config)
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(pages.DOCS / "hooks.py", docs)
    for name in ("index.md", "other.md"):
        (docs / name).write_text("# A page\n")

    def build() -> subprocess.CompletedProcess:
        command = recipe.replace("$(BIN)/python", sys.executable)
        return subprocess.run(
            command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    ended = build()
    assert ended.returncode == 0, ended.stderr
    with (docs / "other.md").open("a") as page:
        page.write("[a page](that_is_not_there.md)")
    ended = build()
    assert ended.returncode != 0
    assert "that_is_not_there.md" in ended.stderr
