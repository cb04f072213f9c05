"""Incremental snapshots: the rows that changed since an earlier snapshot.

Checkpoints and published versions use them. A part of a checkpoint that can be a base has these
fields in its config: "cut", the random number of the part, and "at", the shard's time of the
snapshot, from which ages are counted. An incremental part also has "since" and "dropped". "since"
has the name of the base checkpoint, in the same folder, and the "cut" of the base's part. "dropped"
is the number of keys in the tensor of this name, which have lost their row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from het_tf import ops
from het_tf.runtime import deferred_destroy
from het_tf.storage.checkpoints.table_schema import check_description, is_count

# Required numbers in the config of a part, besides the description of the table.
_COUNTS = ("shard", "rows", "num_shards")
# Numbers of snapshots by table and shard.
Numbers = dict[tuple[str, int], int]


class Chain:
    """A chain of snapshots: a full one and the incremental ones that follow it.

    A snapshot belongs to a checkpoint or to a published version.

    Attributes:
      reader: name under which the shards track changed rows for this chain.
      name: name of the newest checkpoint or version. None: there is none.
      cuts: numbers of the newest snapshot, by table and shard.
      handles: handles of the shards that track changed rows.
    """

    def __init__(self, full_every: int):
        """Creates an empty chain.

        The shards track changed rows from the first snapshot until `end`, or until this object is
        garbage-collected.

        Args:
          full_every: one of `full_every` snapshots is full.
        """
        self.reader = uuid.uuid4().hex
        self.name: str | None = None
        self.cuts: Numbers = {}
        self.handles: list[tf.Tensor] = []
        self._full_every = full_every
        self._links = self._rows_of_first = self._rows_since = 0
        deferred_destroy.destroy_after(self, functools.partial(_forget, self.reader, self.handles))

    @property
    def ends(self) -> bool:
        """Whether the next snapshot must have all rows.

        It must if there is no snapshot yet, after `full_every` snapshots, and when the incremental
        snapshots together have at least half as many rows as the full one.
        """
        few = 2 * self._rows_since < self._rows_of_first
        return self.name is None or self._links >= self._full_every or not few

    def take(self, name: str, cuts: Numbers, rows: int, whole: bool) -> None:
        """Appends a checkpoint or version after it was written completely.

        Args:
          name: name of the checkpoint or version.
          cuts: numbers of its snapshot, by table and shard.
          rows: number of its rows.
          whole: whether it has all rows.
        """
        if whole:
            self._links = self._rows_of_first = self._rows_since = 0
        self._links += 1
        if whole:
            self._rows_of_first = rows
        else:
            self._rows_since += rows
        self.name, self.cuts = name, cuts

    def end(self) -> None:
        """Ends the tracking of changed rows on the shards."""
        _forget(self.reader, self.handles)
        self.handles.clear()


def _forget(reader: str, handles: Sequence[tf.Tensor]) -> None:
    for handle in handles:
        with contextlib.suppress(tf.errors.OpError):  # The server is gone.
            ops.table_forget_reader(handle, reader)


@dataclasses.dataclass(frozen=True)
class Link:
    """The parts of a table in one checkpoint of a chain.

    Attributes:
      prefix: prefix of the checkpoint.
      configs: configs of the parts, by shard.
    """

    prefix: str
    configs: list[dict[str, Any]]


def part_name(table: str, shard: int) -> str:
    """Returns the prefix of the names of a part's tensors."""
    return f"{table}/shard_{shard}"


def is_of_part(tensor: str) -> bool:
    """Whether a tensor belongs to a part. Other tensors of a checkpoint have longer names."""
    return re.search(r"/shard_\d+/\w+$", tensor) is not None


def find_table(prefix: str, snapshot: str) -> str:
    """Returns the name of a table in a checkpoint.

    Args:
      prefix: prefix of the checkpoint.
      snapshot: random name of the save, in the configs of the table's parts.

    Raises:
      tf.errors.DataLossError: no part has this `snapshot`.
    """
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    first = part_name("", 0) + "/config"
    others = []
    for key in sorted(reader.get_variable_to_shape_map()):
        if key.endswith(first):
            try:
                if json.loads(reader.get_tensor(key))["snapshot"] == snapshot:
                    return key.removesuffix(first)
                others.append(f"{key} is of another snapshot")
            # The reader's errors have no common class.
            except Exception as error:
                others.append(f"{key} is damaged: {error}")
    found = "; ".join(others) or f"{first} is missing"
    raise tf.errors.DataLossError(
        None, None, f"checkpoint {prefix} has no part of snapshot {snapshot}: {found}"
    )


