"""What holds the rows which changed since another one: checkpoints, and versions that are served.

The config of a part that others may build on has "cut", a number of its own, and "at", the shard's
time, from which ages are counted. That of a part that builds on another has "since": the name of
that checkpoint, in the same folder, and the "cut" of its part; and "dropped", how many keys of the
tensor of that name have no row any longer.
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

# What the config of a part must have beside what describes the table, all of it counts.
_COUNTS = ("shard", "rows", "num_shards")
# By table and shard.
Numbers = dict[tuple[str, int], int]


class Chain:
    """What checkpoints, or versions, have of tables, each building on the one before.

    Attributes:
      reader: as whom shards note what changes.
      name: of the newest one; None: there is none.
      cuts: of its parts.
      handles: of the shards that note what changes.
    """

    def __init__(self, full_every: int):
        """Shards note what changes for as long as this is there, from the first cut on.

        Args:
          full_every: one in so many builds on none.
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
        """Whether the next one is to have all rows.

        So it is where the others have come to half of the rows of the first one.
        """
        few = 2 * self._rows_since < self._rows_of_first
        return self.name is None or self._links >= self._full_every or not few

    def take(self, name: str, cuts: Numbers, rows: int, whole: bool) -> None:
        """One is complete.

        Args:
          name: of it.
          cuts: of its parts.
          rows: that it has.
          whole: whether those are all.
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
        """Shards need not note what changes any longer."""
        _forget(self.reader, self.handles)
        self.handles.clear()


def _forget(reader: str, handles: Sequence[tf.Tensor]) -> None:
    for handle in handles:
        with contextlib.suppress(tf.errors.OpError):  # its server is gone
            ops.table_forget_reader(handle, reader)


@dataclasses.dataclass(frozen=True)
class Link:
    """What a checkpoint has of a table.

    Attributes:
      prefix: of the checkpoint.
      configs: of its parts, by shard.
    """

    prefix: str
    configs: list[dict[str, Any]]


def part_name(table: str, shard: int) -> str:
    """What the names of a part's tensors begin with."""
    return f"{table}/shard_{shard}"


def is_of_part(tensor: str) -> bool:
    """Whether a tensor of that name belongs to a part: what is tracked has longer names."""
    return re.search(r"/shard_\d+/\w+$", tensor) is not None


def find_table(prefix: str, snapshot: str) -> str:
    """The name that a table has in a checkpoint.

    Args:
      prefix: of the checkpoint.
      snapshot: what the configs of its parts say of that name.

    Raises:
      tf.errors.DataLossError: none says so.
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
    """The checkpoints that a table is restored from, in their order.

    Args:
      prefix: of the last of them.
      table: name in the checkpoints.

    Raises:
      tf.errors.NotFoundError: one is not there, or lacks the table or a part of it.
      tf.errors.DataLossError: one is damaged, or another one than that on which the next builds.
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
        cuts = [each.get("cut") for each in older.configs]
        if cuts != [each["since"]["cut"] for each in newer.configs]:
            raise tf.errors.DataLossError(
                None, None, f"{builds}, which is not what it was then: it was written again"
            )
        if any(base == link.prefix for link in links):
            raise tf.errors.DataLossError(None, None, f"{builds}, and that on it")
        links.insert(0, older)
    return links


def base_of(prefix: str) -> str | None:
    """Prefix of the checkpoint that one builds on; None: it has all rows, or is damaged.

    Raises:
      Exception: it cannot be read now.
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
        pass  # what config says
    return None


def _read_configs(prefix: str, table: str) -> list[dict[str, Any]]:
    """The configs of all parts of a table."""
    # `tf.train.load_checkpoint` would take a folder of this name for its latest checkpoint.
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
    """Whether this is the config of that shard's part."""
    counts = [config.get(name) for name in _COUNTS] + [config.get("candidates", 0)]
    if counts[0] != shard:
        return False
    time = config.get("time")
    if not all(is_count(each) for each in (*counts, 0 if time is None else time)):
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
