"""What caches and shards say to each other, read off the bytes (ops/core/wire/)."""

import dataclasses

import numpy as np
import tensorflow as tf

REQUEST_HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "u1"),
        ("flags", "u1"),
        ("key_bytes", "u1"),
        ("padding", "u1"),
        ("cache_id", "<u8"),
        ("incarnation", "<u8"),
        ("session", "<u8"),
        ("cut", "<u8"),
        ("read_bound", "<i8"),
        ("lowest_key", "<i8"),
        ("watch", "<u8"),
        ("seen", "<u8"),
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
    [
        ("sequence", "<u8"),
        ("num_gradients", "<u4"),
        ("num_contributions", "<u4"),
        ("closure", "<i8"),
        ("closures_done", "<i8"),
    ]
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
        ("number", "<u8"),
        ("num_queries", "<u4"),
        ("num_full", "<u4"),
        ("num_values", "<u4"),
        ("dim", "<u4"),
        ("slot_dim", "<u4"),
        ("num_unasked", "<u4"),
    ]
)
REPLY_ROW = np.dtype([("clock", "<i8"), ("query", "<i8")])
RESTARTED = 1


@dataclasses.dataclass(frozen=True)
class Push:
    sequence: int
    gradients: np.ndarray  # PUSH_ROW [gradients]; "updates" holds the bits of the learning rate
    contributions: np.ndarray  # PUSH_ROW [contributions]
    floats: np.ndarray  # of the gradients, then of the contributions
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
    rows: np.ndarray  # REPLY_ROW [full rows, values, rows that were not asked for]
    num_bytes: int


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
        floats = cursor.take(np.dtype("<f4"), floats)
        cursor.at += -cursor.at % 8
        size = cursor.at - start
        pushes.append(Push(int(head["sequence"]), gradients, contributions, floats, size))
    counts = [int(header[f"num_{what}"]) for what in ("checks", "value_checks", "full", "values")]
    packed = cursor.take(np.dtype("u1"), sum(counts) * int(header["key_bytes"]))
    queries = [
        int(header["lowest_key"]) + int.from_bytes(key.tobytes(), "little")
        for key in packed.reshape(sum(counts), int(header["key_bytes"]))
    ]
    bases = _varints(cursor.take(np.dtype("u1"), int(header["base_bytes"])))
    cursor.at += int(header["padding"])
    assert cursor.at % 8 == 0
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
    full, values, unasked = (int(header[f"num_{what}"]) for what in ("full", "values", "unasked"))
    rows = cursor.take(REPLY_ROW, full + values + unasked)
    dim = int(header["dim"])
    cursor.take(np.dtype("<f4"), (full + unasked) * (dim + int(header["slot_dim"])) + values * dim)
    assert cursor.at == len(cursor.bytes)
    return Reply(header, rows, cursor.at)
