"""The functions that training schedules on workers, and the ops in their graphs."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from het_tf.distribute.closure_runner import ClosureRunner


def record_closures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which every function is added that is scheduled on workers from now on.

    A function that is scheduled many times is added once.
    """
    functions: list[Any] = []
    schedule = ClosureRunner.schedule

    def schedule_and_record(runner: ClosureRunner, fn: Any, args: Any, tag: Any) -> None:
        if fn not in functions:
            functions.append(fn)
        schedule(runner, fn, args, tag)

    monkeypatch.setattr(ClosureRunner, "schedule", schedule_and_record)
    return functions


def graph_def(function: Any) -> tf.compat.v1.GraphDef:
    """The graph of a `tf.function` with an input signature, and of all functions that it calls."""
    return function.get_concrete_function().graph.as_graph_def()


def count_server_calls(function: Any) -> int:
    """How many ops of a function call servers, but for those that run after a server's restart."""
    called = [
        f for f in graph_def(function).library.function if "ask_again" not in f.signature.name
    ]
    return sum(node.op == "Het>CallServers" for f in called for node in f.node_def)
