"""Draws the pictures of concepts.md: `python docs/pictures.py [folder]`. It needs matplotlib."""

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


PICTURES = {"staleness.svg": staleness, "parts.svg": parts}


def main(folder: pathlib.Path) -> None:
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent))
