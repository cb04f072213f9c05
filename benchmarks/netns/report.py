"""The table and the picture of a comparison."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")  # writes files, needs no screen
import matplotlib.pyplot as plt
from matplotlib import ticker
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
    "waited",
    "waited ms",
    "compute",
    "in messages",
    "waiting",
    "servers' CPU ms",
    "AUC",
    "s to AUC",
)
# What is known of two kinds together has the colour of the first.
_COLOURS = {
    "embeddings": "tab:blue",
    "embeddings + rest": "tab:blue",
    "dense": "tab:orange",
    "dense + rest": "tab:orange",
    "rest": "tab:grey",
}


def cases(rows: Sequence[Figures]) -> list[tuple[str, list[Figures]]]:
    """Rows by workers, servers, rate and delay, with a title.

    What trains alone is in every case.
    """
    result = []
    keys = [_case(row) for row in rows if row.setting.variant != ALONE]
    for key in dict.fromkeys(keys or [_case(row) for row in rows]):
        workers, servers, rate, delay = key
        of_case = [
            row
            for row in rows
            if _case(row) == key
            or (row.setting.variant == ALONE and row.setting.workers == workers)
        ]
        limit = f"{rate} a host" if rate else "no limit of the network"
        if delay is not None:
            limit += f", {delay} from host to host"
        title = f"{workers} workers, {servers} servers, {limit}" if servers else f"{workers} alone"
        result.append((title, of_case))
    return result


def target_auc(rows: Sequence[Figures]) -> float:
    """The AUC that all rows of a case reach, rounded down to 0.001."""
    reached = [max(row.auc) for row in _of_one_model(rows)]
    return math.floor(1000 * min(reached, default=0)) / 1000


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
    """Draws each case: examples/s, bytes of a step by kind, AUC over training time.

    A setting has one colour in the first and the last.
    """
    each = cases(rows)
    figure, grid = plt.subplots(
        len(each), 3, figsize=(15, 3.6 * len(each)), squeeze=False, constrained_layout=True
    )
    for (title, of_case), (speed, size, quality) in zip(each, grid, strict=True):
        _plot_speed(speed, of_case)
        speed.set_title(title, loc="left")
        _plot_bytes(size, of_case)
        _plot_auc(quality, of_case)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_speed(panel: plt.Axes, rows: Sequence[Figures]) -> None:
    labels = [row.setting.label for row in rows]
    bars = panel.barh(labels, [row.examples_per_s for row in rows], color=_colours(rows))
    panel.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize="small")
    panel.margins(x=0.2)
    panel.invert_yaxis()
    panel.set_xlabel("examples/s, all workers")
    panel.grid(alpha=0.3)


def _plot_bytes(panel: plt.Axes, rows: Sequence[Figures]) -> None:
    labels = [row.setting.label for row in rows]
    left = [0.0] * len(rows)
    for kind, colour in _COLOURS.items():
        kb = [row.kb.get(kind, 0.0) for row in rows]
        # A name that begins with _ is not in the legend.
        panel.barh(labels, kb, left=left, color=colour, label="_" * ("+" in kind) + kind)
        left = [a + b for a, b in zip(left, kb, strict=True)]
    panel.set_yticks([])
    panel.invert_yaxis()
    panel.set_xlabel("kB that a worker sends and gets a step")
    panel.legend(fontsize="small", loc="lower right")
    panel.grid(alpha=0.3)


def _plot_auc(panel: plt.Axes, rows: Sequence[Figures]) -> None:
    for row, colour, marker in zip(rows, _colours(rows), itertools.cycle("*osv^D"), strict=False):
        if row.setting.variant == ALONE:  # each of its models has seen its share of the examples
            continue
        seconds = [count / row.examples_per_s for count in row.examples]
        panel.plot(seconds, row.auc, marker + "-", color=colour, alpha=0.8)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    panel.xaxis.set_minor_formatter(ticker.NullFormatter())
    panel.set_xlabel("seconds of training")
    panel.set_ylabel("AUC, held out")
    panel.grid(alpha=0.3)


def _colours(rows: Sequence[Figures]) -> list[str]:
    return [f"C{i}" for i in range(len(rows))]


def _of_one_model(rows: Sequence[Figures]) -> list[Figures]:
    """Without workers that train alone: each of their models has seen its share of the examples."""
    return [row for row in rows if row.setting.variant != ALONE]


def _case(row: Figures) -> tuple[int, int, str | None, str | None]:
    setting = row.setting
    return setting.workers, setting.servers, setting.rate, setting.delay


def _line(row: Figures, peer: Figures | None, target: float) -> list[str]:
    shares = row.shares()
    spent = [f"{share:.0%}" for share in shares.values()] if shares else [""] * 3
    on_cluster = row.setting.variant != ALONE
    seconds = row.seconds_to(target) if on_cluster else None
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
        "" if row.waited is None else f"{row.waited:.2%}",
        "" if row.waited_ms is None else f"{row.waited_ms:.3f}",
        *spent,
        f"{row.server_ms:.1f}" if on_cluster else "",
        auc if on_cluster else "",
        "" if seconds is None else f"{seconds:,.1f}",
    ]


def _kb(row: Figures, kind: str) -> str:
    """kB of a kind. What is known of two kinds together stands under the first, with a +."""
    if kind in row.kb:
        return f"{row.kb[kind]:,.0f}"
    joint = f"{kind} + rest"
    return f"{row.kb[joint]:,.0f}+" if joint in row.kb else ""
