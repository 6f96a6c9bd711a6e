"""A decoder that leaves attention to `jax.nn.dot_product_attention`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCAB, CONTEXT = 2, 36, 4, 2, 9, 89, 40


def layer_norm(x, weight):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * weight


def by_mask(q, k, v, position):
    mask = (jnp.arange(k.shape[1]) <= position)[None, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


def by_length(q, k, v, position):
    lengths = jnp.full(q.shape[0], position + 1)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)


def by_bias(q, k, v, position):
    hidden = jnp.finfo(q.dtype).min
    bias = jnp.where(jnp.arange(k.shape[1]) <= position, 0, hidden).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias[None, None, None, :], scale=0.4)


def decode_step(params, cache, token, position, *, attend):
    x = params["embed"][token][:, None]
    new_cache = []
    for p, (keys, values) in zip(params["layers"], cache, strict=True):
        h = layer_norm(x, p["norm"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in ("q", "k", "v"))
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k, position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v, position, axis=1)
        new_cache.append((keys, values))
        x = x + jnp.einsum("bthk,hkd->btd", attend(q, keys, values, position), p["o"])
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    logits = layer_norm(x[:, 0], params["norm"]) @ params["head"]
    return jnp.argmax(logits, -1), logits, new_cache


def model(dtype, batch):
    w = Weights(dtype)

    def layer():
        return {
            "norm": w.vector(WIDTH, around=1.0),
            "q": w.matrix(WIDTH, HEADS, HEAD_DIM, fan_in=WIDTH),
            "k": w.matrix(WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
            "v": w.matrix(WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
            "o": w.matrix(HEADS, HEAD_DIM, WIDTH, fan_in=HEADS * HEAD_DIM),
            "up": w.matrix(WIDTH, 2 * WIDTH),
            "down": w.matrix(2 * WIDTH, WIDTH),
        }

    params = {
        "embed": w.matrix(VOCAB, WIDTH, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": w.vector(WIDTH, around=1.0),
        "head": w.matrix(WIDTH, VOCAB),
    }
    empty = jnp.zeros((batch, CONTEXT, KV_HEADS, HEAD_DIM), dtype)
    return params, [(empty, empty) for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attend", [by_mask, by_length, by_bias], ids=lambda f: f.__name__)
def test_dot_product_attention_is_one_split(dtype, attend):
    step = functools.partial(decode_step, attend=attend)
    check_decoding(step, *model(dtype, 2))
