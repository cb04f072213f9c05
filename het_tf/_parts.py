"""The rows of tables in tensor bundles: every shard writes and reads its own part.

A part is what one shard wrote: the tensors NAME/shard_S/keys, values, slots and clocks, in slices
of a few MB with a checksum each, and NAME/shard_S/config, JSON text that says what they are.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf._threads import call_in_daemon
from het_tf.table import EmbeddingTable

_FORMAT = 1

# A shard has one snapshot at a time. Whoever cuts several of them waits here for others who do. A
# thread may give back what another one took.
saving = threading.Lock()

# Takes cuts that are to be written later, where somebody wants them.
_later: contextvars.ContextVar[list[Cut] | None] = contextvars.ContextVar("later", default=None)


class Cut:
    """The rows that tables have when this is made, to be written while they are updated.

    Others who want to cut wait until it is written or dropped.
    """

    def __init__(self, tables: Mapping[str, EmbeddingTable]):
        """Cuts all shards.

        Args:
          tables: by name in the bundles.

        Raises:
          tf.errors.OpError: a parameter server is down.
        """
        self._tables = tables
        self._shards = [(name, s) for name, each in tables.items() for s in range(each.num_shards)]
        self._snapshots: dict[tuple[str, int], tuple[tf.Tensor, tf.Tensor]] = {}
        saving.acquire()
        try:
            for name, shard in self._shards:
                self._snapshots[name, shard] = ops.table_cut(tables[name].handle(shard))
        except BaseException:
            self.drop()
            raise

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
            table, (snapshot, rows) = self._tables[name], self._snapshots[name, shard]
            config = describe(table) | {"shard": shard, "rows": int(rows)}
            ops.table_save(
                table.handle(shard),
                snapshot,
                prefix=prefixes[name, shard],
                part=_part(name, shard),
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
        for snapshot, _ in self._snapshots.values():
            with contextlib.suppress(tf.errors.OpError):  # its server is gone
                ops.table_cut_end(snapshot)
        saving.release()


def save_parts(tables: Mapping[str, EmbeddingTable], prefix: str) -> list[str]:
    """Writes the rows that the tables have now, or leaves them for `rows_later`: see `Cut`."""
    cut, later = Cut(tables), _later.get()
    if later is None:
        return cut.write(prefix)
    later.append(cut)
    return []


@contextlib.contextmanager
def rows_later() -> Iterator[list[Cut]]:
    """Has checkpoints that are written in this context lack their rows, whose cuts it gives.

    After an error the cuts are dropped.
    """
    cuts: list[Cut] = []
    token = _later.set(cuts)
    try:
        yield cuts
    except BaseException:
        for cut in cuts:
            cut.drop()
        raise
    finally:
        _later.reset(token)


def restore_parts(tables: Mapping[str, EmbeddingTable], prefix: str) -> None:
    """Replaces the rows of tables with those in a bundle. Their caches drop what they hold.

    Everything is read and checked before the first row is replaced.

    Args:
      tables: by name in the bundle. The number of shards may be another than that which saved.
      prefix: path of the bundle.

    Raises:
      ValueError: the width of a table is another. No table has changed.
      tf.errors.NotFoundError: there is no such bundle, or it lacks a table or a part of one. No
        table has changed.
      tf.errors.OpError: a part is damaged, which the message names, and no table has changed; or a
        parameter server is down or out of memory.
    """
    # `tf.train.load_checkpoint` would take a folder of this name for its latest checkpoint.
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    configs = {name: _read_configs(reader, prefix, name) for name in tables}
    slots = {
        name: takes_slots(configs[name][0], table, f"checkpoint {prefix}, {name}")
        for name, table in tables.items()
    }

    def run(
        op: Callable[..., tf.Tensor], attributes: Callable[[str], dict[str, int]]
    ) -> dict[tuple[str, int], int]:
        def of_shard(name: str, shard: int) -> int:
            table, parts = tables[name], configs[name]
            # With as many shards as there were, each finds its rows in its own part.
            mine = [shard] if len(parts) == table.num_shards else range(len(parts))
            owned = op(
                table.handle(shard),
                prefix=prefix,
                parts=[_part(name, part) for part in mine],
                rows=tf.constant([parts[part]["rows"] for part in mine], tf.int64),
                slots=slots[name],
                ages=_takes_ages(configs[name][0], table),
                **attributes(name),
            )
            return int(owned)

        return on_shards(tables, of_shard)

    owned = run(ops.table_check, lambda name: {})
    for name, table in tables.items():
        found = sum(owned[name, shard] for shard in range(table.num_shards))
        expected = sum(part["rows"] for part in configs[name])
        if found != expected:
            raise tf.errors.DataLossError(
                None,
                None,
                f"checkpoint {prefix}, {name}: {expected} rows are there, but {found} belong to"
                " the shards that read them",
            )
    times = {
        name: configs[name][0].get("time") if _takes_ages(configs[name][0], table) else None
        for name, table in tables.items()
    }
    try:
        run(ops.table_restore, lambda name: {"time": -1 if times[name] is None else times[name]})
    finally:
        for name, table in tables.items():
            table.time = times[name]
            table.clear_caches()


def describe(table: EmbeddingTable) -> dict[str, Any]:
    """What a file says of the table whose rows it holds."""
    ages = {"ages": table.age_time, "time": table.time} if table.age_time else {}
    return {"format": _FORMAT, "slot_dim": table.slot_dim, **table.row_attributes, **ages}


def takes_slots(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> bool:
    """Whether saved rows fit a table with their slots, or only without them, which is logged.

    Args:
      config: `describe` of the table that was saved.
      table: that is to have the rows.
      where: they are, for messages.

    Raises:
      ValueError: the rows have another width, or another format.
    """
    own = describe(table)
    if config.get("format") != _FORMAT:
        raise ValueError(f"{where} has format {config.get('format')!r}, expected {_FORMAT}")
    if config["dim"] != own["dim"]:
        raise ValueError(f"{where} has rows of {config['dim']} columns, the table {own['dim']}")
    if any(config[x] != own[x] for x in ("initializer", "seed")):
        logging.warning(
            "%s was saved with initializer %r and seed %d; with %r and %d of this table, rows that"
            " were never updated read otherwise",
            where,
            *(each[x] for each in (config, own) for x in ("initializer", "seed")),
        )
    kinds = [each["optimizer"].split()[0] for each in (config, own)]
    if kinds[0] == kinds[1] and config["slot_dim"] == own["slot_dim"]:
        return True
    logging.warning(
        "%s was saved with optimizer %r: values are kept, and the slots of %r start afresh",
        where,
        config["optimizer"],
        own["optimizer"],
    )
    return False


def _takes_ages(config: Mapping[str, Any], table: EmbeddingTable) -> bool:
    """Whether the ages of saved rows mean something in the table."""
    return table.age_time is not None and config.get("ages") == table.age_time


def _part(name: str, shard: int) -> str:
    return f"{name}/shard_{shard}"


def _read_configs(reader: Any, prefix: str, name: str) -> list[dict[str, Any]]:
    """The configs of all parts of a table."""
    configs: list[dict[str, Any]] = []
    while not configs or len(configs) < configs[0]["num_shards"]:
        key = f"{_part(name, len(configs))}/config"
        where = f"checkpoint {prefix}, {key}"
        if not reader.has_tensor(key):
            raise tf.errors.NotFoundError(None, None, f"{where} is missing")
        try:
            config = json.loads(reader.get_tensor(key))
            complete = {"format", "dim", "slot_dim", "optimizer", "initializer", "seed"} <= set(
                config
            )
            numbers = [config[x] for x in ("shard", "rows", "num_shards")]
            if not complete or numbers[0] != len(configs) or min(numbers) < 0:
                raise ValueError(f"it says {config}")
            if configs and config["num_shards"] != configs[0]["num_shards"]:
                raise ValueError(f"it is of {config['num_shards']} shards, the first is not")
        # The reader's errors have no common class.
        except Exception as error:
            raise tf.errors.DataLossError(None, None, f"{where} is damaged: {error}") from error
        configs.append(config)
    return configs


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
