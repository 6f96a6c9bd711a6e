"""The graph of one native split: tensors and the nodes that make them.

A graph is a list of nodes in an order in which they may run. Tensors are values: no node changes
one. That some updates happen in place is decided later, when storage is assigned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

VIEW_KINDS = frozenset({"reshape", "transpose", "broadcast", "slice", "rev", "bitcast"})
# Computed inside an expression wherever they are needed, unless storage is asked for.
VIRTUAL_KINDS = frozenset({"elementwise", "reduce", "iota", "const"})


class Tensor:
    """A value of the graph: ``shape``, numpy ``dtype`` and the node that makes it."""

    __slots__ = ("dtype", "id", "is_view", "is_virtual", "node", "shape")

    def __init__(self, id: int, shape: tuple[int, ...], dtype: np.dtype, node: Node):
        self.id, self.shape, self.dtype, self.node = id, shape, dtype, node
        self.is_view = node.kind in VIEW_KINDS
        self.is_virtual = node.kind in VIRTUAL_KINDS

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.id}:{self.dtype}{list(self.shape)}={self.node.kind}"


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One operation: a ``kind``, its inputs, one output, and hashable attributes.

    Kinds: ``input`` (index), ``const`` (value), ``iota`` (dimension), ``elementwise`` (op, aux),
    ``reduce`` (op, axis, index_dtype), the views, ``concat`` (axis), ``matmul``, ``gather`` and
    ``set_rows`` (mode, dims, fill), ``sort`` (order, chunks, merged, source), ``copy``,
    ``attention`` and, inside its expression, ``scores``.

    ``form`` is a number for kind, attributes, shape and dtype: with equal inputs, nodes of equal
    form are equal. It holds within a graph and those rewritten from it.
    """

    kind: str
    inputs: tuple[Tensor, ...]
    attrs: dict[str, Any]
    label: str
    form: int
    out: Tensor = dataclasses.field(init=False)


class Graph:
    """Nodes in execution order, with equal pure nodes made once (common subexpressions)."""

    def __init__(self, rewrites: Graph | None = None) -> None:
        """``rewrites``: the graph whose nodes will be copied."""
        self.nodes: list[Node] = []
        self.inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()
        self._live: list[Node] | None = None
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._forms: dict[tuple, int] = {} if rewrites is None else rewrites._forms

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return self._outputs

    @outputs.setter
    def outputs(self, tensors: Iterable[Tensor]) -> None:
        self._outputs, self._live = tuple(tensors), None

    def add_input(self, shape: Sequence[int], dtype, label: str = "") -> Tensor:
        attrs = {"index": len(self.inputs)}
        form, shape, dtype = self._form("input", attrs, shape, dtype)
        tensor = self._append("input", (), attrs, shape, dtype, label, form)
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
        form, shape, dtype = self._form(kind, attrs, shape, dtype)
        return self._once(kind, inputs, attrs, shape, dtype, label, form)

    def copy(self, node: Node, mapped: Mapping[int, Tensor]) -> Tensor:
        """The output of a node as one of the graph that this one rewrites.

        Args:
          node: of that graph.
          mapped: for the node's inputs, by id, what has become of them.
        """
        out = node.out
        if node.kind == "input":
            return self.add_input(out.shape, out.dtype, node.label)
        inputs = [mapped[t.id] for t in node.inputs]
        return self._once(
            node.kind, inputs, node.attrs, out.shape, out.dtype, node.label, node.form
        )

    def _form(self, kind, attrs, shape, dtype) -> tuple[int, tuple[int, ...], np.dtype]:
        """The number of a form, and its shape and dtype."""
        shape, dtype = tuple(map(int, shape)), np.dtype(dtype)
        form = (kind, shape, dtype, *sorted(attrs.items()))
        return self._forms.setdefault(form, len(self._forms)), shape, dtype

    def _once(self, kind, inputs, attrs, shape, dtype, label, form) -> Tensor:
        key = (form, *[t.id for t in inputs])
        known = self._known.get(key)
        if known is None:
            known = self._append(kind, tuple(inputs), attrs, shape, dtype, label, form)
            self._known[key] = known
        return known

    def _append(self, kind, inputs, attrs, shape, dtype, label, form) -> Tensor:
        node = Node(kind, inputs, attrs, label, form)
        node.out = Tensor(len(self.nodes), shape, dtype, node)
        self.nodes.append(node)
        self._live = None
        return node.out

    def live_nodes(self) -> Sequence[Node]:
        """Nodes that an output depends on, in order; inputs are always live."""
        if self._live is None:
            needed = {t.id for t in self.outputs}
            for node in reversed(self.nodes):
                if node.out.id in needed:
                    needed.update([t.id for t in node.inputs])
            self._live = [n for n in self.nodes if n.kind == "input" or n.out.id in needed]
        return self._live

    def consumers(self) -> dict[int, list[Node]]:
        """Live nodes that read each tensor, in order, by tensor id."""
        readers: dict[int, list[Node]] = {}
        for node in self.live_nodes():
            for tensor in dict.fromkeys(node.inputs):
                readers.setdefault(tensor.id, []).append(node)
        return readers

    def dissolve(self) -> None:
        """Parts the nodes from their outputs, when nobody needs the graph any more.

        Each holds the other: left alone, they would be work for the garbage collector.
        """
        for node in self.nodes:
            del node.out

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)
