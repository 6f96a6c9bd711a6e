"""Fusion: which kernels a graph comes to, and that they cover it exactly."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxgraph.frontend.flatten import flatten
from jaxgraph.frontend.lowering import build_graph
from jaxgraph.passes.concat import push_through_concat
from jaxgraph.passes.fuse import FusedGraph, _Merger, fuse
from jaxgraph.passes.in_place import chain_stacked_updates
from jaxgraph.passes.splits import cut


def fused(fun, *args, merge: bool = True) -> FusedGraph:
    cuts = cut(flatten(jax.make_jaxpr(fun)(*args), 64))
    runs, left = cuts.runs, cuts.left
    assert [r.backend for r in runs] == ["native"], left
    graph = build_graph(runs[0].inputs, runs[0].eqns, runs[0].outputs, {})
    return fuse(chain_stacked_updates(push_through_concat(graph)), merge)


def kernels(result: FusedGraph) -> Counter:
    """How many kernels of each kind."""
    kinds = Counter("row" if c.is_row else "expr" for c in result.clusters)
    kinds.update(
        n.kind for n in result.graph.live_nodes() if n.kind in ("matmul", "gather", "set_rows")
    )
    return kinds


X = jnp.ones((2, 8))
W = jnp.ones((8, 8))


def rms_norm(x, w=1.0):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * w


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5)


def rotary(x):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * 2 - b * 3, b * 2 + a * 3], -1).astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: jnp.sin(x) * 2 + x, {"expr": 1}),
        (lambda x: jax.nn.softmax(x, -1), {"row": 1}),
        (rms_norm, {"row": 1}),
        (layer_norm, {"row": 1}),
        (lambda x: jax.nn.softmax(jnp.where(jnp.arange(8) < 3, x, -jnp.inf), -1), {"row": 1}),
        (lambda x: jnp.argmax(x, -1), {"row": 1}),
        (lambda x: jnp.argmax(x, -1).astype(jnp.int8) + 1, {"row": 1}),
        (lambda x: x.sum(0), {"row": 1}),
        (lambda x: x.sum(), {"row": 1}),
        (rotary, {"expr": 1}),
        (lambda x: jax.nn.silu(x @ W) * (x @ W.T), {"matmul": 2, "expr": 1}),
        (lambda x: rms_norm(x + 1) @ W, {"row": 1, "matmul": 1}),
        (lambda x: (x + 1, rms_norm(x + 1)), {"row": 1}),  # the sum is stored on the way
    ],
)
def test_kernels_of(fun, expected):
    assert kernels(fused(fun, X)) == expected


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 1), (64, 1), (65, 4)])
def test_few_elements_of_operands_share_a_kernel(size, expected):
    """A length of each sequence, say, kept with each layer."""
    layers = [jnp.full(size, i, jnp.int32) for i in range(4)]
    assert kernels(fused(lambda *layers: [n + 1 for n in layers], *layers)) == {"expr": expected}


def test_few_elements_that_are_computed_wait_for_nobody():
    """Beside an operand's few elements those of a product: its own kernel, behind the product."""

    def fun(lengths, x):
        return lengths + 1, jnp.maximum((x @ W)[:, 0], 0)

    assert kernels(fused(fun, jnp.zeros(2, jnp.int32), X)) == {"expr": 2, "matmul": 1}


def test_a_residual_stream_is_stored_not_recomputed():
    """Each layer adds to x; without storage the last layer would add up all that came before."""

    def fun(x):
        for _ in range(3):
            x = x + rms_norm(x) @ W
        return x

    result = fused(fun, X)
    assert kernels(result) == {"row": 3, "matmul": 3, "expr": 1}
    assert max(len(c.sources) for c in result.clusters) == 2


def test_an_unread_store_is_dropped():
    """cos and sin share an angle; merged into one kernel, nobody else reads the angle."""

    def fun(x):
        angle = jnp.exp(x)
        return jnp.cos(angle), jnp.sin(angle)

    (cluster,) = fused(fun, X).clusters
    assert len(cluster.sinks) == 2


def test_every_stored_value_has_exactly_one_writer():
    def fun(x):
        y = rms_norm(x + 1)
        z = jax.nn.softmax(y @ W, -1)
        return rotary(z), z.sum(-1), jnp.argmax(y, -1), x.T + z.T

    for merge in (True, False):
        result = fused(fun, X, merge=merge)
        written = Counter(
            (s.storage.id, s.place.offset, s.place.shape) for c in result.clusters for s in c.sinks
        )
        assert set(written.values()) == {1}
        read = {t.id for c in result.clusters for t in c.reads}
        made = {s.storage.id for c in result.clusters for s in c.sinks}
        made |= {n.out.id for n in result.graph.live_nodes() if n.kind in ("input", "matmul")}
        assert read <= made


