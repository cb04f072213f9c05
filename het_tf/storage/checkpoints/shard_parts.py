"""Rows of tables in tensor bundles. Every shard writes and reads its own part.

A part has the tensors NAME/shard_S/keys, values, slots and clocks, and NAME/shard_S/config, a
description in JSON (docs/checkpoints.md). The tensors are stored in slices of a few MB, each with a
checksum. An incremental part has the rows that changed since another bundle, which its config
names (`increments.py`).
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

# Inside `rows_later`: the list that collects the parts to be written later, and the chain.
_later: contextvars.ContextVar[tuple[list[Parts], Chain | None] | None] = contextvars.ContextVar(
    "later", default=None
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a checkpoint before they are written.

    Attributes:
      cut: snapshot of the rows.
      snapshots: random name of the save, by table. All parts of a table have it in their config.
    """

    cut: Cut
    snapshots: Mapping[str, str]

    def write(self, prefix: str) -> list[str]:
        """Writes one bundle per shard into the folder PREFIX_temp, then releases the snapshot.

        Args:
          prefix: path of the checkpoint.

        Returns:
          The prefixes of the bundles, for `tf.raw_ops.MergeV2Checkpoints`.

        Raises:
          tf.errors.OpError: a file cannot be written, or a parameter server is down. The folder is
            then removed.
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
    """Returns a random name for a save of a table."""
    return uuid.uuid4().hex


def save_parts(
    tables: Mapping[str, EmbeddingTable], prefix: str, snapshots: Mapping[str, str]
) -> list[str]:
    """Takes a snapshot of tables and writes it, see `Parts.write`.

    Inside `rows_later`, the snapshot is only added to the list of parts, and the result is empty.

    Args:
      tables: tables by name.
      prefix: path of the checkpoint.
      snapshots: random name of the save, by table.

    Returns:
      The prefixes of the bundles.
    """
    later = _later.get()
    if later is None:
        return Parts(Cut(tables), snapshots).write(prefix)
    parts, chain = later
    parts.append(Parts(Cut(tables, chain), snapshots))
    return []


@contextlib.contextmanager
def rows_later(chain: Chain | None = None) -> Iterator[list[Parts]]:
    """Leaves the rows out of checkpoints in this context. Returns a list that collects the parts.

    After an error in the context, the parts are dropped.

    Args:
      chain: chain of the checkpoints, for incremental parts.
    """
    parts: list[Parts] = []
    token = _later.set((parts, chain))
    try:
        yield parts
    except BaseException:
        for part in parts:
            part.cut.drop()
        raise
    finally:
        _later.reset(token)


@dataclasses.dataclass(frozen=True)
class Saved:
    """The verified rows of a table in a bundle.

    Attributes:
      name: name of the table in the bundle.
      links: the bundles of the rows, from the full one to the newest.
      slots, clocks, ages, sketches: whether to restore these, too.
    """

    name: str
    links: list[Link]
    slots: bool
    clocks: bool
    ages: bool
    sketches: bool

    @property
    def configs(self) -> list[dict[str, Any]]:
        """Configs of the newest parts, by shard. All describe the table in the same way."""
        return self.links[-1].configs

    @property
    def time(self) -> int | None:
        """The given time of the ages, if ages are restored."""
        return self.configs[0].get("time") if self.ages else None

    def of_shard(self, shard: int, num_shards: int, check: bool) -> dict[str, Any]:
        """Returns the arguments of `ops.table_check` or `ops.table_restore` for a shard.

        Args:
          shard: index of the shard.
          num_shards: number of shards of the table.
          check: whether the arguments are for `ops.table_check`.
        """
        newest = self.configs
        # If the number of shards is unchanged, all rows of a shard are in its own part.
        mine = [shard] if len(newest) == num_shards else range(len(newest))
        parts = [(link.prefix, link.configs[p], newest[p]) for link in self.links for p in mine]

        def numbers(of: Callable[[dict[str, Any], dict[str, Any]], int]) -> tf.Tensor:
            return tf.constant([of(config, last) for _, config, last in parts], tf.int64)

        return {
            "prefixes": [prefix for prefix, _, _ in parts],
            "parts": [part_name(self.name, config["shard"]) for _, config, _ in parts],
            "rows": numbers(lambda config, last: config["rows"]),
            "dropped": numbers(lambda config, last: config.get("dropped", 0)),
            "elapsed": numbers(lambda config, last: last.get("at", 0) - config.get("at", 0)),
            # Every link has all counts. The counts of the newest link are restored.
            "candidates": numbers(
                lambda config, last: config.get("candidates", -1) if check or config is last else -1
            ),
            "slots": self.slots,
            "clocks": self.clocks,
            "ages": self.ages,
            "sketches": self.sketches,
        }


def check_parts(tables: Mapping[str, EmbeddingTable], prefix: str) -> dict[str, Saved]:
    """Reads and verifies all rows in a bundle without changing the tables.

    Every row is read on the server that would restore it.

    Args:
      tables: tables by their name in the bundle. The number of shards may have changed.
      prefix: path of the bundle.

    Returns:
      The verified rows by name, for `replace_rows`.

    Raises:
      ValueError: a table has another width.
      tf.errors.NotFoundError: the bundle is missing, or lacks a table or a part of a table.
      tf.errors.OpError: a part is damaged, and the message names it. Or a parameter server is down
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
    """Replaces the rows of tables by the rows in a bundle. Clears the caches of the tables.

    Args:
      tables: tables by any names.
      saved: results of `check_parts`, by the same names.

    Raises:
      tf.errors.OpError: a part was damaged after `check_parts`, and the message names it. Or a
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
    """Removes the folders that exist."""
    for folder in folders:
        try:
            if tf.io.gfile.exists(folder):
                tf.io.gfile.rmtree(folder)
        except tf.errors.OpError as error:
            logging.warning("could not remove %s: %s", folder, error)
