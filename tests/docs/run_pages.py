"""Runs the python blocks of the pages and prints what they raised as JSON. Run by test_docs.py.

One process and one cluster, the one that the start page makes, run them all. What the start page
defines, every other page has; what another page defines, it has alone. Epochs have 8 steps.
"""

from __future__ import annotations

import gc
import json
import linecache
import re
import sys
import time
import traceback
from typing import Any

import pages


def run(name: str, namespace: dict[str, Any]) -> str:
    """Runs the blocks of a page in order; what the first one that failed raised, or nothing."""
    for line, code in pages.blocks(name, "python"):
        code = re.sub(r"steps_per_epoch=\d+", "steps_per_epoch=8", code)
        # Tracebacks and TensorFlow's AutoGraph read the source by the name of its file.
        file = f"{name} from line {line + 1}"
        linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
        try:
            exec(compile(code, file, "exec"), namespace)
        except Exception:
            return traceback.format_exc()
    return ""


def main() -> None:
    gc.set_threshold(10_000)  # as tests/conftest.py does
    start: dict[str, Any] = {"__name__": "__main__"}
    out = {}
    for name in pages.NAMES:
        began = time.monotonic()
        namespace = start if name == pages.START else dict(start)
        out[name] = run(name, namespace)
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    start["cluster"].close()
    print(json.dumps(out))


if __name__ == "__main__":
    main()