def read_links(prefix: str, table: str) -> list[Link]:
    """Returns the checkpoints from which a table is restored, from the full one to the newest.

    Args:
      prefix: prefix of the newest checkpoint.
      table: name of the table in the checkpoints.

    Raises:
      tf.errors.NotFoundError: a checkpoint is missing, or lacks the table or a part of the table.
      tf.errors.DataLossError: a checkpoint is damaged, or a base was replaced by another checkpoint
        of its name.
    """
    links = [Link(prefix, _read_configs(prefix, table))]
    while (since := links[0].configs[0].get("since")) is not None:
        newer = links[0]
        base = f"{newer.prefix.rpartition('/')[0]}/{since['checkpoint']}"
        builds = f"checkpoint {newer.prefix}, {table} builds on {base}"
        try:
            older = Link(base, _read_configs(base, table))
        except tf.errors.OpError as error:
            raise type(error)(None, None, f"{builds}: {error.message}") from error
        cuts = [config.get("cut") for config in older.configs]
        if cuts != [config["since"]["cut"] for config in newer.configs]:
            raise tf.errors.DataLossError(
                None, None, f"{builds}, which is not what it was then: it was written again"
            )
        if any(base == link.prefix for link in links):
            raise tf.errors.DataLossError(None, None, f"{builds}, and that on it")
        links.insert(0, older)
    return links


def base_of(prefix: str) -> str | None:
    """Returns the prefix of a checkpoint's base. None: it has all rows, or is damaged.

    Raises:
      Exception: the checkpoint cannot be read now.
    """
    try:
        reader = tf.compat.v1.train.NewCheckpointReader(prefix)
        for name in reader.get_variable_to_shape_map():
            if name.endswith("/shard_0/config"):
                since = json.loads(reader.get_tensor(name)).get("since")
                if since is not None:
                    return f"{prefix.rpartition('/')[0]}/{since['checkpoint']}"
    except (tf.errors.DataLossError, tf.errors.NotFoundError):
        pass
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass  # The config is damaged.
    return None


def _read_configs(prefix: str, table: str) -> list[dict[str, Any]]:
    """Reads the configs of all parts of a table."""
    # `tf.train.load_checkpoint` would open the latest checkpoint in a folder of this name.
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    configs: list[dict[str, Any]] = []
    while not configs or len(configs) < configs[0]["num_shards"]:
        key = f"{part_name(table, len(configs))}/config"
        where = f"checkpoint {prefix}, {key}"
        if not reader.has_tensor(key):
            raise tf.errors.NotFoundError(None, None, f"{where} is missing")
        try:
            config = json.loads(reader.get_tensor(key))
            check_description(config)
            if not _is_valid(config, len(configs)):
                raise ValueError(f"it says {config}")
            if configs and config["num_shards"] != configs[0]["num_shards"]:
                raise ValueError(f"it is of {config['num_shards']} shards, the first is not")
            if configs and config.get("snapshot") != configs[0].get("snapshot"):
                raise ValueError("it is of another snapshot than the first")
            if configs and _base_name(config) != _base_name(configs[0]):
                raise ValueError(f"it builds on {_base_name(config)}, the first does not")
        # The reader's errors have no common class.
        except Exception as error:
            raise tf.errors.DataLossError(None, None, f"{where} is damaged: {error}") from error
        configs.append(config)
    if reader.has_tensor(f"{part_name(table, len(configs))}/config"):
        raise tf.errors.DataLossError(
            None, None, f"checkpoint {prefix}, {table} has more than {len(configs)} parts"
        )
    return configs


def _is_valid(config: dict[str, Any], shard: int) -> bool:
    """Whether `config` is a valid config of the part of `shard`."""
    counts = [config.get(name) for name in _COUNTS] + [config.get("candidates", 0)]
    if counts[0] != shard:
        return False
    time = config.get("time")
    if not all(is_count(number) for number in (*counts, 0 if time is None else time)):
        return False
    if not isinstance(config.get("admission", ""), str):
        return False
    if "since" in config:
        since = config["since"]
        name, numbers = since["checkpoint"], (config["dropped"], config["at"])
        return name == name.rpartition("/")[2] != "" and all(map(is_count, numbers))
    return True


def _base_name(config: dict[str, Any]) -> str | None:
    return config["since"]["checkpoint"] if "since" in config else None
