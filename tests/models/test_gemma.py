"""Gemma: scaled embedding, (1 + w) norms on both sides, soft caps, windowed and global layers."""

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 4, 44, 4, 2, 12, 76, 109, 38
WINDOW, ATTENTION_CAP, FINAL_CAP = 9, 50.0, 30.0


def rms_norm(x, scale):
    variance = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    normed = x * jax.lax.rsqrt(variance + 1e-6)
    return (normed * (1 + scale)).astype(x.dtype)


def apply_rope(x, position, max_wavelength=10_000):
    fraction = 2 * jnp.arange(0, HEAD_DIM // 2) / HEAD_DIM
    timescale = max_wavelength**fraction
    sinusoid = position[..., jnp.newaxis] / timescale[jnp.newaxis, jnp.newaxis, :]
    sinusoid = sinusoid[..., jnp.newaxis, :]
    sin, cos = jnp.sin(sinusoid), jnp.cos(sinusoid)
    first, second = jnp.split(x, 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def soft_cap(x, cap):
    return jnp.tanh(x / cap) * cap


def attention(p, x, cache, position, windowed):
    positions = jnp.broadcast_to(position, x.shape[:2])
    q = jnp.einsum("BTD,NDH->BTNH", x, p["q_einsum"])
    k, v = jnp.einsum("BSD,CKDH->CBSKH", x, p["kv_einsum"])
    q = apply_rope(q, positions) * HEAD_DIM**-0.5
    k = apply_rope(k, positions)
    index = (0, position % CONTEXT, 0, 0)
    k = jax.lax.dynamic_update_slice(cache["k"], k, index)
    v = jax.lax.dynamic_update_slice(cache["v"], v, index)
    b, t, _, h = q.shape
    q = q.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, h)
    logits = jnp.einsum("BTKGH,BSKH->BTKGS", q, k).reshape(b, t, HEADS, CONTEXT)
    logits = soft_cap(logits, ATTENTION_CAP)
    mask = jnp.arange(CONTEXT) <= position
    if windowed:
        mask = mask & (jnp.arange(CONTEXT) > position - WINDOW)
    logits = jnp.where(mask[None, None, None, :], logits, -2.3819763e38)
    probs = jax.nn.softmax(logits, axis=-1).astype(k.dtype)
    probs = probs.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, CONTEXT)
    encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probs, v).reshape(b, t, HEADS, h)
    return jnp.einsum("BTNH,NHD->BTD", encoded, p["attn_vec_einsum"]), {"k": k, "v": v}


def feed_forward(p, x):
    gate, value = jnp.einsum("BTD,CDF->CBTF", x, p["gating"])
    return (jax.nn.gelu(gate) * value) @ p["linear"]


def decode_step(params, cache, token, position):
    x = params["embedding"][token[:, None]]
    x *= jnp.sqrt(WIDTH).astype(x.dtype)
    new_cache = {}
    for i, p in enumerate(params["layers"]):
        name = f"layer_{i}"
        h = rms_norm(x, p["pre_attention_norm"])
        h, new_cache[name] = attention(p["attn"], h, cache[name], position, windowed=i % 2 == 0)
        x = x + rms_norm(h, p["post_attention_norm"])
        h = feed_forward(p["mlp"], rms_norm(x, p["pre_ffw_norm"]))
        x = x + rms_norm(h, p["post_ffw_norm"])
    x = rms_norm(x, params["final_norm"])
    logits = soft_cap(jnp.dot(x, params["embedding"].T), FINAL_CAP)[:, 0]
    return jnp.argmax(logits, axis=-1), logits, new_cache


def model(dtype, batch):
    w = Weights(dtype)

    def layer():
        return {
            "pre_attention_norm": w.vector(WIDTH),
            "attn": {
                "q_einsum": w.matrix(HEADS, WIDTH, HEAD_DIM),
                "kv_einsum": w.matrix(2, KV_HEADS, WIDTH, HEAD_DIM),
                "attn_vec_einsum": w.matrix(HEADS, HEAD_DIM, WIDTH, fan_in=HEADS * HEAD_DIM),
            },
            "post_attention_norm": w.vector(WIDTH),
            "pre_ffw_norm": w.vector(WIDTH),
            "mlp": {"gating": w.matrix(2, WIDTH, FFN), "linear": w.matrix(FFN, WIDTH)},
            "post_ffw_norm": w.vector(WIDTH),
        }

    params = {
        "embedding": w.matrix(VOCAB, WIDTH, fan_in=WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "final_norm": w.vector(WIDTH),
    }
    empty = jnp.zeros((batch, CONTEXT, KV_HEADS, HEAD_DIM), dtype)
    return params, {f"layer_{i}": {"k": empty, "v": empty} for i in range(LAYERS)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_gemma_is_one_split(dtype, batch):
    check_decoding(decode_step, *model(dtype, batch), batch=batch)
