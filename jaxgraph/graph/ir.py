"""The graph of one native split: tensors and the nodes that make them.

A graph is a list of nodes in an order in which they may run. Tensors are values: no node changes
one. That some updates happen in place is decided later, when storage is assigned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

VIEW_KINDS = frozenset({"reshape", "transpose", "broadcast", "slice", "rev", "bitcast"})
# Computed inside an expression wherever they are needed, unless storage is asked for.
VIRTUAL_KINDS = frozenset({"elementwise", "reduce", "iota", "const"})


class Tensor:
    """A value of the graph: ``shape``, numpy ``dtype`` and the node that makes it."""

    __slots__ = ("dtype", "id", "node", "shape")

    def __init__(self, id: int, shape: tuple[int, ...], dtype: np.dtype, node: Node):
        self.id, self.shape, self.dtype, self.node = id, shape, dtype, node

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def is_view(self) -> bool:
        return self.node.kind in VIEW_KINDS

    @property
    def is_virtual(self) -> bool:
        return self.node.kind in VIRTUAL_KINDS

    def __repr__(self) -> str:
        return f"%{self.id}:{self.dtype}{list(self.shape)}={self.node.kind}"


@dataclasses.dataclass(eq=False)
class Node:
    """One operation: a ``kind``, its inputs, one output, and hashable attributes.

    Kinds: ``input`` (index), ``const`` (value), ``iota`` (dimension), ``elementwise`` (op, aux),
    ``reduce`` (op, axis, index_dtype), the views, ``concat`` (axis), ``matmul``, ``gather`` and
    ``set_rows`` (mode, dims, fill), ``sort`` (order, chunks, merged, source), ``copy``,
    ``attention`` and, inside its expression, ``scores``.
    """

    kind: str
    inputs: tuple[Tensor, ...]
    attrs: dict[str, Any]
    label: str
    out: Tensor = dataclasses.field(init=False)


class Graph:
    """Nodes in execution order, with equal pure nodes made once (common subexpressions)."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self._known: dict[Any, Tensor] = {}

    def add_input(self, shape: Sequence[int], dtype, label: str = "") -> Tensor:
        tensor = self._append("input", (), {"index": len(self.inputs)}, shape, dtype, label)
        self.inputs.append(tensor)
        return tensor

    def add(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        shape: Sequence[int],
        dtype,
        label: str = "",
        **attrs: Any,
    ) -> Tensor:
        """The output of a node with these inputs and attributes; an equal node is reused."""
        dtype = np.dtype(dtype)
        key = (kind, tuple(t.id for t in inputs), tuple(shape), dtype, tuple(sorted(attrs.items())))
        known = self._known.get(key)
        if known is None:
            known = self._append(kind, tuple(inputs), attrs, shape, dtype, label)
            self._known[key] = known
        return known

    def _append(self, kind, inputs, attrs, shape, dtype, label) -> Tensor:
        node = Node(kind, inputs, attrs, label)
        node.out = Tensor(len(self.nodes), tuple(int(n) for n in shape), np.dtype(dtype), node)
        self.nodes.append(node)
        return node.out

    def live_nodes(self) -> list[Node]:
        """Nodes that an output depends on, in order; inputs are always live."""
        needed: set[int] = set()
        stack = list(self.outputs)
        while stack:
            tensor = stack.pop()
            if tensor.id not in needed:
                needed.add(tensor.id)
                stack.extend(tensor.node.inputs)
        return [n for n in self.nodes if n.kind == "input" or n.out.id in needed]

    def consumers(self) -> dict[int, list[Node]]:
        """Live nodes that read each tensor, in order, by tensor id."""
        readers: dict[int, list[Node]] = {}
        for node in self.live_nodes():
            for tensor in dict.fromkeys(node.inputs):
                readers.setdefault(tensor.id, []).append(node)
        return readers

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)
