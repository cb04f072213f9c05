"""The rows that tables have at one moment, which their shards write while training goes on."""

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

# Calls under way, which the end of the process waits for, and the folder that each writes into.
_under_way: dict[concurrent.futures.Future[None], str] = {}


def wait_for_writes(folder: str) -> None:
    """Returns when no call that was begun before writes into a folder, whatever came of it."""
    for call, writes_into in list(_under_way.items()):
        if writes_into == os.path.realpath(folder):
            call.exception()


class Background:
    """Makes one call at a time in a thread of its own. The end of the program waits for it."""

    def __init__(self, folder: str) -> None:
        """folder: what the calls write into."""
        self._folder = os.path.realpath(folder)
        self._call: concurrent.futures.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._call is not None and not self._call.done()

    def start(self, call: Callable[..., None], *args: Any) -> None:
        """Begins a call. REQUIRES: the one before was waited for."""
        assert self._call is None
        _wait_at_exit()
        self._call = call_apart(call, *args)
        _under_way[self._call] = self._folder
        self._call.add_done_callback(_under_way.pop)

    def wait(self) -> None:
        """Returns when no call is under way.

        Raises:
          Exception: what the last call raised. It is raised once.
        """
        if (call := self._call) is None:
            return
        call.exception()  # waits
        self._call = None
        call.result()


@functools.cache
def _wait_at_exit() -> None:
    """Before a cluster ends that was started before."""

    def wait() -> None:
        for call in list(_under_way):
            call.exception()

    atexit.register(wait)


# A shard has one snapshot at a time. Whoever cuts several of them waits here for others who do. A
# thread may give back what another one took.
_cutting = threading.Lock()

# As whom this program cuts. A shard lets go of what it has cut before: this program lost it, where
# the op that cut it had the error of another server.
_OWNER = uuid.uuid4().hex

T = TypeVar("T")


class Cut:
    """The rows that tables have when this is made, to be written while they are updated.

    Others who want to cut wait until it is written or dropped.

    Attributes:
      tables: by name.
      shards: of the tables, by name and number.
      whole: whether it has all rows, or those that changed since the last one of the chain.
      rows: how many.
      numbers: of the cuts, for the chain; empty without one.
      base: name of that of the chain since which its rows changed; None if it has all rows.
      since: the numbers of the cuts of that; empty without one.
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable], chain: Chain | None = None):
        """Cuts all shards.

        Args:
          tables: by name, which may be any.
          chain: whose next files this is for.

        Raises:
          tf.errors.OpError: a parameter server is down.
        """
        self.tables = tables
        self.shards = [(name, s) for name, each in tables.items() for s in range(each.num_shards)]
        # What the ops gave.
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
        """Has every shard write its rows, and lets go of them. May be called in any thread.

        Args:
          save: called with a shard, its table's handle there, and what the op gave that cut it.

        Returns:
          What `save` returned, in the order of the shards.

        Raises:
          Exception: the first that `save` raised.
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
        """Lets go of the rows instead of writing them."""
        self._end()
        _cutting.release()

    def _end(self) -> None:
        end_cuts(self.tables)
        self._cuts.clear()


def would_wait() -> bool:
    """Whether somebody has cut rows who has not written them yet."""
    return _cutting.locked()


def end_cuts(tables: Mapping[str, EmbeddingTable]) -> None:
    """Lets go of what was cut of shards: until then a shard waits with setting or dropping rows.

    Of all of them: one that an op has cut may not be known here, where the op had another server's
    error.
    """
    for table in tables.values():
        for shard in range(table.num_shards):
            with contextlib.suppress(tf.errors.OpError):  # its server is gone
                ops.table_cut_end(table.handle(shard), owner=_OWNER)


def on_shards(
    tables: Mapping[str, EmbeddingTable], call: Callable[[str, int], Any]
) -> dict[tuple[str, int], Any]:
    """Calls `call(name, shard)` for every shard: those of a device in turn, devices together."""
    of_device: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    for name, table in tables.items():
        for shard in range(table.num_shards):
            of_device[table.handle(shard).device].append((name, shard))

    def call_all(shards: Sequence[tuple[str, int]]) -> list[Any]:
        return [call(*shard) for shard in shards]

    calls = {device: call_apart(call_all, shards) for device, shards in of_device.items()}
    errors = [error for each in calls.values() if (error := each.exception()) is not None]
    if errors:
        raise errors[0]
    return {
        shard: result
        for device, shards in of_device.items()
        for shard, result in zip(shards, calls[device].result(), strict=True)
    }
