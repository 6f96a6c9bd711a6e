"""Layouts against numpy: a view through strides must show what numpy's own operation shows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgraph.graph import layout as ly
from jaxgraph.graph.layout import Layout


def seen(buffer: np.ndarray, layout: Layout) -> np.ndarray:
    """The elements that a layout names, one by one."""
    out = np.empty(layout.shape, buffer.dtype)
    for index in np.ndindex(*layout.shape):
        out[index] = buffer[
            layout.offset + sum(i * s for i, s in zip(index, layout.strides, strict=True))
        ]
    return out


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def views(draw):
    """A buffer, a layout in it, and the same view made by numpy."""
    shape = draw(shapes)
    buffer = np.arange(math.prod(shape))
    layout, array = ly.contiguous(shape), buffer.reshape(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "slice", "rev", "broadcast", "reshape"]))
        rank = len(array.shape)
        if kind == "transpose":
            permutation = draw(st.permutations(range(rank)))
            layout, array = ly.transpose(layout, permutation), array.transpose(permutation)
        elif kind == "slice":
            starts = [draw(st.integers(0, n - 1)) for n in array.shape]
            limits = [draw(st.integers(a + 1, n)) for a, n in zip(starts, array.shape, strict=True)]
            steps = [draw(st.integers(1, 2)) for _ in starts]
            layout = ly.slice_(layout, starts, limits, steps)
            array = array[tuple(map(slice, starts, limits, steps))]
        elif kind == "rev":
            dims = draw(st.lists(st.integers(0, rank - 1), unique=True))
            layout, array = ly.reverse(layout, dims), np.flip(array, dims)
        elif kind == "broadcast" and rank < 5:
            n = draw(st.integers(1, 3))
            layout = ly.broadcast(layout, (n, *array.shape), range(1, rank + 1))
            array = np.broadcast_to(array, (n, *array.shape))
        elif kind == "reshape":
            flat = ly.reshape(layout, (array.size,))
            if flat is not None:
                layout, array = flat, array.reshape(-1)
    return buffer, layout, array


@settings(max_examples=300, deadline=None)
@given(views())
def test_views_show_what_numpy_shows(case):
    buffer, layout, array = case
    assert layout.shape == array.shape
    np.testing.assert_array_equal(seen(buffer, layout), array)


@settings(max_examples=300, deadline=None)
@given(views(), st.data())
def test_reshape_is_right_or_declined(case, data):
    buffer, layout, array = case
    n = array.size
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    rows = data.draw(st.sampled_from(divisors))
    reshaped = ly.reshape(layout, (rows, 1, n // rows))
    if reshaped is not None:
        np.testing.assert_array_equal(seen(buffer, reshaped), array.reshape(rows, 1, n // rows))


def test_reshape_of_a_contiguous_layout_never_fails():
    layout = ly.reshape(ly.contiguous((4, 6), 5), (2, 3, 4))
    assert layout == Layout((2, 3, 4), (12, 4, 1), 5)


def test_reshape_across_a_transpose_has_no_strides():
    assert ly.reshape(ly.transpose(ly.contiguous((2, 3)), (1, 0)), (6,)) is None


@pytest.mark.parametrize(
    ("layout", "dense"),
    [
        (ly.contiguous((2, 3)), True),
        (ly.transpose(ly.contiguous((2, 3)), (1, 0)), True),
        (ly.contiguous((2, 3), 1), False),
        (ly.broadcast(ly.contiguous((3,)), (2, 3), (1,)), False),
        (ly.reverse(ly.contiguous((3,)), (0,)), False),
        (ly.slice_(ly.contiguous((4, 3)), (0, 0), (4, 2), None), False),
    ],
)
def test_dense_means_every_element_once(layout, dense):
    assert layout.is_dense is dense


def test_reinterpret_between_element_sizes():
    bytes_ = ly.contiguous((6, 4), 8)
    assert ly.reinterpret(bytes_, 1, (6,), 4) == Layout((6,), (1,), 2)
    assert ly.reinterpret(ly.contiguous((6, 4), 6), 1, (6,), 4) is None  # not aligned
    words = ly.contiguous((3,), 2)
    assert ly.reinterpret(words, 4, (3, 4), 1) == Layout((3, 4), (4, 1), 8)
    assert ly.reinterpret(words, 4, (3,), 4) == words


@settings(max_examples=200, deadline=None)
@given(shapes, st.data())
def test_collapse_walks_the_same_elements(shape, data):
    rank = len(shape)
    strides = [
        tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 12]), min_size=rank, max_size=rank)))
        for _ in range(2)
    ]
    strides.append(ly.contiguous_strides(shape))
    keep_last = data.draw(st.booleans())
    collapsed, walks = ly.collapse(shape, strides, keep_last)
    assert math.prod(collapsed) == math.prod(shape)
    if keep_last:
        assert collapsed[-1] == shape[-1]
    for before, after in zip(strides, walks, strict=True):
        old = [sum(i * s for i, s in zip(x, before, strict=True)) for x in np.ndindex(*shape)]
        new = [sum(i * s for i, s in zip(x, after, strict=True)) for x in np.ndindex(*collapsed)]
        assert old == new
