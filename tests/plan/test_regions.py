"""Which stretches become fork-join regions, in what order, and that results do not depend on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgraph
from jaxgraph import _native
from jaxgraph.plan import regions


@pytest.fixture
def always(monkeypatch):
    """Regions wherever there are two branches."""
    monkeypatch.setattr(regions, "pays", lambda branches: True)


def experts(x, weights):
    """Each expert is a chain of its own; what is before and after them is not."""
    x = jnp.tanh(x)
    total = 0.0
    for up, down in weights:
        total = total + jax.nn.relu(x @ up) ** 2 @ down
    return jnp.sin(total) + x


def arguments(width=16, hidden=24, number=3):
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray((rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32))

    return random(1, width), [(random(width, hidden), random(hidden, width)) for _ in range(number)]


def nodes_of(fun, *args, **options):
    """The nodes of the one program that a call is planned to."""
    programs = []
    encode = _native.encode_program
    try:
        _native.encode_program = lambda spec: programs.append(spec) or encode(spec)
        step = jaxgraph.wrap(fun, options=jaxgraph.Options(strict=True, **options))
        out = jax.block_until_ready(step(*args))
    finally:
        _native.encode_program = encode
    (spec,) = programs
    return step, out, spec["nodes"]


def test_experts_become_branches(always):
    x, weights = arguments()
    _, out, nodes = nodes_of(experts, x, weights)
    np.testing.assert_allclose(out, jax.jit(experts)(x, weights), rtol=1e-5, atol=1e-5)
    marks = [(region, branch) for _, _, region, branch, *_ in nodes]
    (region,) = {r for r, _ in marks if r}
    inside = [branch for r, branch in marks if r == region]
    assert sorted(set(inside)) == [0, 1, 2]
    assert inside == sorted(inside), "a branch is one run of nodes"
    first = marks.index((region, 0))
    assert all(r == region for r, _ in marks[first : first + len(inside)]), "a region is one run"
    # What the branches share stands before it, what needs them all behind it.
    assert marks[0] == (0, 0)
    assert marks[-1] == (0, 0)


def test_what_runs_at_once_shares_no_memory(always):
    x, weights = arguments(number=4)
    _, _, nodes = nodes_of(experts, x, weights)
    written: dict[int, list[tuple[int, int, int]]] = {}
    for _, _, region, branch, _, outs, _, _ in nodes:
        for _, base, offset, shape, _ in outs if region else ():
            assert base == 0
            written.setdefault(branch, []).append((offset, offset + 4 * int(np.prod(shape))))
    assert len(written) == 4
    spans = [(branch, *span) for branch, list_ in written.items() for span in list_]
    for a in spans:
        for b in spans:
            assert a[0] == b[0] or a[2] <= b[1] or b[2] <= a[1], (a, b)


@pytest.mark.parametrize("chunk_size", [0, 1, 4])
def test_results_are_the_same_bits_with_concurrency_and_without(always, chunk_size):
    x, weights = arguments(number=9)  # more than there are streams
    results = []
    for concurrency in (True, False):
        step, out, _ = nodes_of(experts, x, weights, concurrency=concurrency, chunk_size=chunk_size)
        results.append([out, *(step(x, weights) for _ in range(3))])
        assert step.stats().replays == 2
        assert step.stats().failures == 0
    for result in sum(results, []):
        np.testing.assert_array_equal(result, results[0][0])


def test_without_gain_it_stays_one_chain():
    x, weights = arguments(number=2)
    _, _, nodes = nodes_of(experts, x, weights)
    assert all(region == 0 for _, _, region, *_ in nodes)


def test_an_update_that_nobody_waits_for_hides_no_region(always):
    """Caches that are written and only returned are behind nothing and before nothing."""

    def step(x, weights, cache):
        new = jax.lax.dynamic_update_slice(cache, x, (3, 0))
        return experts(experts(x, weights), weights), new

    x, weights = arguments()
    cache = jnp.zeros((8, 16))
    _, out, nodes = nodes_of(step, x, weights, cache)
    np.testing.assert_allclose(out[0], jax.jit(step)(x, weights, cache)[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[1][3], x[0])
    assert len({region for _, _, region, *_ in nodes if region}) == 2


def test_what_pays():
    small, large = (3, 1 << 16), (1, 1 << 30)
    assert regions.pays([small] * 8)
    assert not regions.pays([small] * 2)
    assert not regions.pays([large] * 2), "reading is bound by the device, not by the launches"


def test_experts_of_a_small_model_pay():
    x, weights = arguments(number=16)
    _, out, nodes = nodes_of(experts, x, weights)
    assert {region for _, _, region, *_ in nodes} == {0, 1}
    assert len({branch for _, _, region, branch, *_ in nodes if region}) == regions.MAX_BRANCHES
    np.testing.assert_allclose(out, jax.jit(experts)(x, weights), rtol=1e-5, atol=1e-4)
