"""Hooks of mkdocs: the site has no sources to link to, and needs no network to be read."""

from __future__ import annotations

import logging
import re
from typing import Any

_log = logging.getLogger("mkdocs.hooks")  # where strict looks for warnings

# Links out of docs/, which work in a checkout. tests/docs looks whether what they name is there.
OUTSIDE = re.compile(r"\[([^\]]*)\]\((\.\./[^)]*)\)")

# Two powers in a paragraph, which Markdown takes for bold text: 2**31 and 2**63.
_BOLD_POWER = re.compile(r"\d<(?:strong|em)>[^<]*")

_FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Links to the sources become their text."""
    return OUTSIDE.sub(r"\1", markdown)


def on_post_page(output: str, page: Any, **kwargs: Any) -> str:
    """Warns of what a browser would fetch from elsewhere, and of numbers that became bold text."""
    for text in _BOLD_POWER.findall(output):
        _log.warning("%s has a power without backticks: %s", page.file.src_path, text)
    for tag in _FETCHED.findall(output):
        _log.warning("%s needs a network to be read: %s", page.file.src_path, tag)
    return output
