"""Ids and labels of the shape of Criteo's click logs, drawn: no download, the same everywhere.

The cardinalities are those of the 26 categorical columns of Criteo's Kaggle set (Display
Advertising Challenge, 2014), divided by 64. What makes a cache worth while in the real set is here,
too: few values of a column make up most of it, and columns go together, since they describe the
same users and advertisements. Every sample belongs to a latent profile, drawn from a Zipf
distribution; in a large column it has the profile's own value most of the time.

Labels come from a hidden logistic model of the ids, so that an AUC means something; that of the
hidden model itself, `Clicks.best_auc`, is the most that training can reach.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
from factorization_machine import area_under_curve

_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
CARDINALITIES = np.array([max(3, cardinality // 64) for cardinality in _KAGGLE])
FIELDS = len(CARDINALITIES)
KEYS = int(CARDINALITIES.sum())  # 527,550
OFFSETS = np.cumsum(CARDINALITIES) - CARDINALITIES  # of a field's keys

_PROFILES = 2000
_PROFILE_EXPONENT = 0.8
_AFFINITY = 0.7  # probability of the profile's own value
_LARGE = 47  # fields of more values have affinity

# Of the samples' logits. A quarter of the samples are clicks, as in the real set, and the AUC of
# the hidden model is that of the best models on the real one, 0.81.
_LOGIT_SD = 1.5
_LOGIT_MEAN = -1.45
_PILOT_SAMPLES = 20_000  # that logits are standardised by


@dataclasses.dataclass(frozen=True)
class Clicks:
    """Drawn samples. ids: int32 [samples, FIELDS], field-offset. labels: int32 [samples]."""

    ids: np.ndarray
    labels: np.ndarray
    best_auc: float


class Generator:
    """Draws samples of one population: its profiles and the hidden model are fixed by the seed."""

    def __init__(self, seed: int):
        """Draws the population."""
        rng = np.random.default_rng([seed, 0])
        self._seed = seed
        self._own_ids = _log_uniform(rng, _PROFILES) + OFFSETS  # [profiles, fields]
        weights = np.arange(1, _PROFILES + 1) ** -_PROFILE_EXPONENT
        self._cumulative = np.cumsum(weights) / weights.sum()
        self._weights = rng.normal(size=KEYS)
        sums = self._weights[self._draw_ids(rng, _PILOT_SAMPLES)].sum(axis=1)
        self._scale = _LOGIT_SD / sums.std()
        self._bias = _LOGIT_MEAN - self._scale * sums.mean()

    def draw(self, samples: int, stream: int) -> Clicks:
        """Samples of a stream; the streams (0, 1, ...) of a generator have none in common."""
        rng = np.random.default_rng([self._seed, 1 + stream])
        ids = self._draw_ids(rng, samples)
        logits = self._scale * self._weights[ids].sum(axis=1) + self._bias
        labels = rng.random(samples) < 1 / (1 + np.exp(-logits))
        return Clicks(
            ids.astype(np.int32), labels.astype(np.int32), area_under_curve(logits, labels)
        )

    def _draw_ids(self, rng: np.random.Generator, samples: int) -> np.ndarray:
        profiles = np.searchsorted(self._cumulative, rng.random(samples))
        ids = _log_uniform(rng, samples) + OFFSETS
        own = (rng.random(ids.shape) < _AFFINITY) & (CARDINALITIES > _LARGE)
        return np.where(own, self._own_ids[profiles], ids)


def write_batches(clicks: Clicks, batch: int, path: pathlib.Path) -> None:
    """Writes int32 records of one batch each: its ids, then its labels (see `batches`)."""
    count = len(clicks.labels) // batch
    ids = clicks.ids[: count * batch].reshape(count, -1)
    labels = clicks.labels[: count * batch].reshape(count, -1)
    path.write_bytes(np.concatenate([ids, labels], axis=1).tobytes())


def _log_uniform(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Values from 0 of every field, int64 [rows, fields]: their logarithm is uniform."""
    values = np.exp(rng.random((rows, FIELDS)) * np.log(CARDINALITIES + 1))
    return np.minimum(values.astype(np.int64), CARDINALITIES) - 1
