"""What files say of the tables whose rows they hold, and what of it a table can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from absl import logging

from het_tf import lifetimes
from het_tf._arguments import INT64_MAX
from het_tf.table import EmbeddingTable

_FORMAT = 1


def describe(table: EmbeddingTable) -> dict[str, Any]:
    """What a file says of the table whose rows it holds."""
    ages = {"ages": table.age_time, "time": table.time} if table.age_time else {}
    return {**shape_of(table), "slot_dim": table.slot_dim, **table.row_attributes, **ages}


def check_description(config: Any) -> None:
    """Checks what a file says, before anything else is made of it.

    Raises:
      ValueError: a part of `describe` is missing or no such thing; the message names it.
    """
    if not isinstance(config, dict):
        raise ValueError(f"it says {config!r}")
    if "format" not in config:
        raise ValueError(f"it has no format, but {config}")
    for name in ("dim", "slot_dim"):
        if not is_count(config.get(name)):
            raise ValueError(f"it says {name} = {config.get(name)!r}")
    for name in ("optimizer", "initializer"):
        if not isinstance(config.get(name), str) or not config[name].split():
            raise ValueError(f"it says {name} = {config.get(name)!r}")
    if type(config.get("seed")) is not int:
        raise ValueError(f"it says seed = {config.get('seed')!r}")


def is_count(number: Any) -> bool:
    """Whether it is one, or a given time, that an int64 holds."""
    return type(number) is int and 0 <= number <= INT64_MAX


def shape_of(table: EmbeddingTable) -> dict[str, Any]:
    """What of `describe` a table must have in common with rows that it is to have."""
    return {"format": _FORMAT, "dim": table.dim}


def check_shape(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> None:
    """Checks that saved rows fit a table.

    Args:
      config: `shape_of`, or `describe`, of the table that was saved.
      table: that is to have the rows.
      where: they are, for messages.

    Raises:
      ValueError: the rows have another width, or another format.
    """
    if config.get("format") != _FORMAT:
        raise ValueError(f"{where} has format {config.get('format')!r}, expected {_FORMAT}")
    if config.get("dim") != table.dim:
        raise ValueError(f"{where} has rows of {config.get('dim')} columns, the table {table.dim}")


def takes_slots(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> bool:
    """Whether saved rows fit a table with their slots, or only without them, which is logged.

    Args:
      config: `describe` of the table that was saved.
      table: that is to have the rows.
      where: they are, for messages.

    Raises:
      ValueError: the rows have another width, or another format.
    """
    check_shape(config, table, where)
    own = describe(table)
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


def takes_clocks(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> bool:
    """Whether the clocks of saved rows mean something in the table; else they begin anew."""
    saved, own = config.get("clock"), table.row_attributes["clock"]
    if saved in (None, own):
        return True
    logging.warning(
        "%s was saved with clock=%r: values are kept, and the clocks of %r begin anew",
        where,
        saved,
        own,
    )
    return False


def takes_ages(config: Mapping[str, Any], table: EmbeddingTable) -> bool:
    """Whether the ages of saved rows mean something in the table."""
    return table.age_time is not None and config.get("ages") == table.age_time


def takes_sketches(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> bool:
    """Whether saved sketches count for the same ids in the same places as those of the table."""
    if not lifetimes.has_sketch(config.get("admission", "")):
        return False
    if config["admission"] == table.admission:
        return True
    logging.warning(
        "%s was saved with admission %r; sketches of %r begin anew",
        where,
        config["admission"],
        table.admission,
    )
    return False
