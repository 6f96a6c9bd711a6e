"""Errors: of the same type as `jax.jit`'s, with the names of the user's function and argument."""

import functools
import re
import traceback

import jax
import jax.numpy as jnp
import pytest

import jaxgraph


def add(x, y):
    return x + y


def raised(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def first_line(error):
    return re.sub("0x[0-9a-f]+", "ADDRESS", str(error)).split("\n")[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda f: f(jnp.ones(3)),
        lambda f: f(jnp.ones(3), jnp.ones(4)),
        lambda f: f("text", jnp.ones(3)),
        lambda f: f(jnp.ones(3), jnp.ones(3), jnp.ones(3)),
        lambda f: f(jnp.ones(3), z=jnp.ones(3)),
    ],
)
def test_a_wrong_argument_raises_what_jit_raises(call):
    expected, got = raised(lambda: call(jax.jit(add))), raised(lambda: call(jaxgraph.wrap(add)))
    assert type(got) is type(expected)
    assert first_line(got) == first_line(expected)


def test_arguments_that_change_after_closed_over_arrays_were_found():
    """The arrays are an argument in front; no message may count or name it."""
    big = jnp.arange(2000.0)

    def closing(x, y):
        return x + y + big

    x = jnp.ones(2000)
    step, plain = jaxgraph.wrap(closing), jax.jit(closing)
    step(x, x), plain(x, x)
    for arguments in [(x,), (x, x, x), (x, "text"), (x, jnp.ones(3))]:
        expected, got = (raised(functools.partial(f, *arguments)) for f in (plain, step))
        assert type(got) is type(expected)
        assert first_line(got) == first_line(expected)
    step(x, x)


@pytest.mark.parametrize("result", ["text", {"a": object()}, [1.0, add]])
def test_a_step_that_returns_the_wrong_thing(result):
    def returns_it(x):
        return x, result

    expected = raised(lambda: jax.jit(returns_it)(jnp.ones(3)))
    got = raised(lambda: jaxgraph.wrap(returns_it)(jnp.ones(3)))
    assert type(got) is type(expected)
    assert first_line(got) == first_line(expected)
    assert "returns_it" in str(got) and "test_errors.py" in str(got)


def test_a_branch_on_a_traced_value_names_function_and_arguments():
    def branches(x, threshold):
        return x if x.sum() > threshold else -x

    arguments = jnp.ones(3), jnp.float32(0)
    got = raised(lambda: jaxgraph.wrap(branches)(*arguments))
    assert str(got) == str(raised(lambda: jax.jit(branches)(*arguments)))
    assert isinstance(got, jax.errors.TracerBoolConversionError)
    assert "branches" in str(got) and "x and threshold" in str(got)


def test_tracebacks_go_from_the_call_to_the_users_line(without_folder):
    def divides(x):
        return x + jnp.ones(4)

    step = jaxgraph.wrap(divides)
    error = raised(lambda: step(jnp.ones(3)))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/jaxgraph/" in without_folder(frame.filename)]
    assert [frame.name for frame in ours] == ["__call__"]
    assert "divides" in [frame.name for frame in frames]


def test_a_donated_argument_that_was_used_up():
    def step(cache, x):
        return [{"k": cache[0]["k"] + x}], x

    wrapped = jaxgraph.wrap(step, donate_argnums=0)
    cache = [{"k": jnp.zeros(3)}]
    wrapped(cache, jnp.ones(3))
    error = raised(lambda: wrapped(cache, jnp.ones(3)))
    plain, other = jax.jit(step, donate_argnums=0), [{"k": jnp.zeros(3)}]
    plain(other, jnp.ones(3))
    assert type(error) is type(raised(lambda: plain(other, jnp.ones(3))))
    assert "step: argument cache[0]['k'] (float32[3]) has been deleted" in str(error)
    assert "donate_argnums" in str(error) and "what the last call returned" in str(error)
    error = raised(lambda: wrapped(x=jnp.ones(3), cache=cache))
    assert "argument cache[0]['k']" in str(error) and "donate_argnums" in str(error)