def test_merging_makes_no_cycle():
    """The sum and its norm have a matrix product between them: one kernel cannot be both."""

    def fun(x):
        a = x + 1
        b = a @ W
        return rms_norm(a + b)

    result = fused(fun, X)
    assert kernels(result) == {"expr": 1, "matmul": 1, "row": 1}


@pytest.mark.parametrize("seed", range(20))
def test_merging_keeps_units_in_order(seed, monkeypatch):
    """What lies between two units is looked for in a part of the order alone."""
    rng = np.random.default_rng(seed)
    choices: Counter[bool] = Counter()

    def depends_through_another(reads, a, b):
        seen, stack = set(), [u for u in reads[b] if u != a]
        while stack:
            unit = stack.pop()
            if unit not in seen:
                seen.add(unit)
                stack += reads[unit]
        return a in seen

    class Checked(_Merger):
        def _between(self, edges, start, end):
            found = super()._between(edges, start, end)
            if edges is not self.readers:  # asked whether the two may merge
                on_a_detour = any(
                    depends_through_another(edges, *pair) for pair in ((start, end), (end, start))
                )
                assert (end in found) == on_a_detour
                choices[on_a_detour] += 1
            return found

        def _redirect(self, reads, a, b):
            super()._redirect(reads, a, b)
            assert all(self.rank[s] < self.rank[u] for u, sources in reads.items() for s in sources)

    def fun(x):
        made = [x, x @ W]
        for _ in range(80):
            a, b = (made[i] for i in rng.integers(max(0, len(made) - 6), len(made), 2))
            made.append([a + b, jnp.sin(a) * b, rms_norm(a) - b, a @ W, a.T @ b][rng.integers(5)])
            made[-1] = made[-1] if made[-1].shape == x.shape else made[-1][: x.shape[0]]
        return made[-3:]

    monkeypatch.setattr("jaxgraph.passes.fuse._Merger", Checked)
    fused(fun, X)
    assert choices[False] > 0
    assert choices[True] > 0


def test_kernels_that_merge_twice():
    """A kernel that took another's place reads what that one read, when its sources merge, too."""

    def fun(x):
        a = jnp.stack([x, -x], 0)[1]
        b = jnp.abs(a)
        return b, jnp.abs(b)

    for cluster in fused(fun, jnp.ones(1)).clusters:
        assert not {s.storage.id for s in cluster.sinks} & {t.id for t in cluster.reads}


def test_no_kernel_reads_what_it_writes_in_pieces():
    """A concatenation and its reader over the same space: another thread writes what one reads."""

    def fun(x):
        shifted = jnp.pad(x - x.max(-1, keepdims=True), [(1, 0)])[: x.shape[0]]
        return jnp.abs(shifted)

    result = fused(fun, jnp.ones(2))
    for cluster in result.clusters:
        assert not {s.storage.id for s in cluster.sinks} & {t.id for t in cluster.reads}


def test_reductions_over_different_rows_are_different_kernels():
    def fun(x):
        return (x / x.sum(0)) / x.sum(-1, keepdims=True)

    assert kernels(fused(fun, X))["row"] >= 2


def test_a_program_that_is_too_large_is_cut():
    def fun(x):
        for i in range(150):
            x = jnp.sin(x) * (1 + i)
        return x

    result = fused(fun, X)
    assert len(result.clusters) >= 3
    assert all(not c.is_row for c in result.clusters)


def test_a_stacked_cache_is_updated_as_one_array():
    def fun(cache, x, position):
        def layer(x, cache):
            cache = lax.dynamic_update_slice(cache, x[None], (position, 0))
            return x + cache.sum(0), cache

        return lax.scan(layer, x, cache)

    result = fused(fun, jnp.zeros((3, 4, 8)), jnp.ones(8), jnp.int32(1))
    updates = [n for n in result.graph.live_nodes() if n.kind == "set_rows"]
    assert [u.attrs["fixed"][0] for u in updates] == [(0, 0), (0, 1), (0, 2)]
    assert {u.out.shape for u in updates} == {(3, 4, 8)}
    assert not any(n.kind == "concat" for n in result.graph.live_nodes())
