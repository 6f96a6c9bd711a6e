"""Llama with stacked layers: a scan takes the layers' caches as inputs and returns them stacked."""

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 3, 48, 6, 2, 8, 88, 97, 40


def rms_norm(x, weight, eps=1e-5):
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + eps)
    return (x * scale).astype(x.dtype) * weight


def rope(x, position):
    half = x.shape[-1] // 2
    angle = position / 10000.0 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def decode_step(params, cache, token, position):
    def layer(x, scanned):
        p, keys, values = scanned
        h = rms_norm(x, p["input_norm"])
        q = rope(jnp.einsum("bd,dkgh->bkgh", h, p["q"]), position)
        k = rope(jnp.einsum("bd,dkh->bkh", h, p["k"]), position)
        v = jnp.einsum("bd,dkh->bkh", h, p["v"])
        keys = jax.lax.dynamic_update_slice_in_dim(keys, k[:, None], position, axis=1)
        values = jax.lax.dynamic_update_slice_in_dim(values, v[:, None], position, axis=1)
        scores = jnp.einsum("bkgh,bskh->bkgs", q, keys).astype(jnp.float32) * HEAD_DIM**-0.5
        scores = jnp.where(jnp.arange(CONTEXT) <= position, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        x = x + jnp.einsum("bkgs,bskh,kghd->bd", weights, values, p["o"])
        h = rms_norm(x, p["post_norm"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return x, (keys, values)

    x = params["embed"][token]
    x, (keys, values) = jax.lax.scan(layer, x, (params["layers"], cache["k"], cache["v"]))
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return jnp.argmax(logits, -1).astype(jnp.int32), logits, {"k": keys, "v": values}


def model(dtype, batch):
    w = Weights(dtype)
    heads = (KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    params = {
        "embed": w.matrix(VOCAB, WIDTH, fan_in=1),
        "layers": {
            "input_norm": w.vector(LAYERS, WIDTH, around=1.0),
            "q": w.matrix(LAYERS, WIDTH, *heads, fan_in=WIDTH),
            "k": w.matrix(LAYERS, WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
            "v": w.matrix(LAYERS, WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
            "o": w.matrix(LAYERS, *heads, WIDTH, fan_in=WIDTH),
            "post_norm": w.vector(LAYERS, WIDTH, around=1.0),
            "gate": w.matrix(LAYERS, WIDTH, FFN),
            "up": w.matrix(LAYERS, WIDTH, FFN),
            "down": w.matrix(LAYERS, FFN, WIDTH),
        },
        "norm": w.vector(WIDTH, around=1.0),
        "head": w.matrix(WIDTH, VOCAB),
    }
    shape = (LAYERS, batch, CONTEXT, KV_HEADS, HEAD_DIM)
    return params, {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_scanned_llama_is_one_split(dtype, batch):
    check_decoding(decode_step, *model(dtype, batch), batch=batch)
