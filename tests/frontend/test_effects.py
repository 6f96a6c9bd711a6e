"""What stays in XLA beside native work: effects in their order, callbacks, random numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxgraph

STRICT = jaxgraph.Options(strict=True)


def work(x):
    for _ in range(4):
        x = jnp.sin(x) * 2 + 1
    return x


def backends(step, *args):
    return [split.backend for split in step.explain(*args).splits]


@pytest.mark.parametrize("kind", ["ordered io_callback", "ordered debug.callback"])
def test_effects_happen_in_order_at_every_call(kind):
    said = []

    def note(name, x):
        if kind == "ordered io_callback":
            io_callback(lambda v: said.append((name, float(v))), None, x.sum(), ordered=True)
        else:
            jax.debug.callback(lambda v: said.append((name, float(v))), x.sum(), ordered=True)

    def fun(x):
        note("first", x)
        y = work(x)
        note("second", y)
        z = work(y)
        note("third", x)
        return work(z)

    x = jnp.linspace(0.0, 1.0, 5)
    expected = jax.jit(fun)(x)
    jax.effects_barrier()
    plain, step = list(said), jaxgraph.wrap(fun, options=STRICT)
    assert "native" in backends(step, x)
    for _ in range(4):
        said.clear()
        np.testing.assert_allclose(step(x), expected, rtol=1e-6)
        jax.effects_barrier()
        assert [name for name, _ in said] == ["first", "second", "third"]
        np.testing.assert_allclose([v for _, v in said], [v for _, v in plain], rtol=1e-6)


def test_unordered_prints_all_happen(capfd):
    def fun(x):
        jax.debug.print("before {}", x[0])
        y = work(x)
        jax.debug.print("after {}", y.shape[0])
        return work(y)

    step = jaxgraph.wrap(fun, options=STRICT)
    for _ in range(3):
        step(jnp.zeros(3)).block_until_ready()
    jax.effects_barrier()
    text = capfd.readouterr().out
    assert (text.count("before 0.0"), text.count("after 3")) == (3, 3)


def test_a_callback_between_native_splits():
    def host(x):
        return np.cumsum(np.asarray(x))[::-1].copy()

    def fun(x):
        y = jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), work(x))
        return work(y) + x

    step = jaxgraph.wrap(fun, options=STRICT)
    for i in range(4):
        x = jnp.linspace(0.0, 1.0 + i, 7)
        np.testing.assert_allclose(step(x), jax.jit(fun)(x), rtol=1e-5)
    assert backends(step, x) == ["native", "callback", "native"]
    assert step.stats().replays > 0


SAMPLERS = {
    "uniform": lambda key, x: jax.random.uniform(key, x.shape) + x,
    "normal": lambda key, x: jax.random.normal(key, x.shape) + x,
    "bernoulli": lambda key, x: jnp.where(jax.random.bernoulli(key, 0.3, x.shape), x, 0),
    "gumbel": lambda key, x: jax.random.gumbel(key, x.shape) + x,
    "integers": lambda key, x: jax.random.randint(key, x.shape, 0, 17) + x,
    "categorical": lambda key, x: jax.random.categorical(key, x / 0.7),
    "split": lambda key, x: jax.random.uniform(jax.random.split(key)[1], x.shape) * x,
    "folded": lambda key, x: jax.random.uniform(jax.random.fold_in(key, 3), x.shape) * x,
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("new_keys", [True, False])
def test_random_numbers_are_those_of_xla(name, new_keys):
    """The bits are; floats made of them may differ in their last place."""
    sampler = SAMPLERS[name]

    def fun(key, x):
        return sampler(key, work(x))

    make = jax.random.key if new_keys else jax.random.PRNGKey
    x = jnp.linspace(-1.0, 1.0, 24).reshape(2, 12)
    step = jaxgraph.wrap(fun, options=STRICT)
    for seed in range(4):
        got, want = step(make(seed), x), jax.jit(fun)(make(seed), x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert "native" in backends(step, make(0), x)


def test_a_choice_among_logits_is_one_kernel_behind_its_bits():
    """Noise, temperature and argmax: no array of a vocabulary's length is stored but the bits."""

    def fun(key, logits):
        return jax.random.categorical(key, logits / 0.7)

    logits = jax.random.normal(jax.random.key(0), (2, 5000))
    step = jaxgraph.wrap(fun, options=STRICT)
    explanation = step.explain(jax.random.key(1), logits)
    assert [s.backend for s in explanation.splits] == ["xla", "native"]
    assert explanation.splits[1].ops == {"ROW": 1}
    assert explanation.splits[1].arena_bytes == 0
    for seed in range(4):
        key = jax.random.key(seed)
        np.testing.assert_array_equal(step(key, logits), jax.jit(fun)(key, logits))


def test_top_k_sampling_with_a_nucleus():
    """The usual sampler: the best k, a softmax, its running sum, and a choice among them."""

    def fun(key, logits):
        best, tokens = jax.lax.top_k(logits / 0.8, 50)
        probabilities = jax.nn.softmax(best)
        kept = jnp.cumsum(probabilities, -1) - probabilities < 0.9
        choice = jax.random.categorical(key, jnp.where(kept, best, -jnp.inf))
        return jnp.take_along_axis(tokens, choice[:, None], -1)[:, 0]

    logits = jax.random.normal(jax.random.key(0), (2, 40000)) * 3
    step = jaxgraph.wrap(fun, options=STRICT)
    for seed in range(6):
        key = jax.random.key(seed)
        np.testing.assert_array_equal(step(key, logits), jax.jit(fun)(key, logits))
    assert backends(step, key, logits) == ["xla", "native"]
