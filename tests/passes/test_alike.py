"""Kernels of alike layers: built once, and then those that would be built anew."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama import SHAPES, decode_step, empty_cache, random_params

import jaxgraph
from jaxgraph.frontend.shaping import reshape, take
from jaxgraph.graph import views
from jaxgraph.graph.ir import Graph
from jaxgraph.graph.layout import contiguous
from jaxgraph.passes import alike
from jaxgraph.passes.cluster import Cluster, Misfit, Sink


@pytest.fixture
def built(monkeypatch):
    """A list of the kernels that are built; all others are held against what would be built."""
    built = []

    class Counted(Cluster):
        def build(self):
            fit = super().build()
            built.append(fit)
            return fit

    build = alike.Kernels.build

    def checked(self, storages, sinks, inner=False):
        try:
            expected = Cluster(storages, sinks, inner).build()
        except Misfit as misfit:
            with pytest.raises(Misfit) as raised:
                build(self, storages, sinks, inner)
            assert raised.value.tensors == misfit.tensors
            raise
        fit = build(self, storages, sinks, inner)
        for field in dataclasses.fields(fit):
            assert getattr(fit, field.name) == getattr(expected, field.name), field.name
        return fit

    monkeypatch.setattr(alike, "Cluster", Counted)
    monkeypatch.setattr(alike.Kernels, "build", checked)
    return built


def plan(fun, *args):
    explained = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True)).explain(*args)
    assert [s.backend for s in explained.splits] == ["native"]


# Rows so long that their kernels are not joined for being small.
X, Y = jnp.ones((4, 256)), jnp.ones((4, 256), jnp.bfloat16)
SQUARE = jnp.ones((256, 256))


@pytest.mark.parametrize(
    ("fun", "number"),
    [
        (lambda x, y: (jnp.sin(x) * 2, jnp.sin(y @ SQUARE) * 2), 1),
        (lambda x, y: (jnp.sin(x) * 2, jnp.sin(x + 1) * 2), 2),
        (lambda x, y: (jnp.sin(x) * 2, jnp.sin(y) * 3), 2),
        (lambda x, y: (jnp.sin(x) * 2, jnp.cos(y) * 2), 2),
        (lambda x, y: (jnp.sin(x) * 2, jnp.sin(y[:2]) * 2), 2),
        (lambda x, y: (jnp.sin(x) * 2, jnp.sin(y.T) * 2), 2),
        (lambda x, y: (jnp.sin(x) * y, jnp.sin(x @ SQUARE) * y), 1),
        (lambda x, y: (jnp.sin(x) * y, jnp.sin(y) * y), 2),
        (lambda x, y: (x - y * x, y - x * x), 2),
        # The same part of another array, another part of it, two parts in another order.
        (lambda x, y: (jnp.sin(x[1]), jnp.sin(y[3])), 1),
        (lambda x, y: (x[0] - x[1], y[1] - y[2]), 1),
        (lambda x, y: (x[0] - x[1], y[1] - y[3]), 2),
        (lambda x, y: (x[0] - x[1], y[2] - y[1]), 2),
        (lambda x, y: (x[0] - y[1], y[2] - x[1]), 1),
        (lambda x, y: (x[0] - y[1], y[2] - y[3]), 2),
        # Rows, and rows of parts.
        (lambda x, y: (jax.nn.softmax(x[:2]), jax.nn.softmax(y[2:])), 1),
        (lambda x, y: (jax.nn.softmax(x), jax.nn.softmax(y.reshape(8, 128))), 2),
        (lambda x, y: (jnp.max(x, -1), jnp.min(y, -1)), 2),
    ],
)
def test_kernels_are_alike(built, fun, number):
    plan(fun, X, X)
    assert len(built) == number


def test_another_type_makes_another_kernel(built):
    plan(lambda x, y: (jnp.sin(x) * 2, jnp.sin(y) * 2), X, Y)
    assert len(built) == 2


def test_the_bits_of_parts_are_read_where_they_lie(built):
    """How far a part begins behind another counts in elements of the type that is read."""

    def fun(x, y):
        def as_floats(a):
            return jax.lax.bitcast_convert_type(a.reshape(4, 128, 2), jnp.float32)

        return (
            as_floats(x)[1] + x[2, :128],
            as_floats(y)[2] + y[3, :128],
            as_floats(y)[1] + y[3, :128],
        )

    plan(fun, Y, Y)
    assert len(built) == 1


def test_pieces_of_concatenations(built):
    def fun(x, y):
        first = jnp.concatenate([x * 2, y * 2])
        return first, jnp.concatenate([x * 2, y + 1, x * 2]), jnp.concatenate([y * 2, x + 1, x + 1])

    plan(fun, X, X)
    assert built


class RowMajor:
    """Storages in which everything lies row-major."""

    def __init__(self, *stored):
        self.stored = {t.id for t in stored}

    def layout(self, tensor):
        path = []
        while tensor.id not in self.stored:
            path.append(tensor.node)
            tensor = tensor.node.inputs[0]
        return tensor, views.apply_path(path, contiguous(tensor.shape))[0]


@pytest.fixture
def graph():
    return Graph()


def twice(graph, x):
    return graph.add("elementwise", (x, x), x.shape, x.dtype, op="add", aux=0)


def into(storage, value):
    """A sink that writes ``value`` in front in ``storage``."""
    return Sink(value, storage, contiguous(value.shape))


def test_an_expression_inside_a_kernel_is_another(built, graph):
    x, y = (graph.add_input((1, 4), np.float32) for _ in range(2))
    kernels, sink = alike.Kernels(), into(y, twice(graph, x))
    for inner in (False, True, False, True):
        kernels.build(RowMajor(x, y), (sink,), inner)
    assert len(built) == 2


def test_no_kernel_is_alike_to_one_that_reads_what_it_writes_in_pieces(graph, built):
    x, y = (graph.add_input((2, 4), np.float32) for _ in range(2))
    kernels, storages = alike.Kernels(), RowMajor(x, y)
    kernels.build(storages, (into(y, twice(graph, x)),))
    with pytest.raises(Misfit):
        kernels.build(storages, (into(x, twice(graph, x)),))


def test_bits_that_a_kernel_stores_as_another_type(graph, built):
    x = graph.add_input((4, 32, 2), jnp.bfloat16)
    kernels, stored = alike.Kernels(), [x]
    for row in (1, 3):
        part = reshape(graph, take(graph, x, 0, row, 1, ""), (32, 2), "")
        stored.append(graph.add("bitcast", (part,), (32,), np.float32))
        fit = kernels.build(RowMajor(*stored), (into(stored[-1], stored[-1]),))
        assert [at.offset for _, _, at in fit.sources] == [32 * row]


def test_a_stored_sum_of_rows_is_not_alike_to_what_is_only_stored(graph, built):
    x, y, total = (graph.add_input(shape, np.float32) for shape in ((2, 4), (2,), (2,)))
    row_sum = graph.add("reduce", (x,), (2,), np.float32, op="sum")
    kernels, storages = alike.Kernels(), RowMajor(x, y, total, row_sum)
    for value in (y, row_sum, y):
        kernels.build(storages, (into(total, value),))
    assert [fit.is_row for fit in built] == [False, True]


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
def test_the_number_of_layers_is_no_matter(built, stacked):
    numbers = set()
    for layers in (4, 8):
        built.clear()
        config = dataclasses.replace(SHAPES["15m"], layers=layers)
        make = functools.partial(random_params, config, jnp.bfloat16, stacked=stacked)
        params = jax.eval_shape(make, jax.random.key(0))
        make = functools.partial(empty_cache, config, 1, 64, jnp.bfloat16, stacked=stacked)
        cache = jax.eval_shape(make)
        token, position = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        plan(functools.partial(decode_step, config=config), params, cache, token, position)
        numbers.add(len(built))
    assert len(numbers) == 1
    assert 0 < numbers.pop() < 40
