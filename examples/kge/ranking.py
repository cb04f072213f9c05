"""How well a model knows the other end of a triple: ranks among all entities."""

import numpy as np
from scores import Score

from het_tf.datasets import triples


class Ranking:
    """Ranks the right entity among those that make no other known triple."""

    def __init__(self, data: triples.Triples):
        self._known: dict[tuple[str, int, int], list[int]] = {}
        for h, r, t in np.concatenate([data.train, data.valid, data.test]).tolist():
            self._known.setdefault(("tail", h, r), []).append(t)
            self._known.setdefault(("head", t, r), []).append(h)

    def metrics(
        self, score: Score, entities: np.ndarray, relations: np.ndarray, questions: np.ndarray
    ) -> dict[str, float]:
        """Mean reciprocal rank, and shares of small ranks, of the tails and heads of triples.

        Args:
          score: score of a triple.
          entities: vectors of the entities, [entities, dim].
          relations: vectors of the relations, [relations, dim].
          questions: triples, int64 [n, 3].
        """
        ranks = []
        for first in range(0, len(questions), 500):
            h, r, t = questions[first : first + 500].T
            for side, given, right, query in (
                ("tail", h, t, score.tails(entities[h], relations[r])),
                ("head", t, h, score.heads(entities[t], relations[r])),
            ):
                scores = np.array(score.similarity(query[np.newaxis], entities[np.newaxis]))[0]
                for i in range(len(scores)):
                    right_score = scores[i, right[i]]
                    scores[i, self._known[side, given[i], r[i]]] = -np.inf
                    # Of equal scores the right entity is the last. NaN is never smaller.
                    ranks.append(1 + np.count_nonzero(~(scores[i] < right_score)))
        rank = np.array(ranks)
        hits = {f"Hits@{k}": float(np.mean(rank <= k)) for k in (1, 3, 10)}
        return {"MRR": float(np.mean(1 / rank)), **hits}
