"""How often keys occur."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from het_tf.runtime.validation import INT64_MAX

Counted = tuple[np.ndarray, np.ndarray]  # distinct keys, int64 [n], and counts, integers [n]

_FOLDED_AT_ONCE = 1 << 22  # keys


def added_up(parts: Sequence[Counted]) -> Counted:
    """Returns the keys of all parts, sorted, and the sums of their counts. Both int64 [keys]."""
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    keys, where = np.unique(np.concatenate([k for k, _ in parts]), return_inverse=True)
    counts = np.zeros(len(keys), np.int64)
    np.add.at(counts, where, np.concatenate([c for _, c in parts]))
    return keys.astype(np.int64), counts


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

    def __init__(self, counters: int = INT64_MAX):
        """Creates counters of an empty stream. By default every key has one."""
        self.counters = counters
        self.error = 0
        self._counted = added_up([])
        self._waiting: list[Counted] = []
        self._num_waiting = 0

    def add(self, keys: np.ndarray, counts: np.ndarray) -> None:
        """Counts distinct keys, int64 [n], that occurred so often, int64 [n]."""
        self._waiting.append((keys, counts))
        self._num_waiting += len(keys)
        if self._num_waiting > min(self.counters, max(_FOLDED_AT_ONCE, len(self._counted[0]))):
            self._fold()

    def top(self) -> Counted:
        """Returns keys and counts in the order of descending counts, of equal counts by key."""
        self._fold()
        keys, counts = self._counted
        order = np.argsort(-counts, kind="stable")
        return keys[order], counts[order]

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
        keys, counts = added_up([self._counted, *self._waiting])
        if len(keys) > self.counters:
            # What the first key without a counter has, all keys lose.
            place = len(keys) - self.counters - 1
            lost = np.partition(counts, place)[place]
            counts -= lost
            self.error += int(lost)
            keys, counts = keys[counts > 0], counts[counts > 0]
        self._counted = keys, counts
        self._waiting, self._num_waiting = [], 0
