"""Llama with key and value heads repeated for their queries, and the interleaved rotary form."""

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 2, 48, 6, 2, 88, 97, 40
HEAD_DIM = WIDTH // HEADS


def rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    normed = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return weight * normed.astype(x.dtype)


def angles_table():
    frequency = 1.0 / (10000.0 ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = jnp.outer(jnp.arange(CONTEXT), frequency)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x, cos, sin):
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def repeat_kv(x, times):
    return jnp.repeat(x, times, axis=2)


def attention(p, x, cache, position, cos, sin):
    batch = x.shape[0]
    q = apply_rotary((x @ p["wq"]).reshape(batch, 1, HEADS, HEAD_DIM), cos, sin)
    k = apply_rotary((x @ p["wk"]).reshape(batch, 1, KV_HEADS, HEAD_DIM), cos, sin)
    v = (x @ p["wv"]).reshape(batch, 1, KV_HEADS, HEAD_DIM)
    cache_k = jax.lax.dynamic_update_slice(cache["k"], k, (0, position, 0, 0))
    cache_v = jax.lax.dynamic_update_slice(cache["v"], v, (0, position, 0, 0))
    keys = repeat_kv(cache_k, HEADS // KV_HEADS)
    values = repeat_kv(cache_v, HEADS // KV_HEADS)
    q, keys, values = (t.transpose(0, 2, 1, 3) for t in (q, keys, values))
    scores = jnp.matmul(q, keys.transpose(0, 1, 3, 2)) / HEAD_DIM**0.5
    mask = jnp.where(jnp.arange(CONTEXT) > position, jnp.finfo(scores.dtype).min, 0)
    scores = jax.nn.softmax((scores + mask).astype(jnp.float32), axis=-1).astype(q.dtype)
    out = jnp.matmul(scores, values).transpose(0, 2, 1, 3).reshape(batch, 1, -1)
    return out @ p["wo"], {"k": cache_k, "v": cache_v}


def decode_step(params, caches, token, position):
    cos, sin = params["rotary"]
    cos = jax.lax.dynamic_index_in_dim(cos, position, keepdims=False)
    sin = jax.lax.dynamic_index_in_dim(sin, position, keepdims=False)
    x = jnp.take(params["embed"], token[:, None], axis=0)
    new = []
    for p, cache in zip(params["layers"], caches, strict=True):
        h, cache = attention(p, rms_norm(x, p["norm1"]), cache, position, cos, sin)
        new.append(cache)
        x = x + h
        h = rms_norm(x, p["norm2"])
        x = x + (jax.nn.silu(h @ p["w1"]) * (h @ p["w3"])) @ p["w2"]
    logits = (rms_norm(x, params["norm"]) @ params["output"])[:, -1].astype(jnp.float32)
    return jnp.argmax(logits, axis=-1), logits, new


def model(dtype, batch):
    w = Weights(dtype)

    def layer():
        return {
            "norm1": w.vector(WIDTH, around=1.0),
            "wq": w.matrix(WIDTH, HEADS * HEAD_DIM),
            "wk": w.matrix(WIDTH, KV_HEADS * HEAD_DIM),
            "wv": w.matrix(WIDTH, KV_HEADS * HEAD_DIM),
            "wo": w.matrix(HEADS * HEAD_DIM, WIDTH),
            "norm2": w.vector(WIDTH, around=1.0),
            "w1": w.matrix(WIDTH, FFN),
            "w3": w.matrix(WIDTH, FFN),
            "w2": w.matrix(FFN, WIDTH),
        }

    params = {
        "embed": w.matrix(VOCAB, WIDTH, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": w.vector(WIDTH, around=1.0),
        "output": w.matrix(WIDTH, VOCAB),
        "rotary": angles_table(),
    }
    empty = jnp.zeros((batch, CONTEXT, KV_HEADS, HEAD_DIM), dtype)
    return params, [{"k": empty, "v": empty} for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_repeated_heads_are_one_split(dtype, batch):
    check_decoding(decode_step, *model(dtype, batch), batch=batch)
