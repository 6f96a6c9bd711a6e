"""Which equations are native, and the graph that a run of native equations becomes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jaxgraph.frontend import (
    contraction,
    elementwise,
    indexing,
    ordering,
    ragged,
    shaping,
    special,
)
from jaxgraph.frontend.flatten import FlatEqn, Value
from jaxgraph.graph import dtypes, expression
from jaxgraph.graph.ir import Graph, Tensor

MAX_RANK = 8  # kMaxRank in ffi/core/program.h

_STRUCTURE = {
    "while": "is a loop whose length is not known",
    "scan": "is a loop that was not unrolled",
    "cond": "is a choice",
}


def why_not_native(eqn: FlatEqn) -> str | None:
    """The reason why ``eqn`` stays in XLA, in words that follow "it ..."; None if it is native."""
    name = eqn.primitive.name
    if eqn.effects:
        return "has a side effect"
    for value in (*eqn.inputs, *eqn.outputs):
        if not hasattr(value.aval, "shape"):
            return f"handles {getattr(value.aval, 'dtype', 'an opaque value')}, unknown to kernels"
        reason = _why_no_array(value.aval.shape, value.aval.dtype)
        if reason is not None:
            return reason
    if name in special.NAMES or name in special.TOTAL:
        return None
    if name in elementwise.NAMES:
        return elementwise.why_not(eqn)
    if name in shaping.VIEWS or name in shaping.REDUCTIONS:
        return shaping.why_not(eqn)
    if name == "dot_general":
        return contraction.why_not(eqn)
    if name in ragged.NAMES:
        return ragged.why_not(eqn)
    if name in indexing.NAMES:
        return indexing.why_not(eqn)
    if name in ordering.NAMES:
        return ordering.why_not(eqn)
    return _STRUCTURE.get(name, f"is {name}, which has no native kernel")


@functools.lru_cache(maxsize=4096)  # the arrays of a step have few shapes
def _why_no_array(shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why no native equation has an array of this kind, or None."""
    if not dtypes.is_native(dtype):
        return f"handles {dtype}, unknown to kernels"
    if 0 in shape:
        return "handles an array without elements"
    if len(shape) > MAX_RANK:
        return f"handles an array of more than {MAX_RANK} dimensions"
    if sum(n != 1 for n in shape) > expression.MAX_RANK:
        return f"handles an array of more than {expression.MAX_RANK} dimensions larger than one"
    return None


def build_graph(
    inputs: Sequence[Value],
    eqns: Sequence[FlatEqn],
    outputs: Sequence[Value],
    labels: dict[int, str],
) -> Graph:
    """The graph of one native split.

    Args:
      inputs: values that the split takes from outside, its operands in order.
      eqns: native equations in order.
      outputs: values that somebody outside reads, its results in order.
      labels: for inputs, by ``id(value)``, what a person would call them.
    """
    graph = Graph()
    env: dict[int, Tensor] = {}
    constants: dict[int, Tensor] = {}
    for value in inputs:
        env[id(value)] = graph.add_input(
            value.aval.shape, value.aval.dtype, labels.get(id(value), "")
        )

    def read(value: Value) -> Tensor:
        if value.known is None or value.aval.size != 1:
            return env[id(value)]
        if id(value) not in constants:
            constants[id(value)] = _constant(graph, value)
        return constants[id(value)]

    for eqn in eqns:
        label = f"{eqn.primitive.name}@{eqn.source}"
        for value, tensor in zip(
            eqn.outputs, _lower(graph, eqn, [read(v) for v in eqn.inputs], label), strict=True
        ):
            env[id(value)] = tensor
    graph.outputs = [read(v) for v in outputs]
    return graph


def _lower(graph: Graph, eqn: FlatEqn, inputs: list[Tensor], label: str) -> list[Tensor]:
    name = eqn.primitive.name
    if name in special.NAMES:
        return [special.lower(graph, name, *inputs, label)]
    if name in special.TOTAL:
        shape = eqn.outputs[0].aval.shape
        operands = [elementwise.broadcast_scalar(graph, t, shape, label) for t in inputs]
        return [special.compare_totally(graph, name, *operands, label)]
    if name in elementwise.NAMES:
        return elementwise.lower(graph, eqn, inputs, label)
    if name in shaping.REDUCTIONS:
        return shaping.lower_reduction(graph, eqn, inputs, label)
    if name in shaping.VIEWS:
        return shaping.lower_view(graph, eqn, inputs, label)
    if name == "dot_general":
        return contraction.lower(graph, eqn, inputs, label)
    if name in ragged.NAMES:
        return ragged.lower(graph, eqn, inputs, label)
    if name in ordering.NAMES:
        return ordering.lower(graph, eqn, inputs, label)
    return indexing.lower(graph, eqn, inputs, label)


def _constant(graph: Graph, value: Value) -> Tensor:
    """A known number, as a scalar behind a broadcast."""
    number = value.known.reshape(())
    return elementwise.constant(graph, number, value.aval.shape, value.aval.dtype, "")
