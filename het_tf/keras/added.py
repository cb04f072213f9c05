"""Whether a step adds to a state, as far as its graph says so."""

from __future__ import annotations

import tensorflow as tf

# Ops whose result holds the sum that a state was, and what was added to it.
_ADDING = ("Add", "AddV2", "AddN", "Sub")
# Ops that hand a state on as it is.
_PASSING = ("Identity", "IdentityN", "StopGradient", "EnsureShape", "Cast", "Reshape")
# Ops after which a state is no sum any more. What others do is not looked at.
_ENDING = ("Maximum", "Minimum", "Mul", "RealDiv", "Div", "DivNoNan", "Max", "Min", "Pow", "Sqrt")


def why_no_sum(before: tf.Tensor, after: tf.Tensor) -> str | None:
    """Says why the states of several steps that begin with zero do not add up to one state.

    Args:
      before: a state as a step finds it, a tensor of the graph that is being traced.
      after: as the step leaves it.

    Returns:
      "a step …", the rest of a sentence; None if nothing speaks against a sum.
    """
    if after is before:
        return None
    depending = {before.name: True}
    if not _depends(after, depending):
        return "a step assigns what does not depend on its value"
    at = after
    while at is not before:
        operands = [each for each in at.op.inputs if _depends(each, depending)]
        kind = at.op.type
        if kind in _ENDING or (kind in _ADDING and len(operands) > 1):
            return f"a step does more than to add to it ({kind})"
        if kind == "Sub" and operands[0] is not at.op.inputs[0]:
            return "a step subtracts it"
        if kind not in _ADDING and kind not in _PASSING:
            return None
        at = operands[0]
    return None


def _depends(tensor: tf.Tensor, known: dict[str, bool]) -> bool:
    """Whether a tensor depends on one that is `known` to; adds what it finds out, by names."""
    waiting = [tensor]
    while waiting:
        at = waiting[-1]
        if at.name not in known:
            fresh = [each for each in at.op.inputs if each.name not in known]
            if fresh:
                waiting += fresh
                continue
            known[at.name] = any(known[each.name] for each in at.op.inputs)
        waiting.pop()
    return known[tensor.name]
