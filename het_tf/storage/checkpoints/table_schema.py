"""Descriptions of tables in files of rows, and checks whether the rows fit a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from het_tf import lifetimes
from het_tf.runtime.validation import INT64_MAX
from het_tf.tables.table import EmbeddingTable

_FORMAT = 1


def describe(table: EmbeddingTable) -> dict[str, Any]:
    """Returns the description of a table that is stored with its rows."""
    ages = {"ages": table.age_time, "time": table.time} if table.age_time else {}
    return {**shape_of(table), "slot_dim": table.slot_dim, **table.row_attributes, **ages}


def check_description(config: Any) -> None:
    """Checks a description that was read from a file.

    Raises:
      ValueError: a field of `describe` is missing or invalid. The message names the field.
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
    if not _is_layout(config.get("layout", {})):
        raise ValueError(f"it says layout = {config['layout']!r}")


def is_count(number: Any) -> bool:
    """Whether a value is a non-negative int in the range of int64."""
    return type(number) is int and 0 <= number <= INT64_MAX


def shape_of(table: EmbeddingTable) -> dict[str, Any]:
    """Returns the fields of `describe` in which a table and its new rows must agree."""
    layout = {name: [number, first] for name, number, first in table.layout}
    return {"format": _FORMAT, "dim": table.dim, **({"layout": layout} if layout else {})}


def check_shape(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> None:
    """Checks that saved rows fit a table.

    Args:
      config: `shape_of` or `describe` of the saved table.
      table: table for the rows.
      where: place of the saved rows, for messages.

    Raises:
      ValueError: the rows have another width or format, or the tables of a collection have another
        layout.
    """
    if config.get("format") != _FORMAT:
        raise ValueError(f"{where} has format {config.get('format')!r}, expected {_FORMAT}")
    if config.get("dim") != table.dim:
        raise ValueError(f"{where} has rows of {config.get('dim')} columns, the table {table.dim}")
    if table.layout:
        _check_layout(config.get("layout"), shape_of(table)["layout"], where)


def _check_layout(saved: Any, own: Mapping[str, list[int]], where: str) -> None:
    """Checks that the saved tables of a collection have the same places as in the layer."""
    if saved is None:  # Older files have no layout, and their tables had other first keys.
        if any(first for _, first in own.values()):
            raise ValueError(
                f"{where} does not say which of its rows are whose of the tables {list(own)}"
            )
        return
    if not _is_layout(saved):
        raise ValueError(f"{where} is damaged: it says layout = {saved!r}")
    differ = [
        f"table {name}: {_place(place)} there, {_place(own.get(name))} in the layer"
        for name, place in saved.items()
        if place != own.get(name)
    ]
    if differ:
        raise ValueError(f"{where} has rows of tables that are elsewhere now: {'; '.join(differ)}")


def _is_layout(layout: Any) -> bool:
    return isinstance(layout, dict) and all(
        isinstance(place, list) and len(place) == 2 and all(map(is_count, place))
        for place in layout.values()
    )


def _place(place: Sequence[int] | None) -> str:
    return "nowhere" if place is None else f"layers[{place[0]}] from key {place[1]} on"


def takes_slots(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> bool:
    """Checks that saved rows fit a table. Returns whether the saved slots fit, too.

    Logs a warning if the slots do not fit, or if initializer or seed differ.

    Args:
      config: `describe` of the saved table.
      table: table for the rows.
      where: place of the saved rows, for messages.

    Raises:
      ValueError: the rows have another width, format or layout.
    """
    check_shape(config, table, where)
    own = describe(table)
    if any(config[x] != own[x] for x in ("initializer", "seed")):
        logging.warning(
            "%s was saved with initializer %r and seed %d; with %r and %d of this table, rows that"
            " were never updated read otherwise",
            where,
            *(table_config[x] for table_config in (config, own) for x in ("initializer", "seed")),
        )
    kinds = [table_config["optimizer"].split()[0] for table_config in (config, own)]
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
    """Whether saved clocks have the rule of the table's clock. If not, clocks start from zero."""
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
    """Whether saved ages have the unit of the table's ages."""
    return table.age_time is not None and config.get("ages") == table.age_time


def takes_sketches(config: Mapping[str, Any], table: EmbeddingTable, where: str) -> bool:
    """Whether saved sketches fit: their table had the same admission rules."""
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
