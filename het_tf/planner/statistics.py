"""What a dataset's ids are like: the input of the planner."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf.runtime.key_counts import Counted, FrequentKeys, added_up
from het_tf.runtime.quantities import to_bytes
from het_tf.storage.files import reading, replacing

_VERSION = 1
_DAMAGES = zipfile.BadZipFile, zlib.error
_FULL = 1 << 32  # value of `limit` with which all keys are traced
_ENTRY_BYTES = 12  # of a trace: key and count
_BATCH_BYTES = 300  # of a trace: a batch of it
_LEAST_KEYS = 1000  # of a trace, whatever its rate
_COUNTER_BYTES = 64  # of FrequentKeys, with what its folding needs
_SHARE_OF_COUNTERS = 0.25  # of the memory

Trace = list[Counted]  # of every batch


@dataclasses.dataclass
class TableStatistics:
    """Statistics of the ids of one layer.

    A trace has all occurrences of a share of the keys. A hash of the key decides whether a key is
    in the trace (SHARDS: Waldspurger et al., FAST 2015). Caches that are smaller in the same
    proportion have about the same hit rate on the trace as on the whole stream.

    Attributes:
      batches: number of batches.
      ids: number of ids.
      keys: number of distinct keys of a batch, added up over the batches.
      rate: share of the keys that are in the trace.
      trace: the traced keys of every batch, int64 [n], and how often each occurred, int32 [n]. Of a
        table with few keys only the last batches, if there is no memory for all.
      frequent: the most frequent keys.
    """

    batches: int
    ids: int
    keys: int
    rate: float
    trace: Trace
    frequent: FrequentKeys

    @property
    def rows(self) -> int:
        """Number of distinct keys of the trace, divided by `rate`."""
        return round(len(self._traced[0]) / self.rate)

    @property
    def rows_error(self) -> float:
        """Standard deviation of `rows`, relative."""
        traced = len(self._traced[0])
        return float(np.sqrt((1 - self.rate) / max(traced, 1)))

    def coverage(self, rows: Any) -> np.ndarray:
        """Returns the share of the ids that the most frequent rows have.

        Args:
          rows: numbers of rows, of any shape.

        Returns:
          float64 of the same shape. Each is at most `frequent.error * rows / ids` too low.
        """
        weights, counts = self.frequencies()
        at = np.concatenate([[0.0], np.cumsum(weights)])
        covered = np.concatenate([[0.0], np.cumsum(weights * counts)])
        return np.interp(rows, at, covered / max(covered[-1], 1))

    def frequencies(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many rows occurred how often.

        Returns:
          weights: float64 [n], numbers of rows.
          counts: float64 [n], numbers of occurrences of each of these rows, descending.
        """
        keys, counts = self._traced
        order = np.argsort(-counts, kind="stable")
        if self.rate == 1:
            return np.ones(len(keys)), counts[order].astype(np.float64)
        # The most frequent rows are known one by one, the others by the share in the trace.
        top, top_counts = self.frequent.top()
        is_known = top_counts > 2 * self.frequent.error
        top, top_counts = top[is_known], top_counts[is_known].astype(np.float64)
        rest = counts[order][~np.isin(keys[order], top)]
        weights = np.full(len(rest), 1 / self.rate)
        missing = max(self.ids - top_counts.sum(), 0.0)
        if rest.size:
            rest = rest * (missing / (weights @ rest))
        weights = np.concatenate([np.ones(len(top)), weights])
        counts = np.concatenate([top_counts, rest])
        order = np.argsort(-counts, kind="stable")
        return weights[order], counts[order]

    @functools.cached_property
    def _traced(self) -> Counted:
        return added_up(self.trace)


