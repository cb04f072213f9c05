"""The most frequent keys of a stream, in a given number of counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class FrequentKeys:
    """Counters of the most frequent keys (Misra and Gries, Sci. Comput. Program. 2, 1982).

    A count is at most `error` below the key's true number, and never above it. A key without a
    counter occurred at most `error` times. `error` is at most the number of counted occurrences
    divided by the number of counters. Counters of several streams can be added (Agarwal et al.,
    PODS 2012).

    Attributes:
      counters: largest number of keys that have a count.
      error: see above.
    """

    def __init__(self, counters: int):
        """Creates counters of an empty stream."""
        self.counters = counters
        self.error = 0
        self._keys = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_waiting = 0

    def add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Counts distinct keys, int64 [n], that occurred so often, int64 [n]."""
        self._waiting.append((keys, counts))
        self._num_waiting += len(keys)
        if self._num_waiting > self.counters:
            self._fold()

    def top(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and counts, int64 [n], in the order of descending counts."""
        self._fold()
        order = np.lexsort((self._keys, -self._counts))
        return self._keys[order], self._counts[order]

    def state(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns keys, counts and error, for `restored`."""
        keys, counts = self.top()
        return keys, counts, self.error

    @classmethod
    def restored(
        cls, counters: int, states: Sequence[tuple[np.ndarray, np.ndarray, int]]
    ) -> FrequentKeys:
        """Returns the counters of several streams together, from the results of `state`."""
        result = cls(counters)
        for keys, counts, error in states:
            result.error += error
            result.add(keys, counts)
        result._fold()
        return result

    def _fold(self) -> None:
        if not self._waiting:
            return
        parts = [(self._keys, self._counts), *self._waiting]
        keys, where = np.unique(np.concatenate([k for k, _ in parts]), return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, where, np.concatenate([c for _, c in parts]))
        if len(keys) > self.counters:
            # What the first key without a counter has, all keys lose.
            lost = np.partition(counts, len(counts) - self.counters - 1)[
                len(counts) - self.counters - 1
            ]
            counts -= lost
            self.error += int(lost)
            keys, counts = keys[counts > 0], counts[counts > 0]
        self._keys, self._counts = keys, counts
        self._waiting, self._num_waiting = [], 0
