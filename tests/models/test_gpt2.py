"""GPT-2: layer norms and biases, one matrix for q, k and v, learned positions, GELU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, VOCAB, CONTEXT = 3, 60, 5, 101, 37


def layer_norm(x, scale, bias, eps=1e-5):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + eps) * scale + bias


def linear(x, w, b):
    return x @ w + b


def attention(x, p, cache, position):
    batch, length, width = x.shape
    q, k, v = jnp.split(linear(x, **p["c_attn"]), 3, axis=-1)
    q, k, v = (
        t.reshape(batch, length, HEADS, width // HEADS).transpose(0, 2, 1, 3) for t in (q, k, v)
    )
    keys, values = cache
    keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, position, 0))
    values = jax.lax.dynamic_update_slice(values, v, (0, 0, position, 0))
    scores = q @ keys.swapaxes(-1, -2) / jnp.sqrt(jnp.asarray(width // HEADS, x.dtype))
    seen = (jnp.arange(CONTEXT) <= position).astype(x.dtype)
    scores = scores * seen - 1e10 * (1 - seen)  # as in the original
    weights = jax.nn.softmax(scores, axis=-1)
    attended = (weights @ values).transpose(0, 2, 1, 3).reshape(batch, length, width)
    return linear(attended, **p["c_proj"]), (keys, values)


def mlp(x, p, approximate):
    return linear(jax.nn.gelu(linear(x, **p["c_fc"]), approximate=approximate), **p["c_proj"])


def decode_step(params, cache, token, position, *, approximate):
    x = params["wte"][token][:, None, :] + params["wpe"][position]
    new_cache = []
    for p, layer_cache in zip(params["h"], cache, strict=True):
        attended, layer_cache = attention(
            layer_norm(x, **p["ln_1"]), p["attn"], layer_cache, position
        )
        new_cache.append(layer_cache)
        x = x + attended
        x = x + mlp(layer_norm(x, **p["ln_2"]), p["mlp"], approximate)
    logits = layer_norm(x[:, -1], **params["ln_f"]) @ params["wte"].T
    return jnp.argmax(logits, axis=-1), logits, new_cache


def model(dtype, batch):
    w = Weights(dtype)

    def norm():
        return {"scale": w.vector(WIDTH, around=1.0), "bias": w.vector(WIDTH)}

    def dense(n, m):
        return {"w": w.matrix(n, m), "b": w.vector(m)}

    def block():
        return {
            "ln_1": norm(),
            "attn": {"c_attn": dense(WIDTH, 3 * WIDTH), "c_proj": dense(WIDTH, WIDTH)},
            "ln_2": norm(),
            "mlp": {"c_fc": dense(WIDTH, 4 * WIDTH), "c_proj": dense(4 * WIDTH, WIDTH)},
        }

    params = {
        "wte": w.matrix(VOCAB, WIDTH, fan_in=WIDTH),
        "wpe": w.matrix(CONTEXT, WIDTH, fan_in=WIDTH),
        "h": [block() for _ in range(LAYERS)],
        "ln_f": norm(),
    }
    empty = jnp.zeros((batch, HEADS, CONTEXT, WIDTH // HEADS), dtype)
    return params, [(empty, empty) for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
def test_gpt2_is_one_split(dtype, approximate):
    step = functools.partial(decode_step, approximate=approximate)
    check_decoding(step, *model(dtype, 2))