@dataclasses.dataclass
class Statistics:
    """Statistics of a dataset, from `statistics`.

    Attributes:
      examples: number of examples.
      batches: number of batches.
      tables: statistics of every layer's ids, by the name of the layer.
    """

    examples: int
    batches: int
    tables: dict[str, TableStatistics]

    @property
    def batch_size(self) -> float:
        """Mean number of examples of a batch."""
        return self.examples / max(self.batches, 1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for `load`."""
        arrays: dict[str, Any] = {}
        heads = []
        for number, (name, table) in enumerate(self.tables.items()):
            keys, counts, error = table.frequent.state()
            heads.append(
                {
                    "name": name,
                    "batches": table.batches,
                    "ids": table.ids,
                    "keys": table.keys,
                    "rate": table.rate,
                    "counters": table.frequent.counters,
                    "error": error,
                }
            )
            nothing = (np.zeros(0, np.int64), np.zeros(0, np.int32))
            parts = [nothing, *table.trace]
            arrays |= {
                f"{number}/lengths": np.array([len(k) for k, _ in table.trace], np.int64),
                f"{number}/keys": np.concatenate([k for k, _ in parts]),
                f"{number}/counts": np.concatenate([c for _, c in parts]),
                f"{number}/frequent_keys": keys,
                f"{number}/frequent_counts": counts,
            }
        head = {"version": _VERSION, "examples": self.examples, "batches": self.batches}
        text = json.dumps(head | {"tables": heads})
        with replacing(os.fspath(path)) as (file,):
            np.savez_compressed(file, head=np.array(text), **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Statistics:
        """Reads a file of `save`.

        Raises:
          ValueError: the file has no statistics, or those of another version.
        """
        try:
            with reading(os.fspath(path)) as file:
                content = io.BytesIO(file.read())
            with np.load(content, allow_pickle=False) as arrays:
                head = json.loads(str(arrays["head"]))
                if head["version"] != _VERSION:
                    raise ValueError(f"version {head['version']}, not {_VERSION}")
                tables = {}
                for number, each in enumerate(head["tables"]):
                    ends = np.cumsum(arrays[f"{number}/lengths"])[:-1]
                    keys = np.split(arrays[f"{number}/keys"], ends)
                    counts = np.split(arrays[f"{number}/counts"], ends)
                    state = (
                        arrays[f"{number}/frequent_keys"],
                        arrays[f"{number}/frequent_counts"],
                        each["error"],
                    )
                    tables[each["name"]] = TableStatistics(
                        each["batches"],
                        each["ids"],
                        each["keys"],
                        each["rate"],
                        list(zip(keys, counts, strict=True)) if each["batches"] else [],
                        FrequentKeys.restored(each["counters"], [state]),
                    )
                return cls(head["examples"], head["batches"], tables)
        except (*_DAMAGES, KeyError, EOFError, ValueError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} has no statistics of het_tf: {error}") from error

    @classmethod
    def merge(cls, parts: Sequence[Statistics]) -> Statistics:
        """Returns the statistics of the parts' datasets together.

        The batches of the parts come in turn, as several workers train them.

        Raises:
          ValueError: there is no part, or the parts have different tables.
        """
        if not parts:
            raise ValueError("parts is empty")
        names = set(parts[0].tables)
        for part in parts:
            if set(part.tables) != names:
                raise ValueError(f"parts have the tables {sorted(names)} and {sorted(part.tables)}")
        tables = {}
        for name in parts[0].tables:
            of_parts = [part.tables[name] for part in parts]
            rate = min(each.rate for each in of_parts)
            most = max(len(each.trace) for each in of_parts)
            trace = [
                thinned(each.trace[batch], rate)
                for batch in range(most)
                for each in of_parts
                if batch < len(each.trace)
            ]
            tables[name] = TableStatistics(
                sum(each.batches for each in of_parts),
                sum(each.ids for each in of_parts),
                sum(each.keys for each in of_parts),
                rate,
                trace,
                FrequentKeys.restored(
                    max(each.frequent.counters for each in of_parts),
                    [each.frequent.state() for each in of_parts],
                ),
            )
        return cls(sum(p.examples for p in parts), sum(p.batches for p in parts), tables)

    def __str__(self) -> str:
        """Returns a table of the layers, and what the most frequent rows cover."""
        shares = (0.001, 0.01, 0.1, 0.5)
        lines = [
            f"{self.examples:,} examples in {self.batches:,} batches",
            f"{'table':24}{'rows':>14}{'ids/example':>13}{'keys/batch':>12}{'traced':>8}"
            + "".join(f"{f'top {share:.1%}':>11}" for share in shares),
        ]
        for name, table in self.tables.items():
            rows = table.rows
            error = f" ±{table.rows_error:.0%}" if table.rate < 1 else ""
            least = ">= " if len(table.trace) < table.batches else ""
            covered = table.coverage([share * rows for share in shares])
            lines.append(
                f"{name:24}{f'{least}{rows:,}{error}':>14}"
                f"{table.ids / max(self.examples, 1):>13.1f}"
                f"{table.keys / max(self.batches, 1):>12,.0f}{table.rate:>8.1%}"
                + "".join(f"{share:>11.1%}" for share in covered)
            )
        return "\n".join(lines)


def statistics(
    dataset: tf.data.Dataset,
    ids: Callable[..., Any],
    *,
    memory: int | str = "256MB",
) -> Statistics:
    """Counts the ids of a dataset in one pass.

        statistics = het_tf.planner.statistics(dataset, lambda x, y: {"clicks": x["ids"]})
        statistics.save("clicks.npz")

    Several workers can count parts of a dataset (`dataset.shard`), and `Statistics.merge` adds the
    parts up.

    Args:
      dataset: finite dataset of batches. The planner needs the batches in the order of training.
      ids: function of an element of the dataset. It returns a dictionary from the names of layers
        to their integer ids, dense of any shape with the batch first, ragged or sparse. Ids of one
        layer share rows. Leave out padding, which has no rows.
      memory: memory of the result, in bytes or as a text such as "256MB". The smaller it is, the
        smaller is the share of the keys that are traced, and the larger are the errors that the
        statistics and the planner state.

    Raises:
      ValueError: an argument is out of range, or the dataset has no ids or is infinite.
    """
    size = to_bytes("memory", memory)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("statistics: the dataset is infinite; give it dataset.take(n)")
    counters: dict[str, _Counter] = {}
    examples = batches = 0
    for element in dataset:
        batch, found = _ids_of(ids, element)
        if not counters:
            counters = {name: _Counter(size // len(found)) for name in found}
        if counters.keys() != found.keys():
            raise ValueError(f"ids returned {sorted(found)}, and before {sorted(counters)}")
        examples += batch
        batches += 1
        for name, values in found.items():
            counters[name].add(values)
    if not any(counter.ids for counter in counters.values()):
        raise ValueError("statistics: the dataset has no ids")
    return Statistics(
        examples, batches, {name: counter.result() for name, counter in counters.items()}
    )


def _ids_of(ids: Callable[..., Any], element: Any) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the number of examples of a batch, and each layer's ids, int64 [ids]."""
    # As tf.data calls functions: a NamedTuple is one argument.
    found = ids(*element) if type(element) is tuple else ids(element)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"ids must return a dictionary from layer names to ids, not {found!r}")
    result = {}
    batch = 0
    for name, value in found.items():
        if not isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            value = tf.convert_to_tensor(value)
        if not value.dtype.is_integer:
            raise ValueError(f"ids must return integers, but {name!r} is {value.dtype.name}")
        if value.shape.rank == 0:
            raise ValueError(f"ids must return batches, but {name!r} is a scalar")
        shape = value.bounding_shape() if isinstance(value, tf.RaggedTensor) else tf.shape(value)
        if isinstance(value, tf.SparseTensor):
            shape = value.dense_shape
        batch = int(shape[0])
        flat = value.flat_values if isinstance(value, tf.RaggedTensor) else value
        flat = flat.values if isinstance(flat, tf.SparseTensor) else flat
        keys = flat.numpy().ravel()
        if keys.dtype == np.uint64 and np.any(keys >= 1 << 63):
            raise ValueError(f"ids must be below 2**63, but {name!r} has {keys.max()}")
        result[str(name)] = keys.astype(np.int64)
    return batch, result


