"""Qwen3: norms of each query and key head, heads wider than the model, caches written with `at`."""

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 3, 40, 4, 2, 16, 72, 103, 36


def rms_norm(x, weight, eps=1e-6):
    dtype = x.dtype
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return (x * weight.astype(jnp.float32)).astype(dtype)


def rotate_half(x):
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-x2, x1], axis=-1)


def rotary_embedding(positions):
    inv_freq = 1.0 / (1000000 ** (jnp.arange(0, HEAD_DIM, 2, dtype=jnp.float32) / HEAD_DIM))
    freqs = positions[:, :, None].astype(jnp.float32) * inv_freq
    emb = jnp.concatenate([freqs, freqs], axis=-1)
    return jnp.cos(emb)[:, :, None, :], jnp.sin(emb)[:, :, None, :]


def apply_rope(x, positions):
    cos, sin = rotary_embedding(positions)
    return (x * cos + rotate_half(x) * sin).astype(x.dtype)


def attention(p, x, cache, position):
    batch = x.shape[0]
    positions = jnp.full((batch, 1), position)
    q = rms_norm(jnp.einsum("btd,dnh->btnh", x, p["q_proj"]), p["q_norm"])
    k = rms_norm(jnp.einsum("btd,dnh->btnh", x, p["k_proj"]), p["k_norm"])
    v = jnp.einsum("btd,dnh->btnh", x, p["v_proj"])
    q, k = apply_rope(q, positions), apply_rope(k, positions)
    keys = cache["k"].at[:, position].set(k[:, 0])
    values = cache["v"].at[:, position].set(v[:, 0])
    q = q.reshape(batch, 1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    logits = jnp.einsum("btkgh,bskh->bkgts", q, keys, preferred_element_type=jnp.float32)
    logits = logits * HEAD_DIM**-0.5
    mask = jnp.arange(CONTEXT)[None, None, None, None, :] <= position
    logits = jnp.where(mask, logits, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, values)
    out = out.reshape(batch, 1, HEADS, HEAD_DIM)
    return jnp.einsum("btnh,nhd->btd", out, p["o_proj"]), {"k": keys, "v": values}


def mlp(p, x):
    return (jax.nn.silu(x @ p["gate_proj"]) * (x @ p["up_proj"])) @ p["down_proj"]


def decode_step(params, cache, token, position):
    x = params["embed_tokens"].at[token[:, None]].get(mode="clip")
    new_cache = {}
    for name, p in params["layers"].items():
        h, new_cache[name] = attention(
            p["self_attn"], rms_norm(x, p["input_layernorm"]), cache[name], position
        )
        x = x + h
        x = x + mlp(p["mlp"], rms_norm(x, p["post_attention_layernorm"]))
    x = rms_norm(x, params["norm"])
    logits = jnp.einsum("btd,vd->btv", x, params["embed_tokens"])[:, -1]
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits, new_cache


def model(dtype, batch):
    w = Weights(dtype)

    def layer():
        return {
            "input_layernorm": w.vector(WIDTH, around=1.0),
            "self_attn": {
                "q_proj": w.matrix(WIDTH, HEADS, HEAD_DIM, fan_in=WIDTH),
                "k_proj": w.matrix(WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
                "v_proj": w.matrix(WIDTH, KV_HEADS, HEAD_DIM, fan_in=WIDTH),
                "o_proj": w.matrix(HEADS, HEAD_DIM, WIDTH, fan_in=HEADS * HEAD_DIM),
                "q_norm": w.vector(HEAD_DIM, around=1.0),
                "k_norm": w.vector(HEAD_DIM, around=1.0),
            },
            "post_attention_layernorm": w.vector(WIDTH, around=1.0),
            "mlp": {
                "gate_proj": w.matrix(WIDTH, FFN),
                "up_proj": w.matrix(WIDTH, FFN),
                "down_proj": w.matrix(FFN, WIDTH),
            },
        }

    params = {
        "embed_tokens": w.matrix(VOCAB, WIDTH, fan_in=WIDTH),
        "layers": {f"layers_{i}": layer() for i in range(LAYERS)},
        "norm": w.vector(WIDTH, around=1.0),
    }
    empty = jnp.zeros((batch, CONTEXT, KV_HEADS, HEAD_DIM), dtype)
    return params, {name: {"k": empty, "v": empty} for name in params["layers"]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_qwen3_is_one_split(dtype, batch):
    check_decoding(decode_step, *model(dtype, batch), batch=batch)
