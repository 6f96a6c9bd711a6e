"""Splits: maximal runs of one backend, with exact interfaces."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxgraph.frontend.flatten import flatten
from jaxgraph.passes.splits import cut


def cuts(fun, *args):
    step = flatten(jax.make_jaxpr(fun)(*args), 64)
    found = cut(step)
    return step, found.runs, found.left


def native_work(x):
    for _ in range(4):
        x = jnp.sin(x) * 2
    return x


def test_all_native_is_one_split():
    step, runs, left = cuts(native_work, jnp.ones(3))
    assert [r.backend for r in runs] == ["native"]
    assert runs[0].inputs == step.inputs
    assert runs[0].outputs == step.outputs
    assert left == []


def test_an_unknown_primitive_cuts_and_says_where():
    _, runs, left = cuts(lambda x: native_work(lax.cumlogsumexp(native_work(x))), jnp.ones(3))
    assert [r.backend for r in runs] == ["native", "xla", "native"]
    assert [e.primitive for e in left] == ["cumlogsumexp"]
    assert "no native kernel" in left[0].reason
    assert "test_splits.py" in left[0].source


def test_independent_work_does_not_cost_a_split():
    """What XLA does with two independent values stands in one split, whatever the order."""

    def fun(x, y):
        a = lax.cumlogsumexp(native_work(x))
        b = lax.cumlogsumexp(native_work(y))
        return native_work(a) + native_work(b)

    _, runs, _ = cuts(fun, jnp.ones(3), jnp.ones(3))
    assert [r.backend for r in runs] == ["native", "xla", "native"]


def test_a_short_run_between_xla_splits_joins_them():
    _, runs, left = cuts(lambda x: lax.cumlogsumexp(lax.cumlogsumexp(x) + 1), jnp.ones(3))
    assert [r.backend for r in runs] == ["xla"]
    assert any("too short" in e.reason for e in left)


def test_a_value_read_twice_crosses_once():
    def fun(x):
        y = native_work(x)
        s = lax.cumlogsumexp(y)
        return native_work(s + y), y

    _, runs, _ = cuts(fun, jnp.ones(3))
    assert len(runs[0].outputs) == 1
    assert len(runs[2].inputs) == 2


def test_dead_equations_are_dropped():
    def fun(x):
        lax.cumlogsumexp(x)
        return native_work(x)

    _, runs, left = cuts(fun, jnp.ones(3))
    assert [r.backend for r in runs] == ["native"]
    assert left == []


def test_effects_keep_their_order():
    def fun(x):
        jax.debug.print("first {}", x)
        y = native_work(x)
        jax.debug.print("second {}", y)
        z = native_work(y)
        jax.debug.print("third {}", z)
        return z

    _, runs, _ = cuts(fun, jnp.ones(3))
    prints = [e for r in runs for e in r.eqns if e.effects]
    assert [p.params["fmt"].split()[0] if "fmt" in p.params else None for p in prints] in (
        ["first", "second", "third"],
        [None, None, None],
    )
    assert len(prints) == 3
    positions = [i for i, r in enumerate(runs) for e in r.eqns if e.effects]
    assert positions == sorted(positions)


def test_what_has_no_native_dtype_stays_in_xla():
    _, runs, left = cuts(lambda x: x * (1 + 2j), jnp.ones(3, jnp.complex64))
    assert [r.backend for r in runs] == ["xla"]
    assert "complex64" in left[0].reason


def test_arrays_without_elements_stay_in_xla():
    _, runs, left = cuts(lambda x: jnp.sin(x), jnp.ones((0, 3)))
    assert [r.backend for r in runs] == ["xla"]
    assert "without elements" in left[0].reason


def test_xla_looks_at_arguments_itself():
    """A view of an argument that XLA needs does not cross a native split's border as a copy."""

    def fun(x, w):
        packed = w.reshape(2, 4, 4)
        y = native_work(x) @ packed[0]
        return native_work(lax.cumlogsumexp(y)) + lax.cumlogsumexp(packed[1]).sum()

    step, runs, _ = cuts(fun, jnp.ones((3, 4)), jnp.ones(32))
    (xla,) = (r for r in runs if r.backend == "xla")
    assert step.inputs[1] in xla.inputs
    native = runs[0]
    assert native.backend == "native"
    assert all(v.aval.shape != (4, 4) for v in native.outputs)


def test_xla_looks_at_arguments_itself_also_for_runs_that_joined_it():
    """A short run takes the views of arguments that it reads along, so that none is a result."""

    def fun(x, w):
        return lax.cumlogsumexp(native_work(x @ w)) @ w.T

    step, runs, _ = cuts(fun, jnp.ones((3, 4)), jnp.ones((4, 5)))
    assert [r.backend for r in runs] == ["native", "xla"]
    assert [v.aval.shape for v in runs[0].outputs] == [(3, 5)]
    assert step.inputs[1] in runs[1].inputs