def test_a_failing_call_that_used_up_its_arguments_says_why_it_failed():
    def step(cache, x):
        def fails(x):
            raise ValueError("out of luck")

        return cache + x, jax.pure_callback(fails, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    wrapped = jaxgraph.wrap(step, donate_argnums=0)
    cache = jnp.zeros(3)
    error = raised(lambda: jax.block_until_ready(wrapped(cache, jnp.ones(3))))
    assert cache.is_deleted()
    assert "out of luck" in str(error)


def test_an_argument_that_somebody_else_used_up():
    gone = jnp.ones(3)
    gone.delete()
    error = raised(lambda: jaxgraph.wrap(add)(jnp.ones(3), gone))
    assert type(error) is RuntimeError
    assert "add: argument y (float32[3]) has been deleted" in str(error)
    assert "donate_argnums" not in str(error)


@pytest.mark.parametrize("size", [8, 3000])  # a constant of the code, and an operand
def test_a_closed_over_array_that_was_deleted(size):
    params = {"w": jnp.arange(size, dtype=jnp.float32)}

    def step(x):
        return x * params["w"]

    wrapped = jaxgraph.wrap(step)
    params["w"].delete()
    error = raised(lambda: wrapped(jnp.ones(size)))
    assert type(error) is RuntimeError
    assert "step closes over the array params['w']" in str(error)
    assert "make it an argument" in str(error) and "copy" in str(error)


def test_a_closed_over_array_that_was_deleted_after_a_call():
    big = jnp.arange(3000.0)
    wrapped = jaxgraph.wrap(lambda x: x + big)
    wrapped(jnp.ones(3000))
    big.delete()
    error = raised(lambda: wrapped(jnp.ones(3000)))
    assert type(error) is RuntimeError
    assert "closes over the array big (float32[3000])" in str(error)


@pytest.mark.parametrize("option", ["donate_argnums", "static_argnums"])
@pytest.mark.parametrize("argnum", [2, -3])
def test_positions_out_of_range(option, argnum):
    error = raised(lambda: jaxgraph.wrap(add, **{option: argnum}))
    assert type(error) is type(raised(lambda: jax.jit(add, **{option: argnum})))
    assert f"{option}=({argnum},)" in str(error) and "x, y" in str(error)
    assert "test_errors.add has no argument" in str(error)
    jaxgraph.wrap(lambda *args: args, **{option: 2})


def test_an_argument_that_is_static_and_donated():
    for argnum in (1, -1):
        error = raised(
            lambda argnum=argnum: jaxgraph.wrap(add, static_argnums=1, donate_argnums=argnum)
        )
        assert type(error) is ValueError
        assert "'y' of test_errors.add is both static and donated" in str(error)


@pytest.mark.parametrize("form", ["by position", "by keyword"])
def test_a_static_argument_that_cannot_be_hashed(form):
    big = jnp.arange(2000.0)

    def scaled(x, sizes):
        return x * sizes[0] + big

    step = jaxgraph.wrap(scaled, static_argnums=1)
    x = jnp.ones(2000)
    for _ in range(2):  # before and after the closed-over array was found
        error = raised(lambda: step(x, [3]) if form == "by position" else step(x, sizes=[3]))
        assert type(error) is ValueError  # as jax.jit
        assert "scaled: argument 'sizes' is static" in str(error)
        assert "a list is not" in str(error)
        step(x, (3,))


def test_what_cannot_be_wrapped():
    with pytest.raises(TypeError, match="expects a function, got int"):
        jaxgraph.wrap(3)
    with pytest.raises(TypeError, match="already wrapped"):
        jaxgraph.wrap(jaxgraph.wrap(lambda x: x))


def test_an_error_of_the_users_function_passes_through():
    def fun(x):
        raise RuntimeError("mine")

    error = raised(lambda: jaxgraph.wrap(fun)(jnp.ones(3)))
    assert type(error) is RuntimeError and error.args == ("mine",)
