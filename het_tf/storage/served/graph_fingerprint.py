"""Checksums of the computation of a graph. Two traces of one function have equal checksums.

The checksums do not depend on generated names (of nodes, functions and layers) or on the order of
nodes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

# Attributes without influence on the result: the place where a node runs, and resource names.
_NO_MATTER = ("config_proto", "container", "executor_type", "shared_name")
# Generated names end with a number. The messages of Assert ops contain such names, and an Assert
# may be in a branch.
_SAYS = {"Assert", "If", "StatelessIf"}
_DRAWN = re.compile(rb"\b([A-Za-z]\w*?)(?:_\d+)+\b")
_DRAWN_INPUT = re.compile(r"(keras_tensor|input_layer)(_\d+)?")


def checksums(function: Any) -> list[tuple[str, str]]:
    """Returns checksums of the computation of a traced function.

    Args:
      function: a concrete function.

    Returns:
      Pairs of a name scope, such as "functional/dense", and the checksum of the nodes in this
      scope, in the order of the graph. The last two pairs are "inputs" and "outputs".
    """
    graph_def = function.graph.as_graph_def()
    library = {each.signature.name: each for each in graph_def.library.function}
    arguments = [tensor.op.name for tensor in function.graph.inputs]
    of_nodes = _of_nodes(graph_def.node, arguments, library)
    scopes: dict[str, list[str]] = {}
    for name, checksum in of_nodes.items():
        scopes.setdefault(name.rpartition("/")[0] or name, []).append(checksum)
    outputs = [
        f"{of_nodes[tensor.op.name]}:{tensor.value_index}" for tensor in function.graph.outputs
    ]
    ends = {
        "inputs": tf.nest.map_structure(_of_spec, function.structured_input_signature),
        "outputs": [outputs, tf.nest.map_structure(lambda _: "", function.structured_outputs)],
    }
    return [
        *((scope, _of(sorted(of_scope))) for scope, of_scope in scopes.items()),
        *((name, _of([repr(end)])) for name, end in ends.items()),
    ]


def constants_of(function: Any) -> list[str]:
    """Returns checksums of the tensors that a traced function captures, except resources."""
    taken = [tensor for tensor in function.captured_inputs if _is_constant(tensor)]
    return [_of([tf.io.serialize_tensor(tensor).numpy()]) for tensor in taken]


def lookup_table_checksum(table: Any) -> str:
    """Returns the checksum of the contents of a `tf.lookup` table, in any order."""
    keys, values = (column.numpy() for column in table.export())
    return _of(sorted(repr(pair) for pair in zip(keys.tolist(), values.tolist(), strict=True)))


def _of_nodes(
    nodes: Iterable[Any], arguments: Sequence[str], library: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the checksum of every node together with its inputs, by the name of the node."""
    waiting = {node.name: node for node in nodes}
    users: dict[str, set[str]] = {}
    for node in waiting.values():
        for source in node.input:
            users.setdefault(source.partition(":")[0], set()).add(node.op)
    messages = {name for name in waiting if users.get(name, set()) <= _SAYS}
    node_sums = {name: f"argument {number}" for number, name in enumerate(arguments)}
    while left := [node for node in waiting.values() if node.name not in node_sums]:
        for node in left:
            inputs = [name.partition(":") for name in node.input if not name.startswith("^")]
            if all(name in node_sums for name, _, _ in inputs):
                attributes = [
                    f"{name}={_of_attribute(node.attr[name], library, node.name in messages)}"
                    for name in sorted(node.attr)
                    if name not in _NO_MATTER and not name.startswith("_")
                ]
                made_of = [f"{node_sums[name]}:{output or '0'}" for name, _, output in inputs]
                node_sums[node.name] = _of([node.op, *attributes, *made_of])
    return {name: node_sums[name] for name in [*waiting]}


def _of_attribute(value: Any, library: Mapping[str, Any], is_said: bool) -> str:
    kind = value.WhichOneof("value")
    if kind == "func":
        return _of_function(value.func.name, library)
    if kind == "list" and value.list.func:
        return _of([_of_function(each.name, library) for each in value.list.func])
    if is_said and kind == "tensor" and value.tensor.dtype == tf.string.as_datatype_enum:
        texts = tf.make_ndarray(value.tensor)
        return _of([repr(texts.shape), *(_DRAWN.sub(rb"\1", text) for text in texts.ravel())])
    return _of([value.SerializeToString(deterministic=True)])


def _of_function(name: str, library: Mapping[str, Any]) -> str:
    function = library[name]
    arguments = [each.name for each in function.signature.input_arg]
    nodes = _of_nodes(function.node_def, arguments, library)
    known = {name: f"argument {number}" for number, name in enumerate(arguments)} | nodes
    outputs = []
    for each in function.signature.output_arg:
        node, _, output = function.ret[each.name].partition(":")
        outputs.append(f"{known[node]}:{output}")
    return _of([*sorted(nodes.values()), *outputs])


def _of_spec(spec: Any) -> str:
    name = getattr(spec, "name", None) or ""
    kind = f"{type(spec).__name__} {getattr(spec, 'dtype', '')} {getattr(spec, 'shape', '')}"
    return kind if _DRAWN_INPUT.fullmatch(name) else f"{name} {kind}"


def _is_constant(tensor: Any) -> bool:
    return tf.is_tensor(tensor) and tensor.dtype not in (tf.resource, tf.variant)


def _of(texts: Iterable[str | bytes]) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    for text in texts:
        encoded = text.encode() if isinstance(text, str) else text
        hashed.update(len(encoded).to_bytes(8, "little") + encoded)
    return hashed.hexdigest()
