"""GPT-OSS: attention sinks, every other layer windowed, biases, experts with a clamped gate."""

import jax
import jax.numpy as jnp
import pytest
from decoding import DTYPES, Weights, check_decoding

import jaxgraph

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, CONTEXT = 2, 40, 6, 2, 10, 36, 101, 38
WINDOW, EXPERTS, CHOSEN, LIMIT, ALPHA = 9, 5, 2, 7.0, 1.702
# As in test_mixtral.py: no routing is a near tie, the logits of the second and third expert lie at
# least 0.1 apart.
SEED = 42


def rms_norm(x, scale):
    t = x.astype(jnp.float32)
    t = t * jax.lax.rsqrt(jnp.mean(t**2, axis=-1, keepdims=True) + 1e-5)
    return (t * scale).astype(x.dtype)


def rotate(x, position):
    angle = position * 150_000.0 ** -(jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def attention(p, x, cache, position, window):
    batch = x.shape[0]
    qkv = rms_norm(x, p["norm"]) @ p["qkv"] + p["qkv_bias"]
    q, k, v = jnp.split(qkv, [HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM], axis=-1)
    q = rotate(q.reshape(batch, HEADS, HEAD_DIM), position)
    k = rotate(k.reshape(batch, KV_HEADS, HEAD_DIM), position)
    v = v.reshape(batch, KV_HEADS, HEAD_DIM)
    keys = jax.lax.dynamic_update_slice(cache["k"], k[:, None], (0, position, 0, 0))
    values = jax.lax.dynamic_update_slice(cache["v"], v[:, None], (0, position, 0, 0))
    q = q.reshape(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = jnp.einsum("bhmd,bkhd->bhmk", q, keys) * HEAD_DIM**-0.5
    place = jnp.arange(CONTEXT)
    hidden = place > position
    if window:
        hidden = hidden | (place <= position - window)
    scores = jnp.where(hidden, -jnp.inf, scores)
    sinks = jnp.broadcast_to(
        p["sinks"].reshape(1, KV_HEADS, -1, 1), (batch, KV_HEADS, HEADS // KV_HEADS, 1)
    )
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("bhmk,bkhd->bhmd", weights, values).reshape(batch, -1)
    return x + out @ p["out"] + p["out_bias"], {"k": keys, "v": values}


def swiglu(x):
    gate, linear = x[..., ::2], x[..., 1::2]
    gate, linear = jnp.minimum(gate, LIMIT), jnp.clip(linear, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (linear + 1)


def experts(p, x):
    t = rms_norm(x, p["norm"])
    best, chosen = jax.lax.top_k(t @ p["router"] + p["router_bias"], CHOSEN)
    weights = jax.nn.softmax(best, axis=-1)
    h = jnp.einsum("beck,bk->bec", p["up"][chosen], t) + p["up_bias"][chosen]
    h = jnp.einsum("beck,bek->bec", p["down"][chosen], swiglu(h)) + p["down_bias"][chosen]
    return x + jnp.einsum("bec,be->bc", h, weights)


def decode_step(params, cache, token, position):
    x = params["embedding"][token]
    new_cache = []
    for i, (p, layer_cache) in enumerate(zip(params["layers"], cache, strict=True)):
        window = WINDOW if i % 2 == 0 else 0
        x, layer_cache = attention(p["attention"], x, layer_cache, position, window)
        new_cache.append(layer_cache)
        x = experts(p["experts"], x)
    logits = rms_norm(x, params["norm"]) @ params["head"]
    return jnp.argmax(logits, axis=-1), logits, new_cache


def model(dtype, batch):
    w = Weights(dtype, SEED)
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM

    def layer():
        return {
            "attention": {
                "norm": w.vector(WIDTH, around=1.0),
                "qkv": w.matrix(WIDTH, qkv),
                "qkv_bias": w.vector(qkv),
                "sinks": w.vector(HEADS, around=1.0) * 2,
                "out": w.matrix(HEADS * HEAD_DIM, WIDTH),
                "out_bias": w.vector(WIDTH),
            },
            "experts": {
                "norm": w.vector(WIDTH, around=1.0),
                "router": w.matrix(WIDTH, EXPERTS) * 4,
                "router_bias": w.vector(EXPERTS),
                "up": w.matrix(EXPERTS, 2 * FFN, WIDTH, fan_in=WIDTH),
                "up_bias": w.vector(EXPERTS, 2 * FFN),
                "down": w.matrix(EXPERTS, WIDTH, FFN, fan_in=FFN),
                "down_bias": w.vector(EXPERTS, WIDTH),
            },
        }

    params = {
        "embedding": w.matrix(VOCAB, WIDTH, fan_in=1),
        "layers": [layer() for _ in range(LAYERS)],
        "norm": w.vector(WIDTH, around=1.0),
        "head": w.matrix(WIDTH, VOCAB),
    }
    empty = jnp.zeros((batch, CONTEXT, KV_HEADS, HEAD_DIM), dtype)
    return params, [{"k": empty, "v": empty} for _ in range(LAYERS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_gpt_oss_is_one_split(dtype, batch):
    check_decoding(decode_step, *model(dtype, batch), batch=batch)


def test_sinks_and_experts_are_read_where_they_lie():
    """Of a layer: query, key and value at once, output, router, and three products of experts."""
    params, cache = model(jnp.bfloat16, 2)
    args = (params, cache, jnp.zeros(2, jnp.int32), jnp.int32(0))
    (split,) = jaxgraph.explain(decode_step, *args).splits
    assert split.ops["ATTENTION"] == LAYERS
    assert split.ops["MATMUL"] == 6 * LAYERS + 1
    assert split.ops["GATHER"] == 1 + 2 * LAYERS  # of the embedding, and of two biases
    assert "COPY" not in split.ops
