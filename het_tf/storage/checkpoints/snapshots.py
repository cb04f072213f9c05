"""Snapshots of tables, which the shards write while training continues."""

from __future__ import annotations

import atexit
import collections
import concurrent.futures
import contextlib
import functools
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from het_tf import ops
from het_tf.runtime.threads import call_apart
from het_tf.storage.checkpoints.increments import Chain, Numbers
from het_tf.tables.table import EmbeddingTable

# Running calls, and the folder that every call writes into. The process waits for them at exit.
_under_way: dict[concurrent.futures.Future[None], str] = {}


def wait_for_writes(folder: str) -> None:
    """Waits for all running calls that write into a folder. Drops their errors."""
    for call, writes_into in list(_under_way.items()):
        if writes_into == os.path.realpath(folder):
            call.exception()


class Background:
    """Runs one call at a time in a background thread. The process waits for the call at exit."""

    def __init__(self, folder: str) -> None:
        """Stores the folder that the calls write into."""
        self._folder = os.path.realpath(folder)
        self._call: concurrent.futures.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._call is not None and not self._call.done()

    def start(self, call: Callable[..., None], *args: Any) -> None:
        """Starts a call. REQUIRES: `wait` was called after the previous `start`."""
        assert self._call is None
        _wait_at_exit()
        self._call = call_apart(call, *args)
        _under_way[self._call] = self._folder
        self._call.add_done_callback(_under_way.pop)

    def wait(self) -> None:
        """Waits until no call is running.

        Raises:
          Exception: the error of the last call. It is raised once.
        """
        if (call := self._call) is None:
            return
        call.exception()  # Waits for the call.
        self._call = None
        call.result()


@functools.cache
def _wait_at_exit() -> None:
    """Registers an exit handler that waits for running calls.

    Exit handlers run in reverse order. A cluster that was started earlier ends after this handler.
    """

    def wait() -> None:
        for call in list(_under_way):
            call.exception()

    atexit.register(wait)


# A shard has one snapshot at a time. This lock allows one `Cut` at a time in this process. One
# thread may acquire it and another one may release it.
_cutting = threading.Lock()

# Owner of this program's snapshots. A shard releases the owner's previous snapshot when it takes a
# new one. The previous snapshot may be unknown here, if its op failed with another server's error.
_OWNER = uuid.uuid4().hex

T = TypeVar("T")


class Cut:
    """A snapshot of the rows of tables. The tables can be updated while it is written.

    Until it is written or dropped, other threads that create a `Cut` wait.

    Attributes:
      tables: tables by name.
      shards: all shards of the tables, as (name of the table, index of the shard).
      whole: whether it has all rows. If not, it has the rows that changed since the chain's newest
        snapshot.
      rows: number of rows.
      numbers: numbers of the snapshot for the chain, by shard. Empty without a chain.
      base: name of the chain's newest checkpoint or version. None if this snapshot has all rows.
      since: numbers of the snapshot of `base`, by shard. Empty without a base.
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable], chain: Chain | None = None):
        """Takes snapshots of all shards.

        Args:
          tables: tables by any names.
          chain: chain of the checkpoints or versions, for an incremental snapshot.

        Raises:
          tf.errors.OpError: a parameter server is down.
        """
        self.tables = tables
        self.shards = [(name, s) for name, table in tables.items() for s in range(table.num_shards)]
        # Outputs of `ops.table_cut` or `ops.table_cut_changed`, by shard.
        self._cuts: dict[tuple[str, int], Any] = {}
        self.whole = True
        self.numbers: Numbers = {}
        self.base: str | None = None
        self.since: Numbers = {}
        _cutting.acquire()
        try:
            if chain is None:
                for name, shard in self.shards:
                    self._cuts[name, shard] = ops.table_cut(
                        tables[name].handle(shard), owner=_OWNER
                    )
            else:
                self._continue(chain)
            self.rows = sum(int(cut.rows) for cut in self._cuts.values())
        except BaseException:
            self.drop()
            raise

    def _continue(self, chain: Chain) -> None:
        chain.handles[:] = [self.tables[name].handle(shard) for name, shard in self.shards]
        self.whole = chain.ends
        while True:
            for shard, handle in zip(self.shards, chain.handles, strict=True):
                since = 0 if self.whole else chain.cuts.get(shard, 0)
                self._cuts[shard] = ops.table_cut_changed(handle, chain.reader, since, owner=_OWNER)
            if self.whole or not any(bool(cut.whole) for cut in self._cuts.values()):
                break
            self.whole = True
            self._end()
        self.numbers = {shard: int(cut.number) for shard, cut in self._cuts.items()}
        if not self.whole:
            self.base, self.since = chain.name, dict(chain.cuts)

    def write(self, save: Callable[[tuple[str, int], tf.Tensor, Any], T]) -> list[T]:
        """Calls `save` for every shard, then releases the snapshot. Allowed in any thread.

        Args:
          save: writes the rows of a shard. Its arguments are the shard, the shard's handle, and the
            outputs of the snapshot op.

        Returns:
          The results of `save`, in the order of the shards.

        Raises:
          Exception: the first error of `save`.
        """

        def save_shard(name: str, shard: int) -> T:
            return save((name, shard), self.tables[name].handle(shard), self._cuts[name, shard])

        try:
            written = on_shards(self.tables, save_shard)
        except BaseException:
            self.drop()
            raise
        _cutting.release()
        return [written[shard] for shard in self.shards]

    def drop(self) -> None:
        """Releases the snapshot without writing it."""
        self._end()
        _cutting.release()

    def _end(self) -> None:
        end_cuts(self.tables)
        self._cuts.clear()


def would_wait() -> bool:
    """Whether a new `Cut` would wait for a snapshot that is not yet written or dropped."""
    return _cutting.locked()


def end_cuts(tables: Mapping[str, EmbeddingTable]) -> None:
    """Releases the snapshots of all shards.

    A shard with a snapshot delays all calls that set or drop rows. This function calls every shard,
    because a snapshot may be unknown here: its op can fail with the error of another server.
    """
    for table in tables.values():
        for shard in range(table.num_shards):
            with contextlib.suppress(tf.errors.OpError):  # The server is gone.
                ops.table_cut_end(table.handle(shard), owner=_OWNER)


def on_shards(
    tables: Mapping[str, EmbeddingTable], call: Callable[[str, int], Any]
) -> dict[tuple[str, int], Any]:
    """Calls `call(name, shard)` for every shard, concurrently for the devices of the shards."""
    of_device: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, table in tables.items():
        for shard in range(table.num_shards):
            of_device[table.handle(shard).device].append((name, shard))

    def call_all(shards: Sequence[tuple[str, int]]) -> list[Any]:
        return [call(*shard) for shard in shards]

    calls = {device: call_apart(call_all, shards) for device, shards in of_device.items()}
    errors = [error for future in calls.values() if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return {
        shard: result
        for device, shards in of_device.items()
        for shard, result in zip(shards, calls[device].result(), strict=True)
    }
