"""What caches and shards say to each other, read off the bytes (ops/core/wire/)."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from ops_system import OpsSystem

REQUEST_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("cache_id", "<u8"),
        ("incarnation", "<u8"),
        ("session", "<u8"),
        ("cut", "<u8"),
        ("read_bound", "<i8"),
        ("dim", "<u4"),
        ("slot_dim", "<u4"),
        ("contribution_dim", "<u4"),
        ("shard", "<u4"),
        ("num_pushes", "<u4"),
        ("num_checks", "<u4"),
        ("num_value_checks", "<u4"),
        ("num_full", "<u4"),
        ("num_values", "<u4"),
        ("base_bytes", "<u4"),
    ]
)
PUSH_HEADER = np.dtype(
    [("sequence", "<u8"), ("num_gradients", "<u4"), ("num_contributions", "<u4")]
)
PUSH_ROW = np.dtype([("key", "<i8"), ("updates", "<u4"), ("clock", "<u4")])
REPLY_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("incarnation", "<u8"),
        ("session", "<u8"),
        ("acknowledged", "<u8"),
        ("num_queries", "<u4"),
        ("num_full", "<u4"),
        ("num_values", "<u4"),
        ("dim", "<u4"),
        ("slot_dim", "<u4"),
        ("padding", "<u4"),
    ]
)
REPLY_ROW = np.dtype([("clock", "<i8"), ("query", "<i8")])
RESTARTED = 1


@dataclasses.dataclass(frozen=True)
class Push:
    sequence: int
    gradients: np.ndarray  # PUSH_ROW [gradients]; "updates" holds the bits of the learning rate
    contributions: np.ndarray  # PUSH_ROW [contributions]
    num_bytes: int

    @property
    def keys(self) -> list[int]:
        return [*self.gradients["key"].tolist(), *self.contributions["key"].tolist()]

    @property
    def num_updates(self) -> int:
        return len(self.gradients) + int(self.contributions["updates"].sum())


@dataclasses.dataclass(frozen=True)
class Request:
    header: np.void
    pushes: list[Push]
    queries: list[int]  # keys: of checks, of rows, of values
    bases: list[int]  # of the checks
    num_bytes: int

    @property
    def checked_keys(self) -> list[int]:
        return self.queries[: len(self.bases)]

    @property
    def pushed_keys(self) -> list[int]:
        return [key for push in self.pushes for key in push.keys]


@dataclasses.dataclass(frozen=True)
class Reply:
    header: np.void
    rows: np.ndarray  # REPLY_ROW [full rows and values]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Exchange:
    worker: int
    shard: int
    request: Request
    reply: Reply | None  # None: lost, or the request was


class _Cursor:
    def __init__(self, message: tf.Tensor):
        self.bytes, self.at = message.numpy().tobytes(), 0

    def take(self, dtype: np.dtype, count: int) -> np.ndarray:
        array = np.frombuffer(self.bytes, dtype, count, self.at)
        self.at += array.nbytes
        return array


def parse_request(message: tf.Tensor) -> Request:
    cursor = _Cursor(message)
    header = cursor.take(REQUEST_HEADER, 1)[0]
    assert header["magic"] == b"HETQ"
    pushes = []
    for _ in range(header["num_pushes"]):
        start = cursor.at
        head = cursor.take(PUSH_HEADER, 1)[0]
        gradients = cursor.take(PUSH_ROW, head["num_gradients"])
        contributions = cursor.take(PUSH_ROW, head["num_contributions"])
        floats = len(gradients) * int(header["dim"])
        floats += len(contributions) * int(header["contribution_dim"])
        cursor.take(np.dtype("<f4"), floats)
        cursor.at += -cursor.at % 8
        pushes.append(Push(int(head["sequence"]), gradients, contributions, cursor.at - start))
    counts = [int(header[f"num_{what}"]) for what in ("checks", "value_checks", "full", "values")]
    queries = cursor.take(np.dtype("<i8"), sum(counts)).tolist()
    bases = _varints(cursor.take(np.dtype("u1"), int(header["base_bytes"])))
    cursor.at += -cursor.at % 8
    assert len(bases) == counts[0] + counts[1]
    assert cursor.at == len(cursor.bytes)
    return Request(header, pushes, queries, bases, cursor.at)


def _varints(stream: np.ndarray) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in stream.tolist():
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    return numbers


def parse_reply(message: tf.Tensor) -> Reply:
    cursor = _Cursor(message)
    header = cursor.take(REPLY_HEADER, 1)[0]
    assert header["magic"] == b"HETR"
    full, values = int(header["num_full"]), int(header["num_values"])
    rows = cursor.take(REPLY_ROW, full + values)
    dim = int(header["dim"])
    cursor.take(np.dtype("<f4"), full * (dim + int(header["slot_dim"])) + values * dim)
    assert cursor.at == len(cursor.bytes)
    return Reply(header, rows, cursor.at)


class WatchedOps(OpsSystem):
    """OpsSystem that reads along, and so knows the clocks that its caches hold."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.exchanges: list[Exchange] = []
        self._clocks: list[dict[int, int]] = [{} for _ in range(self.setup.num_workers)]
        self._unsent = [collections.Counter() for _ in range(self.setup.num_workers)]
        self._sequence = collections.Counter()  # the last one seen, by (worker, shard)

    def clock(self, worker: int, key: int) -> int | None:
        """As of the last lookup, with the updates since; an evicted key keeps it."""
        return self._clocks[worker].get(key)

    def update(self, worker: int, keys: Sequence[int], grads: np.ndarray) -> None:
        for key in set(keys):
            self._unsent[worker][key] += 1
            self._clocks[worker][key] += 1
        super().update(worker, keys, grads)

    def crash(self, worker: int) -> None:
        self._clocks[worker].clear()
        self._unsent[worker].clear()
        for shard in range(self.setup.num_shards):
            self._sequence.pop((worker, shard), None)
        super().crash(worker)

    def restart(self, shard: int) -> None:
        for mine in self._clocks + self._unsent:
            for key in [key for key in mine if self.shard_of(key) == shard]:
                del mine[key]
        super().restart(shard)

    def _exchange(self, worker: int, ticket: tf.Tensor, requests: list[tf.Tensor]) -> None:
        before = len(self.exchanges)
        super()._exchange(worker, ticket, requests)
        for exchange in self.exchanges[before:]:
            self._note_clocks(exchange)

    def _send(self, worker: int, shard: int, request: tf.Tensor) -> tf.Tensor | None:
        reply = super()._send(worker, shard, request)
        if request.shape[0]:
            parsed = parse_request(request)
            self._note_pushes(worker, shard, parsed)
            answer = None if reply is None else parse_reply(reply)
            self.exchanges.append(Exchange(worker, shard, parsed, answer))
        return reply

    def _note_pushes(self, worker: int, shard: int, request: Request) -> None:
        for push in request.pushes:
            if push.sequence > self._sequence[worker, shard]:
                self._sequence[worker, shard] = push.sequence
                for key in push.keys:
                    self._unsent[worker][key] = 0

    def _note_clocks(self, exchange: Exchange) -> None:
        worker, request, reply = exchange.worker, exchange.request, exchange.reply
        clocks, unsent = self._clocks[worker], self._unsent[worker]
        answered = dict(
            zip(reply.rows["query"].tolist(), reply.rows["clock"].tolist(), strict=True)
        )
        restarted = bool(reply.header["flags"] & RESTARTED)
        for query, key in enumerate(request.queries):
            if restarted:
                unsent[key] = 0
            if query in answered:
                clocks[key] = answered[query] + unsent[key]
            elif restarted or query >= len(request.bases):
                clocks[key] = 0  # nobody has updated it
