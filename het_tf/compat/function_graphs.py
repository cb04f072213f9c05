"""What het_tf needs of TensorFlow's function graphs that has no public way.

TensorFlow keeps the order of stateful ops, and of calls of functions that hold such ops, when they
share the tensor of a resource handle. A handle op inside a function would be another tensor in
every function, and two calls of one training step could overlap. So the handle of a worker's cache
must come into every function from outside, from where the function is called, since only then is
it known on which worker it runs. `FuncGraph.capture_call_time_value` does that. And two loops that
work hand in hand must not wait for one another: `run_independently` of the graph's manager of
control dependencies says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def handle_from_caller(name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """A resource handle that all functions of a call share.

    Args:
      name: unique to the resource.
      make: builds the op that gives the handle. It is called eagerly, on the device on which the
        outermost function is called.

    Returns:
      The handle: `make()` itself outside of functions, a captured input inside.
    """
    if tf.executing_eagerly():
        return make()
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "capture_call_time_value"):  # a graph of TensorFlow 1
        return make()
    handles = graph.get_collection_ref(name)
    if not handles:
        handles.append(_capture(graph, name, make))
    return handles[0]


def ancestors_of(tensor: tf.Tensor, stop: Callable[[tf.Tensor], bool]) -> list[tf.Tensor]:
    """The nearest tensors with a property that a tensor of a graph is computed from.

    The search goes from branches of `tf.cond` and parts of `tf.while_loop` to the graphs around
    them, and does not go through their results.

    Args:
      tensor: where the search begins.
      stop: whether a tensor has the property.
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
    """Whether a branch of `tf.cond`, or a part of a loop, is built, and a tensor is outside."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return _is_branch(graph) and tensor.graph is not graph


_WITH_GRAPHS = ("If", "StatelessIf", "While", "StatelessWhile", "Case", "StatelessCase")


def share_in_graph(name: str, handle: tf.Tensor) -> None:
    """Has `handle_from_caller` find this handle in the graph that is being built.

    Functions that it calls find it, too: they ask their caller.
    """
    tf.compat.v1.get_default_graph().get_collection_ref(name)[:] = [handle]


def run_beside(build: Callable[[], Any]) -> Any:
    """Builds loops that run beside everything else in the graph.

    TensorFlow would have a loop that uses a resource wait for one before it that does. What is
    built here must order by itself what needs an order.
    """
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    result = build()
    for op in graph.get_operations()[before:]:
        if op.type in ("While", "If"):
            graph.experimental_acd_manager.run_independently(op)
    return result


def _is_branch(graph: tf.Graph) -> bool:
    """Whether it is that of a branch of `tf.cond` or a part of `tf.while_loop`."""
    return type(graph).__name__ in (
        "CondBranchFuncGraph",
        "WhileCondFuncGraph",
        "WhileBodyFuncGraph",
    )


def _capture(graph: tf.Graph, name: str, make: Callable[[], tf.Tensor]) -> tf.Tensor:
    # The branches of tf.cond and tf.while_loop belong to one graph, and capture from it.
    if _is_branch(graph):
        with graph.outer_graph.as_default():
            return handle_from_caller(name, make)
    return graph.capture_call_time_value(
        lambda: handle_from_caller(name, make), tf.TensorSpec([], tf.resource), key=name
    )
