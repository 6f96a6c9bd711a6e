"""Graphs: equal nodes once, what is live, and copies into a graph that rewrites another."""

import numpy as np
import pytest

from jaxgraph.graph.ir import Graph


def add(graph, *inputs, shape=(4,), dtype=np.float32, op="add"):
    return graph.add("elementwise", inputs, shape, dtype, op=op, aux=0)


@pytest.fixture
def graph():
    """(x + x) + (x * x), and a node that nobody needs."""
    graph = Graph()
    x = graph.add_input((4,), np.float32, "x")
    add(graph, x, op="neg")
    graph.outputs = [add(graph, add(graph, x, x), add(graph, x, x, op="mul"))]
    return graph


def test_equal_nodes_are_one(graph):
    (x,) = graph.inputs
    assert add(graph, x, x) is add(graph, x, x)
    different = [
        add(graph, x, x),
        add(graph, x, x, op="mul"),
        add(graph, x, x, dtype=np.float16),
        add(graph, x, x, shape=(2, 2)),
        add(graph, x),
        graph.add("copy", (x, x), (4,), np.float32, op="add", aux=0),
    ]
    assert len(set(different)) == len(different)
    assert len({t.node.form for t in different}) == len(different) - 1  # other inputs, same form


def test_live_nodes_are_those_that_outputs_need_now(graph):
    assert [n.attrs.get("op") for n in graph.live_nodes()] == [None, "add", "mul", "add"]
    (x,) = graph.inputs
    graph.outputs = [add(graph, x, op="neg")]
    assert [n.attrs.get("op") for n in graph.live_nodes()] == [None, "neg"]
    graph.add_input((4,), np.float32)
    assert [n.kind for n in graph.live_nodes()] == ["input", "elementwise", "input"]


def test_a_copy_is_the_equal_node(graph):
    new = Graph(rewrites=graph)
    mapped = {}
    for node in graph.live_nodes():
        mapped[node.out.id] = new.copy(node, mapped)
    assert [(n.kind, n.attrs, n.label, n.out.shape, n.out.dtype) for n in new] == [
        (n.kind, n.attrs, n.label, n.out.shape, n.out.dtype) for n in graph.live_nodes()
    ]
    (x,), (y,) = new.inputs, graph.inputs
    assert x is not y
    assert x.node.label == "x"
    assert add(new, x, x) is mapped[add(graph, y, y).id]
    assert new.copy(graph.outputs[0].node, mapped) is mapped[graph.outputs[0].id]


def test_a_copy_takes_other_inputs(graph):
    new = Graph(rewrites=graph)
    x = new.add_input((4,), np.float32)
    minus = add(new, x, op="neg")
    total = graph.outputs[0].node.inputs[0].node
    assert new.copy(total, {graph.inputs[0].id: minus}) is add(new, minus, minus)
