"""Plans as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from het_tf.planner.plan import Plan
from het_tf.runtime.quantities import bytes_text

_BAR = 40  # characters
_MOST_TABLES = 5
_ADVICE = {
    "worker": "the workers' processors: more workers, or more cores of each",
    "network": "the servers: more servers, a faster network, or larger caches",
    "chief": "the training program: more steps_per_execution",
    "cores": "the cores that all tasks share: separate hosts",
}


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns lines of columns. The first column is aligned left, the others right."""
    widths = [max(len(cells[c]) for cells in [head, *rows]) for c in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if c == 0 else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in [head, *rows]
    )


def report(plan: Plan) -> str:
    """Returns tables of the servers, the layers and the time of a step."""
    topology = plan.topology
    rate = "no limit" if topology.bandwidth is None else f"{topology.bandwidth / 1e9:g} Gbit/s"
    parts = sorted(plan.parts.items(), key=lambda part: -part[1])
    longest = parts[0][1]
    lines = [
        f"{topology.workers} workers, {topology.servers} parameter servers, {rate}, batches of"
        f" {plan.batch_size:,}: {plan.examples_per_second:,.0f} examples/s,"
        f" {1000 * plan.step_seconds:.2f} ms a step",
        "",
        "Time of a step, by part:",
        *(
            f"  {name:8} {1000 * seconds:9.2f} ms  {'#' * round(_BAR * seconds / longest)}"
            for name, seconds in parts
        ),
        f"  bound by {_ADVICE[plan.bound]}",
        "",
        _servers(plan),
        f"imbalance: the busiest server has {plan.imbalance:.2f} times the mean bytes",
        "",
        _tables(plan),
    ]
    return "\n".join(lines)


def _servers(plan: Plan) -> str:
    step = plan.step_seconds * 1e6
    workers = plan.topology.workers
    each = zip(plan.server_bytes, plan.bytes_up, plan.bytes_down, plan.server_seconds, strict=True)
    return table_text(
        ("server", "rows", "of memory", "MB/s in", "MB/s out", "cores"),
        [
            (
                f"ps:{server}",
                bytes_text(used),
                f"{used / plan.topology.server_memory:.1%}",
                f"{workers * up / step:.1f}",
                f"{workers * down / step:.1f}",
                f"{workers * cpu / plan.step_seconds:.2f}",
            )
            for server, (used, up, down, cpu) in enumerate(each)
        ],
    )


def _tables(plan: Plan) -> str:
    ordered = sorted(
        plan.tables.items(), key=lambda t: -(t[1].traffic.bytes_up + t[1].traffic.bytes_down)
    )
    rows = [
        (
            name,
            ",".join(map(str, table.servers))
            if len(table.servers) < plan.topology.servers
            else "all",
            f"{table.rows:,}",
            bytes_text(table.server_bytes),
            "-" if table.capacity is None else f"{table.capacity:,}",
            bytes_text(table.worker_bytes),
            f"{table.traffic.hit_rate:.1%}",
            f"{table.traffic.bytes_up / 1000:,.1f}",
            f"{table.traffic.bytes_down / 1000:,.1f}",
            f"{1000 * (table.traffic.worker_seconds + table.traffic.server_seconds):.2f}",
            "-" if table.memory is None else f"{table.disk_share:.1%}",
        )
        for name, table in ordered
    ]
    head = ("table", "servers", "rows", "memory", "cache rows", "cache", "hit rate")
    text = table_text((*head, "kB up", "kB down", "CPU ms", "on disk"), rows)
    if len(rows) <= _MOST_TABLES:
        return text
    each = np.array([t.traffic.bytes_up + t.traffic.bytes_down for _, t in ordered])
    share = each[:_MOST_TABLES].sum() / max(each.sum(), 1)
    return f"{text}\nthe first {_MOST_TABLES} tables have {share:.0%} of the rows' bytes"
