"""Captures, inputs and execution order of TensorFlow's function graphs.

TensorFlow orders stateful ops, and calls of functions with such ops, if they use the same resource
handle tensor. A handle op inside a function would create a new tensor per function, and two calls
in one training step could overlap. The worker is known only when the function is called.
`FuncGraph.capture_call_time_value` therefore captures the handle of a worker's cache at the call.
Two loops that exchange data must not wait for each other. `run_independently` of the graph's
`experimental_acd_manager` removes their control dependencies. Checked with TensorFlow 2.21.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def handle_from_caller(name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns a resource handle that all functions of a call share.

    Args:
      name: unique name of the resource.
      make: builds the op that returns the handle. Called eagerly, on the device on which the
        outermost function is called.

    Returns:
      The handle. Outside of functions the result of `make()`, inside a captured input.
    """
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "capture_call_time_value"):  # A graph of TensorFlow 1.
        return make()
    handles = graph.get_collection_ref(name)
    if not handles:
        handles.append(_capture(graph, name, make))
    return handles[0]


def ancestors_of(tensor: tf.Tensor, stop: Callable[[tf.Tensor], bool]) -> list[tf.Tensor]:
    """Returns the nearest tensors with a property that a graph tensor is computed from.

    The search leaves branches of `tf.cond` and parts of `tf.while_loop` through their
    `FuncGraph.captures`. The search does not enter them through their results.

    Args:
      tensor: start of the search.
      stop: whether a tensor has the property. The search does not go beyond such a tensor.
    """
    found: list[tf.Tensor] = []
    seen: set[int] = set()
    waiting = [tensor]
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if stop(tensor):
            found.append(tensor)
        elif tensor.op.type == "Placeholder" and _is_branch(tensor.graph):
            waiting += [outer for outer, inner in tensor.graph.captures if inner is tensor]
        elif tensor.op.type not in _WITH_GRAPHS:
            waiting += tensor.op.inputs
    return found


def is_from_outside_branch(tensor: tf.Tensor) -> bool:
    """Whether a `tf.cond` branch or a loop part is being built, and a tensor is outside of it."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return _is_branch(graph) and tensor.graph is not graph


_WITH_GRAPHS = ("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase")


def share_in_graph(name: str, handle: tf.Tensor) -> None:
    """Sets the result of `handle_from_caller` for the graph that is being built.

    Functions that this graph calls get the same handle, because they ask their caller.
    """
    tf.compat.v1.get_default_graph().get_collection_ref(name)[:] = [handle]


def run_beside(build: Callable[[], Any]) -> Any:
    """Builds loops that run in parallel with all other ops of the graph (`run_independently`).

    Otherwise a loop would wait for an earlier loop that uses the same resource. `build` must add
    all control dependencies that its ops need.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = build()
    for op in graph.get_operations()[before:]:
        if op.type in ("While", "If"):
            graph.experimental_acd_manager.run_independently(op)
    return result


def _is_branch(graph: tf.Graph) -> bool:
    """Whether a graph is a branch of `tf.cond` or a part of `tf.while_loop`."""
    return type(graph).__name__ in (
        "CondBranchFuncGraph",
        "WhileCondFuncGraph",
        "WhileBodyFuncGraph",
    )


def _capture(graph: tf.Graph, name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    # A branch of tf.cond or part of tf.while_loop captures from the graph that contains it.
    if _is_branch(graph):
        with graph.outer_graph.as_default():
            return handle_from_caller(name, make)
    return graph.capture_call_time_value(
        lambda: handle_from_caller(name, make), tf.TensorSpec([], tf.resource), key=name
    )
