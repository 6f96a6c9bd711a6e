"""A selective state space model: a short convolution and a recurrent state instead of a cache."""

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, INNER, STATE, KERNEL, RANK, VOCAB = 3, 36, 54, 7, 4, 5, 91


def rms_norm(x, weight):
    return x / jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-5) * weight


def mamba_block(p, x, state):
    xz = x @ p["in_proj"]
    x, z = jnp.split(xz, 2, axis=-1)
    conv = jnp.roll(state["conv"], shift=-1, axis=-1)
    conv = conv.at[:, :, -1].set(x)
    x = jax.nn.silu(jnp.sum(conv * p["conv_weight"], axis=-1) + p["conv_bias"])
    delta, b, c = jnp.split(x @ p["x_proj"], [RANK, RANK + STATE], axis=-1)
    delta = jax.nn.softplus(delta @ p["dt_proj"] + p["dt_bias"])
    a = -jnp.exp(p["a_log"].astype(jnp.float32))
    decay = jnp.exp(delta[..., None] * a)
    ssm = state["ssm"] * decay + delta[..., None] * b[:, None, :] * x[..., None]
    y = jnp.einsum("bin,bn->bi", ssm, c.astype(jnp.float32)) + p["d"] * x
    y = (y * jax.nn.silu(z)).astype(xz.dtype)
    return y @ p["out_proj"], {"conv": conv, "ssm": ssm}


def decode_step(params, state, token, position):
    x = params["embed"][token]
    new_state = []
    for p, layer_state in zip(params["layers"], state, strict=True):
        h, layer_state = mamba_block(p, rms_norm(x, p["norm"]).astype(x.dtype), layer_state)
        new_state.append(layer_state)
        x = x + h
    x = rms_norm(x, params["norm"]).astype(x.dtype)
    logits = jnp.dot(x, params["embed"].T, preferred_element_type=jnp.float32)
    return jnp.argmax(logits, axis=-1), logits, new_state


def model(dtype, batch):
    w = Weights(dtype)

    def layer():
        return {
            "norm": w.vector(WIDTH, around=1.0),
            "in_proj": w.matrix(WIDTH, 2 * INNER),
            "conv_weight": w.matrix(INNER, KERNEL, fan_in=KERNEL),
            "conv_bias": w.vector(INNER),
            "x_proj": w.matrix(INNER, RANK + 2 * STATE),
            "dt_proj": w.matrix(RANK, INNER),
            "dt_bias": w.vector(INNER, around=-2.0),
            "a_log": jnp.log(jnp.broadcast_to(jnp.arange(1.0, STATE + 1), (INNER, STATE))),
            "d": w.vector(INNER, around=1.0),
            "out_proj": w.matrix(INNER, WIDTH),
        }

    params = {
        "embed": w.matrix(VOCAB, WIDTH, fan_in=WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": w.vector(WIDTH, around=1.0),
    }
    state = {
        "conv": jnp.zeros((batch, INNER, KERNEL), dtype),
        "ssm": jnp.zeros((batch, INNER, STATE), jnp.float32),
    }
    return params, [state for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_recurrent_step_is_one_split(dtype):
    """Its states are made anew at every step, so they need no fixed address."""
    check_decoding(decode_step, *model(dtype, 2), in_place=False)
