"""The rows of tables in tensor bundles: every shard writes and reads its own part.

A part is what one shard wrote: the tensors NAME/shard_S/keys, values, slots and clocks, in slices
of a few MB with a checksum each, and NAME/shard_S/config, JSON text that says what they are. A part
may hold only what changed since that of another bundle, which its config then names: `chains.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.storage.checkpoints.increments import Chain, Link, part_name, read_links
from het_tf.storage.checkpoints.snapshots import Cut, on_shards
from het_tf.storage.checkpoints.table_schema import (
    describe,
    takes_ages,
    takes_clocks,
    takes_sketches,
    takes_slots,
)
from het_tf.tables.table import EmbeddingTable

# Takes parts that are to be written later, where somebody wants them.
_later: contextvars.ContextVar[tuple[list[Parts], Chain | None] | None] = contextvars.ContextVar(
    "later", default=None
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a checkpoint that are to be written.

    Attributes:
      cut: their rows.
      snapshots: what parts of a table have in common with each other and with no others, by table.
    """

    cut: Cut
    snapshots: Mapping[str, str]

    def write(self, prefix: str) -> list[str]:
        """Writes a bundle a shard, in the folder PREFIX_temp, and lets go of the rows.

        Args:
          prefix: path.

        Returns:
          The prefixes of the bundles, for `tf.raw_ops.MergeV2Checkpoints`.

        Raises:
          tf.errors.OpError: a file cannot be written, or a parameter server is down. Then the
            folder is gone.
        """
        cut, folder = self.cut, f"{prefix}_temp"
        prefixes = {shard: f"{folder}/{i:05d}" for i, shard in enumerate(cut.shards)}

        def save(part: tuple[str, int], handle: tf.Tensor, of: Any) -> None:
            name, shard = part
            table = cut.tables[name]
            config = describe(table) | {"shard": shard, "rows": int(of.rows)}
            config["snapshot"] = self.snapshots[name]
            if part in cut.numbers:
                config |= {"cut": cut.numbers[part], "at": int(of.time)}
            if part in cut.since:
                since = {"checkpoint": cut.base, "cut": cut.since[part]}
                config |= {"since": since, "dropped": int(of.dropped)}
            if int(of.candidates) >= 0:
                config |= {"candidates": int(of.candidates), "admission": table.admission}
            ops.table_save(
                handle,
                of.snapshot,
                prefix=prefixes[part],
                part=part_name(name, shard),
                config=json.dumps(config),
            ).numpy()

        try:
            tf.io.gfile.makedirs(folder)
        except BaseException:
            cut.drop()
            raise
        try:
            cut.write(save)
        except BaseException:
            remove([folder])
            raise
        return list(prefixes.values())


def new_snapshot() -> str:
    """A name that no other save of a table has."""
    return uuid.uuid4().hex


def save_parts(
    tables: Mapping[str, EmbeddingTable], prefix: str, snapshots: Mapping[str, str]
) -> list[str]:
    """Writes the rows that the tables have now, or leaves them for `rows_later`: see `Parts`."""
    later = _later.get()
    if later is None:
        return Parts(Cut(tables), snapshots).write(prefix)
    parts, chain = later
    parts.append(Parts(Cut(tables, chain), snapshots))
    return []


@contextlib.contextmanager
def rows_later(chain: Chain | None = None) -> Iterator[list[Parts]]:
    """Has checkpoints that are written in this context lack their rows, whose parts it gives.

    After an error they are dropped.

    Args:
      chain: whose next checkpoint it is.
    """
    parts: list[Parts] = []
    token = _later.set((parts, chain))
    try:
        yield parts
    except BaseException:
        for each in parts:
            each.cut.drop()
        raise
    finally:
        _later.reset(token)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The rows of a table in a bundle, all of which were read and found to be right.

    Attributes:
      name: of the table in the bundle.
      links: the bundles that have the rows.
      slots, clocks, ages, sketches: whether the table takes those, too.
    """

    name: str
    links: list[Link]
    slots: bool
    clocks: bool
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
            "clocks": self.clocks,
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
            clocks=takes_clocks(config, table, where),
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
            table.note_restored()


def remove(folders: Sequence[str]) -> None:
    """Removes those of the folders that are there."""
    for folder in folders:
        try:
            if tf.io.gfile.exists(folder):
                tf.io.gfile.rmtree(folder)
        except tf.errors.OpError as error:
            logging.warning("could not remove %s: %s", folder, error)
