"""Knowledge graphs: triples of head, relation and tail, in text files as those of FB15k-237.

A folder has train.txt, valid.txt and test.txt, gzipped or not. Each line has the names of the head,
the relation and the tail, with tabs between them.

FB15k-237: K. Toutanova, D. Chen, Observed Versus Latent Features for Knowledge Base and Text
Inference, CVSC 2015.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from het_tf.datasets.text import BadLines, find, records


@dataclasses.dataclass(frozen=True)
class Triples:
    """A knowledge graph. Numbers of names are their places in the lists.

    Attributes:
      train: int64 [n, 3], numbers of head, relation and tail.
      valid: the same.
      test: the same.
      entities: names of the heads and tails.
      relations: names of the relations.
    """

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    entities: list[str]
    relations: list[str]


def load(folder: str | os.PathLike[str], *, max_bad_lines: int = 0) -> Triples:
    """Reads the triples of a folder.

    Raises:
      FileNotFoundError: a file is missing.
      BadLineError: a line does not have three columns, and `max_bad_lines` of all files were passed
        over.
    """
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    bad = BadLines(max_bad_lines)
    parts = []
    for name in ("train", "valid", "test"):
        rows = [
            (
                entities.setdefault(head, len(entities)),
                relations.setdefault(relation, len(relations)),
                entities.setdefault(tail, len(entities)),
            )
            for _, (head, relation, tail) in records(find(folder, f"{name}.txt"), "\t", 3, bad)
        ]
        parts.append(np.array(rows, np.int64).reshape(-1, 3))
    train, valid, test = parts
    return Triples(train, valid, test, list(entities), list(relations))


def generate(folder: str | os.PathLike[str], seed: int = 0) -> None:
    """Writes a small graph for `load`. Each relation adds a fixed step to places on a ring.

    So a model can predict the tails of unseen triples.
    """
    rng = np.random.default_rng(seed)
    count, steps = 1000, (1, 7, 40, 83, 150, 310, 420, 477)
    every = [(h, r, (h + step) % count) for h in range(count) for r, step in enumerate(steps)]
    order = rng.permutation(len(every))
    for name, part in ("train", order[800:]), ("valid", order[:400]), ("test", order[400:800]):
        with open(os.path.join(folder, f"{name}.txt"), "w", encoding="utf-8") as file:
            for h, r, t in (every[i] for i in part):
                file.write(f"/e/{h}\t/r/{r}\t/e/{t}\n")
