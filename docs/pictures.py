"""Draws the pictures of the pages: `python docs/pictures.py [folder]`. It needs matplotlib."""

from __future__ import annotations

import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

STEPS = 60
BLUE, ORANGE, GREY = "#4051b5", "#e07b39", "#777777"

# The same bytes each time, and text that stays text.
plt.rcParams |= {"svg.hashsalt": "het_tf", "svg.fonttype": "none", "font.size": 10}


def missed(read_bound: int, write_bound: int) -> list[int]:
    """What A's reads of a row miss of B's updates when both update it in every step."""
    merged = fetched = 0  # updates of B: in the server, in A's cache
    reads = []
    for made in range(1, STEPS + 1):
        if made - merged >= max(1, write_bound):
            merged = made
        if merged - fetched > read_bound:
            fetched = merged
        reads.append(made - fetched)
    return reads


def staleness() -> plt.Figure:
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.4), sharey=True, layout="constrained")
    for axis, bound in zip(axes, (2, 8, 24), strict=True):
        write_bound = bound // 2
        axis.step(range(STEPS), missed(bound - write_bound, write_bound), color=BLUE)
        axis.axhline(bound, color=ORANGE, linestyle="--")
        axis.set_title(f"total_staleness={bound}")
        axis.set_xlabel("step")
    axes[0].set_ylim(0, 26)
    axes[0].set_ylabel("updates of B\nthat A's read misses")
    return figure


def parts() -> plt.Figure:
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    axis.set(xlim=(0, 8), ylim=(0, 3))
    axis.axis("off")

    def box(x: float, y: float, text: str, color: str) -> None:
        axis.add_patch(
            FancyBboxPatch((x, y), 2.2, 0.7, boxstyle="round,pad=0.05", fc="white", ec=color)
        )
        axis.text(x + 1.1, y + 0.35, text, ha="center", va="center")

    servers, workers = (0.9, 4.9), (0.2, 2.9, 5.6)
    for i, x in enumerate(servers):
        box(x, 2.1, f"parameter server {i}\nshards, dense variables", ORANGE)
    for i, x in enumerate(workers):
        box(x, 0.2, f"worker {i}\ncaches, replicas", BLUE)
        for y in servers:
            ends = (x + 1.1, 0.97), (y + 1.1, 2.03)
            axis.add_patch(FancyArrowPatch(*ends, arrowstyle="<->", color=GREY, mutation_scale=8))
    return figure


def steps() -> plt.Figure:
    """Steps of two workers over time, and the messages that carry rows, in each mode."""
    modes = {
        "asynchronous (default): rows are fetched while earlier steps compute": (
            [(0.0, 1, 1.0), (0.4, 1, 1.2)],
            [(x + 0.3, x + 0.8, w) for w in (0, 1) for x in (0.0, 1.2, 2.4, 3.6, 4.8)],
        ),
        "synchronous=True: one exchange ends the step of all workers": (
            [(0.0, 1, 1.5), (0.0, 0.7, 1.5)],
            [(x + 1.02, x + 1.45, w) for w in (0, 1) for x in (0.0, 1.5, 3.0, 4.5)],
        ),
        "hot_batches, hot phase: rows are fetched before, and pushed after": (
            [(0.5, 0.9, 0.95), (0.7, 0.9, 0.95)],
            [(x, x + 0.4, w) for w, x in ((0, 0.05), (0, 5.3), (1, 0.25), (1, 5.5))],
        ),
    }
    figure, axes = plt.subplots(3, 1, figsize=(8, 5), layout="constrained")
    for axis, (title, (lanes, messages)) in zip(axes, modes.items(), strict=True):
        axis.set(xlim=(-0.9, 6.3), ylim=(-0.1, 3))
        axis.axis("off")
        axis.set_title(title, loc="left", fontsize=10)
        axis.plot([0, 6.2], [2.6, 2.6], color=ORANGE, linewidth=2)
        axis.text(-0.9, 2.5, "servers")
        for worker, (first, length, period) in enumerate(lanes):
            axis.text(-0.9, 0.15 + 0.9 * worker, f"worker {worker}")
            for step in range(round((5.3 - first) / period)):
                box = plt.Rectangle(
                    (first + step * period, 0.9 * worker), length, 0.5, fc="white", ec=BLUE
                )
                axis.add_patch(box)
        for begin, end, worker in messages:
            y = 0.5 + 0.9 * worker
            for ends in (
                ((begin, y), (begin + (end - begin) / 2, 2.58)),
                ((begin + (end - begin) / 2, 2.58), (end, y)),
            ):
                axis.add_patch(
                    FancyArrowPatch(*ends, arrowstyle="->", color=GREY, mutation_scale=8)
                )
    return figure


PICTURES = {"staleness.svg": staleness, "parts.svg": parts, "steps.svg": steps}


def main(folder: pathlib.Path) -> None:
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent))
