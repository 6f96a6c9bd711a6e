"""Arrays that nested jits close over are operands of the wrapped function, too."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxgraph
from jaxgraph.runtime import native
from jaxgraph.runtime.nested_constants import lift

BIG = jnp.arange(5000.0)
TABLE = np.arange(5000, dtype=np.float32)
SMALL = jnp.arange(3.0)


@jax.jit
def inner(x):
    return x + BIG + SMALL.sum()


@jax.jit
def outer(x):
    return inner(x) * 2 + TABLE


def step(x):
    return outer(x) + inner(x)


def is_large(array):
    return array.size > 3


def consts_within(closed):
    """All arrays that jits inside of ``closed`` hold, large ones first."""
    found = []
    for eqn in closed.jaxpr.eqns:
        body = eqn.params.get("jaxpr")
        if hasattr(body, "consts"):
            found += [*body.consts, *consts_within(body)]
    return sorted(found, key=lambda a: -a.size)


def test_lifting_moves_large_ones_out_once_each():
    closed = jax.make_jaxpr(step)(BIG)
    lifted = lift(closed, is_large)
    assert {a.size for a in lifted.consts} == {5000}
    assert len(lifted.consts) == 2, "an array that two calls of one jit close over, and a table"
    assert {a.size for a in consts_within(lifted)} <= {3}
    got = jax.core.eval_jaxpr(lifted.jaxpr, lifted.consts, BIG)
    np.testing.assert_allclose(got[0], step(BIG))


def test_nothing_to_lift_is_the_same_jaxpr():
    closed = jax.make_jaxpr(jax.jit(lambda x: x + SMALL))(SMALL)
    assert lift(closed, is_large) is closed


def test_they_are_operands_whose_address_stays():
    wrapped = jaxgraph.wrap(step, options=jaxgraph.Options(strict=True))
    for _ in range(4):
        np.testing.assert_allclose(wrapped(BIG), jax.jit(step)(BIG))
    (split,) = wrapped.explain(BIG).splits
    bases = native.describe_program(split.program)["bases"]
    large = [b["label"] for b in bases if b["kind"] == "operand" and b["nbytes"] == 20000]
    assert sum(label.startswith("closed-over array") for label in large) == 2
    assert wrapped.stats().replays == 2


def test_the_plain_function_takes_them_too():
    wrapped = jaxgraph.wrap(step, options=jaxgraph.Options(strict=True))
    np.testing.assert_allclose(jax.grad(lambda x: wrapped(x).sum())(BIG), np.full(5000, 3.0))
    np.testing.assert_allclose(jax.vmap(wrapped)(BIG[None])[0], step(BIG))


def loops_and_branches(x):
    x = lax.fori_loop(0, x[0].astype(int) + 2, lambda i, x: inner(x), x)
    x = lax.while_loop(lambda x: inner(x)[1] < 1e3, lambda x: outer(x) + 1, x)
    x = lax.cond(x[0] > 0, inner, outer, x)
    return lax.switch(x[1].astype(int) % 3, [inner, lambda x: x - 1, lambda x: inner(inner(x))], x)


def test_those_in_loops_and_branches_are_operands_too():
    closed = jax.make_jaxpr(loops_and_branches)(BIG)
    lifted = lift(closed, is_large)
    assert sorted(a.size for a in lifted.consts) == [5000, 5000]
    bodies = [
        body
        for eqn in lifted.jaxpr.eqns
        for name in ("cond_jaxpr", "body_jaxpr", "branches")
        for body in jax.tree.leaves(eqn.params.get(name), is_leaf=lambda b: hasattr(b, "consts"))
    ]
    assert len(bodies) == 9
    assert all(a.size <= 3 for body in bodies for a in consts_within(body))
    got = jax.core.eval_jaxpr(lifted.jaxpr, lifted.consts, BIG)
    np.testing.assert_allclose(got[0], jax.jit(loops_and_branches)(BIG))

    wrapped = jaxgraph.wrap(loops_and_branches, options=jaxgraph.Options(strict=True))
    for _ in range(3):
        np.testing.assert_allclose(wrapped(BIG), jax.jit(loops_and_branches)(BIG))
    assert "closes over" not in str(wrapped.explain(BIG))
    np.testing.assert_allclose(jax.vmap(wrapped)(BIG[None])[0], jax.jit(loops_and_branches)(BIG))


def test_those_in_scans_are_operands_too():
    def fun(x):
        x = lax.fori_loop(0, 3, lambda i, x: inner(x), x)  # a scan, too
        return lax.scan(lambda x, y: (inner(x) + y, x[0]), x, BIG[:400], reverse=True)

    closed = jax.make_jaxpr(fun)(BIG)
    lifted = lift(closed, is_large)
    assert [a.size for a in lifted.consts] == [5000] * len(closed.consts) + [5000]
    assert all(a.size <= 3 for a in consts_within(lifted))
    for got, want in zip(
        jax.core.eval_jaxpr(lifted.jaxpr, lifted.consts, BIG), jax.jit(fun)(BIG), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    wrapped = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True))
    for _ in range(3):
        for got, want in zip(wrapped(BIG), jax.jit(fun)(BIG), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5)
