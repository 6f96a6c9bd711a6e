"""Moves elementwise work in front of concatenations.

``convert(concat(a, b))`` stores the pieces, reads them back, and stores them again;
``concat(convert(a), convert(b))`` stores them once, where they are computed. Rotary embeddings are
written in the first form by nearly everybody.
"""

from __future__ import annotations

from jaxgraph.graph.ir import Graph, Node, Tensor


def push_through_concat(graph: Graph) -> Graph:
    """A graph that computes the same, with one-operand operations applied to the pieces."""
    readers = graph.consumers()
    outputs = {t.id for t in graph.outputs}

    def moves(node: Node) -> bool:
        return (
            node.kind == "elementwise"
            and len(node.inputs) == 1
            and node.inputs[0].node.kind == "concat"
            and len(readers[node.inputs[0].id]) == 1
            and node.inputs[0].id not in outputs
        )

    if not any(moves(n) for n in graph.live_nodes()):
        return graph
    new = Graph()
    mapped: dict[int, Tensor] = {}
    for node in graph.live_nodes():
        out = node.out
        if node.kind == "input":
            mapped[out.id] = new.add_input(out.shape, out.dtype, node.label)
        elif moves(node):
            concat = node.inputs[0].node
            pieces = [
                new.add(
                    "elementwise", (mapped[t.id],), t.shape, out.dtype, node.label, **node.attrs
                )
                for t in concat.inputs
            ]
            mapped[out.id] = new.add(
                "concat", pieces, out.shape, out.dtype, node.label, **concat.attrs
            )
        else:
            inputs = [mapped[t.id] for t in node.inputs]
            mapped[out.id] = new.add(
                node.kind, inputs, out.shape, out.dtype, node.label, **node.attrs
            )
    new.outputs = [mapped[t.id] for t in graph.outputs]
    return new