def _hashed(keys: np.ndarray) -> np.ndarray:
    """Returns 32 mixed bits of keys (the finalizer of SplitMix64: Steele et al., OOPSLA 2014)."""
    bits = keys.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(32)).astype(np.uint64)


def thinned(batch: Counted, rate: float) -> Counted:
    """Returns the keys of a batch of a trace that are in the trace of this rate."""
    keys, counts = batch
    if rate == 1:
        return batch
    stays = _hashed(keys) < np.uint64(rate * _FULL)
    return keys[stays], counts[stays]


def few_keys(trace: Trace) -> bool:
    """Returns whether half of the traced keys would be too few."""
    known = np.zeros(0, np.int64)
    for keys, _ in trace:
        known = np.union1d(known, keys)
        if len(known) >= 2 * _LEAST_KEYS:
            return False
    return True


class _Counter:
    """Counts the ids of one layer."""

    def __init__(self, memory: int):
        self.ids = self._keys = self._batches = 0
        self._rate = 1.0
        self._trace: Trace = []
        self._bytes = 0
        self._most_bytes = max(int(memory * (1 - _SHARE_OF_COUNTERS)), 100 * _BATCH_BYTES)
        self._frequent = FrequentKeys(max(int(memory * _SHARE_OF_COUNTERS) // _COUNTER_BYTES, 100))

    def add(self, ids: np.ndarray) -> None:
        """Counts the ids of a batch, int64 [ids]."""
        keys, counts = np.unique(ids, return_counts=True)
        self.ids += len(ids)
        self._keys += len(keys)
        self._batches += 1
        self._frequent.add(keys, counts)
        self._trace.append(thinned((keys, counts.astype(np.int32)), self._rate))
        self._bytes += _bytes_of(self._trace[-1:])
        while self._bytes > self._most_bytes:
            if 2 * len(self._trace) * _BATCH_BYTES > self._bytes or few_keys(self._trace):
                # Fewer keys would not help, or say too little.
                del self._trace[: (len(self._trace) + 1) // 2]
            else:
                self._rate /= 2
                self._trace = [thinned(batch, self._rate) for batch in self._trace]
            self._bytes = _bytes_of(self._trace)

    def result(self) -> TableStatistics:
        """Returns the statistics of what was added."""
        return TableStatistics(
            self._batches, self.ids, self._keys, self._rate, self._trace, self._frequent
        )


def _bytes_of(trace: Trace) -> int:
    return sum(_BATCH_BYTES + _ENTRY_BYTES * len(keys) for keys, _ in trace)
