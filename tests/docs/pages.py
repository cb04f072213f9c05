"""The pages of the site, and what is in them."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
START = "index.md"  # what its blocks define, those of all other pages have
_PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
NAMES = [START, *(name for name in _PAGES if name != START)]


def blocks(name: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language in a page: the line before the first, and the text."""
    text = (DOCS / name).read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, each.start(1)), each[1]) for each in found]
