"""Scores of triples. Each model makes a query of a known entity and a relation, [..., n, dim].

The score of a triple is the similarity of the query and the other entity. Models of translations
and rotations have a distance: their score is MARGIN less the distance.
"""

from typing import NamedTuple

from keras import ops

MARGIN = 3.0


def _dot(query, entities):
    return ops.matmul(query, ops.swapaxes(entities, -1, -2))


def _distance(query, entities):
    """MARGIN - L2 distance of every pair, [..., n, m]."""
    squares = ops.sum(query**2, -1, keepdims=True) - 2 * _dot(query, entities)
    squares = squares + ops.expand_dims(ops.sum(entities**2, -1), -2)
    return MARGIN - ops.sqrt(ops.maximum(squares, 1e-6))


def _complex(x):
    return ops.split(x, 2, axis=-1)


def _times(x, y, conjugate=False):
    """Product of complex numbers. conjugate: of x and the conjugate of y."""
    (a, b), (c, d) = _complex(x), _complex(y)
    d = -d if conjugate else d
    return ops.concatenate([a * c - b * d, a * d + b * c], axis=-1)


def _rotation(r):
    """Complex numbers of length 1. The first half of the relation's columns are angles."""
    angles = _complex(r)[0] * 10
    return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)


class Score(NamedTuple):
    """A model: queries for tails and for heads, and the similarity of all queries and entities.

    Distances are learned without dropout.
    """

    tails: object
    heads: object
    similarity: object
    dropout: float

    def similarity_of_pairs(self, query, entities):
        """Similarity of each query and its own entity, [..., n, 1]."""
        return self.similarity(ops.expand_dims(query, -2), ops.expand_dims(entities, -2))[..., 0]


MODELS = {
    "transe": Score(lambda h, r: h + r, lambda t, r: t - r, _distance, 0.0),
    "distmult": Score(lambda h, r: h * r, lambda t, r: t * r, _dot, 0.2),
    "complex": Score(_times, lambda t, r: _times(t, r, conjugate=True), _dot, 0.2),
    "rotate": Score(
        lambda h, r: _times(h, _rotation(r)),
        lambda t, r: _times(t, _rotation(r), conjugate=True),
        _distance,
        0.0,
    ),
}
