"""What caches and shards say to each other, read off the bytes (ops/core/message.h)."""

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
        ("read_bound", "<i8"),
        ("dim", "<u4"),
        ("slot_dim", "<u4"),
        ("shard", "<u4"),
        ("num_batches", "<u4"),
        ("num_checks", "<i8"),
        ("num_absent", "<i8"),
    ]
)
PUSH_HEADER = np.dtype([("sequence", "<u8"), ("learning_rate", "<f4"), ("rows", "<u4")])
PUSH_ROW = np.dtype([("key", "<i8"), ("clock", "<i8")])
CHECK = np.dtype([("key", "<i8"), ("base", "<i8")])
REPLY_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("incarnation", "<u8"),
        ("acknowledged", "<u8"),
        ("num_queries", "<i8"),
        ("num_rows", "<i8"),
        ("width", "<i8"),
    ]
)
REPLY_ROW = np.dtype([("clock", "<i8"), ("query", "<i8")])
SERVER_APPLIES = 1
RESTARTED = 1


@dataclasses.dataclass(frozen=True)
class Push:
    sequence: int
    learning_rate: float
    rows: np.ndarray  # PUSH_ROW [rows]
    data: np.ndarray  # float32 [rows, width]


@dataclasses.dataclass(frozen=True)
class Request:
    header: np.void
    pushes: list[Push]
    checks: np.ndarray  # CHECK [num_checks]
    absent: np.ndarray  # int64 [num_absent]
    num_bytes: int

    @property
    def queries(self) -> list[int]:
        return [*self.checks["key"].tolist(), *self.absent.tolist()]

    @property
    def pushed_keys(self) -> list[int]:
        return [key for push in self.pushes for key in push.rows["key"].tolist()]


@dataclasses.dataclass(frozen=True)
class Reply:
    header: np.void
    rows: np.ndarray  # REPLY_ROW [num_rows]
    data: np.ndarray  # float32 [num_rows, width]
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
    width = int(header["dim"])
    if not header["flags"] & SERVER_APPLIES:
        width += int(header["slot_dim"])
    pushes = []
    for _ in range(header["num_batches"]):
        head = cursor.take(PUSH_HEADER, 1)[0]
        num_rows = int(head["rows"])
        rows = cursor.take(PUSH_ROW, num_rows)
        data = cursor.take(np.dtype("<f4"), num_rows * width).reshape(num_rows, width)
        cursor.at += -cursor.at % 8
        pushes.append(Push(int(head["sequence"]), float(head["learning_rate"]), rows, data))
    checks = cursor.take(CHECK, header["num_checks"])
    absent = cursor.take(np.dtype("<i8"), header["num_absent"])
    assert cursor.at == len(cursor.bytes)
    return Request(header, pushes, checks, absent, cursor.at)


def parse_reply(message: tf.Tensor) -> Reply:
    cursor = _Cursor(message)
    header = cursor.take(REPLY_HEADER, 1)[0]
    assert header["magic"] == b"HETR"
    num_rows, width = int(header["num_rows"]), int(header["width"])
    rows = cursor.take(REPLY_ROW, num_rows)
    data = cursor.take(np.dtype("<f4"), num_rows * width).reshape(num_rows, width)
    assert cursor.at == len(cursor.bytes)
    return Reply(header, rows, data, cursor.at)


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

    def _exchange(self, worker: int, ticket: tf.Tensor, requests: list[tf.Tensor]) -> tf.Tensor:
        before = len(self.exchanges)
        rows = super()._exchange(worker, ticket, requests)
        for exchange in self.exchanges[before:]:
            self._note_clocks(exchange)
        return rows

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
                for key in push.rows["key"].tolist():
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
            elif restarted or query >= len(request.checks):
                clocks[key] = 0  # nobody has updated it
