"""The table and the picture of a comparison."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen
import matplotlib.pyplot as plt
from netns.runs import ALONE, TF_KERAS, Figures

_COLUMNS = (
    "",
    "ms/step",
    "examples/s",
    "x tf_keras",
    "sent kB",
    "got kB",
    "embeddings",
    "dense",
    "rest",
    "messages",
    "compute",
    "in messages",
    "waiting",
    "servers' CPU ms",
    "AUC",
    "s to AUC",
)
_KINDS = ("embeddings", "dense", "dense + rest", "embeddings + rest", "rest")


def cases(rows: Sequence[Figures]) -> list[tuple[str, list[Figures]]]:
    """Rows by workers, servers and rate, with a title; what trains alone is in every case."""
    result = []
    keys = [_case(row) for row in rows if row.setting.variant != ALONE]
    for key in dict.fromkeys(keys or [_case(row) for row in rows]):
        workers, servers, rate = key
        of_case = [
            row
            for row in rows
            if _case(row) == key
            or (row.setting.variant == ALONE and row.setting.workers == workers)
        ]
        limit = f"{rate} a host" if rate else "no limit of the network"
        title = f"{workers} workers, {servers} servers, {limit}" if servers else f"{workers} alone"
        result.append((title, of_case))
    return result


def target_auc(rows: Sequence[Figures]) -> float:
    """The AUC that all rows of a case reach, rounded down to 0.001."""
    return math.floor(1000 * min(max(row.auc) for row in rows)) / 1000


def markdown(rows: Sequence[Figures], target: float | None) -> str:
    """A table for each case.

    Args:
      rows: of any cases.
      target: the AUC of "s to AUC"; None: that of `target_auc`.
    """
    parts = []
    for title, of_case in cases(rows):
        auc = target_auc(of_case) if target is None else target
        lines = [[*_COLUMNS[:-1], f"{_COLUMNS[-1]} {auc:.3f}"]]
        peer = next((row for row in of_case if row.setting.variant == TF_KERAS), None)
        lines += [_line(row, peer, auc) for row in of_case]
        table = ["| " + " | ".join(cells) + " |" for cells in lines]
        table.insert(1, "|---" * len(lines[0]) + "|")
        parts.append(f"{title}, after {of_case[0].examples[-1]:,} examples\n\n" + "\n".join(table))
    return "\n\n".join(parts) + "\n"


def plot(rows: Sequence[Figures], path: pathlib.Path) -> None:
    """Draws each case: examples/s, bytes of a step by kind, AUC over training time."""
    each = cases(rows)
    figure, grid = plt.subplots(
        len(each), 3, figsize=(15, 3.6 * len(each)), squeeze=False, constrained_layout=True
    )
    for (title, of_case), (speed, size, quality) in zip(each, grid, strict=True):
        labels = [row.setting.label for row in of_case]
        speed.barh(labels, [row.examples_per_s for row in of_case], color="tab:blue")
        speed.set_xscale("log")
        speed.set_xlabel("examples/s, all workers")
        speed.set_title(title, loc="left")
        left = [0.0] * len(of_case)
        for kind in _KINDS:
            kb = [row.kb.get(kind, 0.0) for row in of_case]
            size.barh(labels, kb, left=left, label=kind)
            left = [a + b for a, b in zip(left, kb, strict=True)]
        size.set_yticks([])
        size.set_xlabel("kB a worker sends and gets a step")
        size.legend(fontsize="small")
        for row, marker in zip(of_case, itertools.cycle("osv^D*"), strict=False):
            seconds = [count / row.examples_per_s for count in row.examples]
            quality.plot(seconds, row.auc, marker + "-", label=row.setting.label, alpha=0.8)
        quality.set_xscale("log")
        quality.set_xlabel("seconds of training")
        quality.set_ylabel("AUC, held out")
        quality.legend(fontsize="x-small")
        for panel in (speed, size, quality):
            panel.invert_yaxis() if panel is not quality else None
            panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _case(row: Figures) -> tuple[int, int, str | None]:
    return row.setting.workers, row.setting.servers, row.setting.rate


def _line(row: Figures, peer: Figures | None, target: float) -> list[str]:
    shares = row.shares()
    spent = [f"{share:.0%}" for share in shares.values()] if shares else [""] * 3
    on_cluster = row.setting.variant != ALONE
    seconds = row.seconds_to(target)
    auc = f"{row.auc[-1]:.4f}" + ("" if row.auc_sd is None else f" ± {row.auc_sd:.4f}")
    return [
        row.setting.label,
        f"{row.ms_per_step:.1f}",
        f"{row.examples_per_s:,.0f}",
        f"{row.examples_per_s / peer.examples_per_s:.2f}" if peer else "",
        f"{row.kb_sent:,.0f}" if on_cluster else "",
        f"{row.kb_received:,.0f}" if on_cluster else "",
        _kb(row, "embeddings"),
        _kb(row, "dense"),
        _kb(row, "rest"),
        f"{row.messages:.2f}" if row.messages else "",
        *spent,
        f"{row.server_ms:.1f}" if on_cluster else "",
        auc,
        "" if seconds is None else f"{seconds:,.1f}",
    ]


def _kb(row: Figures, kind: str) -> str:
    """kB of a kind. What is known of two kinds together stands under the first, with a +."""
    if kind in row.kb:
        return f"{row.kb[kind]:,.0f}"
    joint = f"{kind} + rest"
    return f"{row.kb[joint]:,.0f}+" if joint in row.kb else ""
