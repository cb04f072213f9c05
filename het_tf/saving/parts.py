"""The rows of tables in tensor bundles: every shard writes and reads its own part.

A part is what one shard wrote: the tensors NAME/shard_S/keys, values, slots and clocks, in slices
of a few MB with a checksum each, and NAME/shard_S/config, JSON text that says what they are. A part
may hold only what changed since that of another bundle, which its config then names: `chains.py`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf._threads import call_in_daemon
from het_tf.saving.chains import Chain, Link, Numbers, part_name, read_links
from het_tf.saving.descriptions import describe, takes_ages, takes_sketches, takes_slots
from het_tf.table import EmbeddingTable

# A shard has one snapshot at a time. Whoever cuts several of them waits here for others who do. A
# thread may give back what another one took.
saving = threading.Lock()

# Takes cuts that are to be written later, where somebody wants them.
_later: contextvars.ContextVar[tuple[list[Cut], Chain | None] | None] = contextvars.ContextVar(
    "later", default=None
)


class Cut:
    """The rows that tables have when this is made, to be written while they are updated.

    Others who want to cut wait until it is written or dropped.

    Attributes:
      whole: whether it has all rows, or those that changed since the last one of the chain.
      rows: how many.
      numbers: of the cuts, for the chain; empty without one.
    """

    def __init__(
        self,
        tables: Mapping[str, EmbeddingTable],
        snapshots: Mapping[str, str],
        chain: Chain | None = None,
    ):
        """Cuts all shards.

        Args:
          tables: by name in the bundles.
          snapshots: what its parts have in common with each other and with no others, by table.
          chain: whose next checkpoint this is.

        Raises:
          tf.errors.OpError: a parameter server is down.
        """
        self._tables, self._snapshots = tables, snapshots
        self._shards = [(name, s) for name, each in tables.items() for s in range(each.num_shards)]
        # What the ops gave, and what else configs say, by shard.
        self._cuts: dict[tuple[str, int], Any] = {}
        self._links: dict[tuple[str, int], dict[str, Any]] = {}
        self.whole = True
        self.numbers: Numbers = {}
        saving.acquire()
        try:
            if chain is None:
                for name, shard in self._shards:
                    self._cuts[name, shard] = ops.table_cut(tables[name].handle(shard))
            else:
                self._continue(chain)
            self.rows = sum(int(cut.rows) for cut in self._cuts.values())
        except BaseException:
            self.drop()
            raise

    def _continue(self, chain: Chain) -> None:
        chain.handles[:] = [self._tables[name].handle(shard) for name, shard in self._shards]
        self.whole = chain.ends
        while True:
            for shard, handle in zip(self._shards, chain.handles, strict=True):
                since = 0 if self.whole else chain.cuts.get(shard, 0)
                self._cuts[shard] = ops.table_cut_changed(handle, chain.reader, since)
            if self.whole or not any(bool(cut.whole) for cut in self._cuts.values()):
                break
            self.whole = True
            self._end()
        for shard, cut in self._cuts.items():
            self.numbers[shard] = int(cut.number)
            self._links[shard] = {"cut": int(cut.number), "at": int(cut.time)}
            if not self.whole:
                since = {"checkpoint": chain.name, "cut": chain.cuts[shard]}
                self._links[shard] |= {"since": since, "dropped": int(cut.dropped)}

    def write(self, prefix: str) -> list[str]:
        """Writes a bundle a shard, in the folder PREFIX_temp.

        Args:
          prefix: path.

        Returns:
          The prefixes of the bundles, for `tf.raw_ops.MergeV2Checkpoints`.

        Raises:
          tf.errors.OpError: a file cannot be written, or a parameter server is down. Then the
            folder is gone.
        """
        folder = f"{prefix}_temp"
        prefixes = {part: f"{folder}/{i:05d}" for i, part in enumerate(self._shards)}

        def save(name: str, shard: int) -> None:
            table, cut = self._tables[name], self._cuts[name, shard]
            config = describe(table) | {"shard": shard, "rows": int(cut.rows)}
            config["snapshot"] = self._snapshots[name]
            config |= self._links.get((name, shard), {})
            if int(cut.candidates) >= 0:
                config |= {"candidates": int(cut.candidates), "admission": table.admission}
            ops.table_save(
                table.handle(shard),
                cut.snapshot,
                prefix=prefixes[name, shard],
                part=part_name(name, shard),
                config=json.dumps(config),
            ).numpy()

        try:
            tf.io.gfile.makedirs(folder)
            on_shards(self._tables, save)
        except BaseException:
            self.drop()
            remove([folder])
            raise
        saving.release()
        return list(prefixes.values())

    def drop(self) -> None:
        """Lets go of the rows instead of writing them."""
        self._end()
        saving.release()

    def _end(self) -> None:
        end_cuts(self._tables, self._cuts)
        self._cuts.clear()


def end_cuts(tables: Mapping[str, EmbeddingTable], cuts: Mapping[tuple[str, int], Any]) -> None:
    """Lets go of what was cut of shards: until then a shard waits with setting or dropping rows."""
    for (name, shard), cut in cuts.items():
        with contextlib.suppress(tf.errors.OpError):  # its server is gone
            ops.table_cut_end(tables[name].handle(shard), cut.snapshot)


def new_snapshot() -> str:
    """A name that no other save of a table has."""
    return uuid.uuid4().hex


def save_parts(
    tables: Mapping[str, EmbeddingTable], prefix: str, snapshots: Mapping[str, str]
) -> list[str]:
    """Writes the rows that the tables have now, or leaves them for `rows_later`: see `Cut`."""
    if _later.get() is None:
        return Cut(tables, snapshots).write(prefix)
    cuts, chain = _later.get()
    cuts.append(Cut(tables, snapshots, chain))
    return []


@contextlib.contextmanager
def rows_later(chain: Chain | None = None) -> Iterator[list[Cut]]:
    """Has checkpoints that are written in this context lack their rows, whose cuts it gives.

    After an error the cuts are dropped.

    Args:
      chain: whose next checkpoint it is.
    """
    cuts: list[Cut] = []
    token = _later.set((cuts, chain))
    try:
        yield cuts
    except BaseException:
        for cut in cuts:
            cut.drop()
        raise
    finally:
        _later.reset(token)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The rows of a table in a bundle, all of which were read and found to be right.

    Attributes:
      name: of the table in the bundle.
      links: the bundles that have the rows.
      slots, ages, sketches: whether the table takes those, too.
    """

    name: str
    links: list[Link]
    slots: bool
    ages: bool
    sketches: bool

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Of the newest parts, by shard. All say the same of the table."""
        return self.links[-1].configs

    @property
    def time(self) -> int | None:
        """The given time, for ages that are taken."""
        return self.configs[0].get("time") if self.ages else None

    def of_shard(self, shard: int, num_shards: int, check: bool) -> dict[str, Any]:
        """What a shard is to read, or to check, as the ops take it."""
        newest = self.configs
        # With as many shards as there were, each finds its rows in its own part.
        mine = [shard] if len(newest) == num_shards else range(len(newest))
        parts = [(each.prefix, each.configs[p], newest[p]) for each in self.links for p in mine]

        def numbers(of: Callable[[dict[str, Any], dict[str, Any]], int]) -> tf.Tensor:
            return tf.constant([of(config, last) for _, config, last in parts], tf.int64)

        return {
            "prefixes": [prefix for prefix, _, _ in parts],
            "parts": [part_name(self.name, config["shard"]) for _, config, _ in parts],
            "rows": numbers(lambda config, last: config["rows"]),
            "dropped": numbers(lambda config, last: config.get("dropped", 0)),
            "elapsed": numbers(lambda config, last: last.get("at", 0) - config.get("at", 0)),
            # Every link has all counts: those of the newest are what is restored.
            "candidates": numbers(
                lambda config, last: config.get("candidates", -1) if check or config is last else -1
            ),
            "slots": self.slots,
            "ages": self.ages,
            "sketches": self.sketches,
        }


def check_parts(tables: Mapping[str, EmbeddingTable], prefix: str) -> dict[str, Saved]:
    """Reads all rows in a bundle, each on a server that is to have it, and changes nothing.

    Args:
      tables: by name in the bundle. The number of shards may be another than that which saved.
      prefix: path of the bundle.

    Returns:
      What was read, by name, for `replace_rows`.

    Raises:
      ValueError: the width of a table is another.
      tf.errors.NotFoundError: there is no such bundle, or it lacks a table or a part of one.
      tf.errors.OpError: a part is damaged, which the message names; or a parameter server is down
        or out of memory.
    """
    saved = {}
    for name, table in tables.items():
        links = read_links(prefix, name)
        config, where = links[-1].configs[0], f"checkpoint {prefix}, {name}"
        saved[name] = Saved(
            name,
            links,
            slots=takes_slots(config, table, where),
            ages=takes_ages(config, table),
            sketches=takes_sketches(config, table, where),
        )

    def check(name: str, shard: int) -> int:
        table = tables[name]
        parts = saved[name].of_shard(shard, table.num_shards, check=True)
        return int(ops.table_check(table.handle(shard), **parts))

    owned = on_shards(tables, check)
    for name, table in tables.items():
        found = sum(owned[name, shard] for shard in range(table.num_shards))
        expected = sum(
            part["rows"] + part.get("candidates", 0)
            for link in saved[name].links
            for part in link.configs
        )
        if found != expected:
            raise tf.errors.DataLossError(
                None,
                None,
                f"checkpoint {prefix}, {name}: {expected} rows and counts are there, but {found}"
                " belong to the shards that read them",
            )
    return saved


def replace_rows(tables: Mapping[str, EmbeddingTable], saved: Mapping[str, Saved]) -> None:
    """Replaces the rows of tables with those in a bundle. Their caches drop what they hold.

    Args:
      tables: by any name.
      saved: what `check_parts` gave, by that name.

    Raises:
      tf.errors.OpError: a part was damaged since it was checked, which the message names; or a
        parameter server is down or out of memory.
    """

    def replace(name: str, shard: int) -> None:
        table, of_table = tables[name], saved[name]
        parts = of_table.of_shard(shard, table.num_shards, check=False)
        time = -1 if of_table.time is None else of_table.time
        ops.table_restore(table.handle(shard), **parts, time=time).numpy()

    try:
        on_shards(tables, replace)
    finally:
        for name, table in tables.items():
            table.time = saved[name].time
            table.clear_caches()


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

    calls = {device: call_in_daemon(call_all, shards) for device, shards in of_device.items()}
    errors = [error for each in calls.values() if (error := each.exception()) is not None]
    if errors:
        raise errors[0]
    return {
        shard: result
        for device, shards in of_device.items()
        for shard, result in zip(shards, calls[device].result(), strict=True)
    }


def remove(folders: Sequence[str]) -> None:
    """Removes those of the folders that are there."""
    for folder in folders:
        try:
            if tf.io.gfile.exists(folder):
                tf.io.gfile.rmtree(folder)
        except tf.errors.OpError as error:
            logging.warning("could not remove %s: %s", folder, error)
