"""An Equinox module for one sequence, mapped over the batch, each row at a position of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import check_decoding

eqx = pytest.importorskip("equinox")

LAYERS, WIDTH, HEADS, VOCAB, CONTEXT = 2, 40, 4, 97, 48


class Attention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    o: eqx.nn.Linear
    rope: eqx.nn.RotaryPositionalEmbedding

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.q, self.k, self.v, self.o = (
            eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=k) for k in keys
        )
        self.rope = eqx.nn.RotaryPositionalEmbedding(WIDTH // HEADS)

    def __call__(self, x, cache, position):
        q, k, v = (f(x).reshape(HEADS, -1) for f in (self.q, self.k, self.v))
        cos, sin = self.angles(position, x.dtype)
        q, k = q * cos + self.half_turn(q) * sin, k * cos + self.half_turn(k) * sin
        keys = cache["k"].at[position].set(k)
        values = cache["v"].at[position].set(v)
        scores = jnp.einsum("hd,shd->hs", q, keys) / jnp.sqrt(k.shape[-1]).astype(x.dtype)
        scores = jnp.where(jnp.arange(CONTEXT) <= position, scores, -jnp.inf)
        mixed = jnp.einsum("hs,shd->hd", jax.nn.softmax(scores), values)
        return self.o(mixed.reshape(-1)), {"k": keys, "v": values}

    def angles(self, position, dtype):
        half = WIDTH // HEADS // 2
        angle = position * self.rope.theta ** (-jnp.arange(half) / half)
        return tuple(jnp.tile(f(angle), 2).astype(dtype) for f in (jnp.cos, jnp.sin))

    @staticmethod
    def half_turn(x):
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-b, a], axis=-1)


class Block(eqx.Module):
    norm1: eqx.nn.RMSNorm
    attention: Attention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm1 = eqx.nn.RMSNorm(WIDTH)
        self.attention = Attention(first)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 3 * WIDTH, 1, activation=jax.nn.silu, key=second)

    def __call__(self, x, cache, position):
        h, cache = self.attention(self.norm1(x), cache, position)
        x = x + h
        return x + self.mlp(self.norm2(x)), cache


class Decoder(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second, *keys = jax.random.split(key, LAYERS + 2)
        self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=first)
        self.blocks = [Block(k) for k in keys]
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCAB, key=second)

    def __call__(self, cache, token, position):
        x = self.embed(token)
        new = []
        for block, layer_cache in zip(self.blocks, cache, strict=True):
            x, layer_cache = block(x, layer_cache, position)
            new.append(layer_cache)
        return self.head(self.norm(x)), new


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_mapped_module_is_one_split(dtype):
    batch = 3
    model = Decoder(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    params = jax.tree.map(lambda x: x.astype(dtype), params)

    def decode_step(params, cache, token, position):
        model = eqx.combine(params, static)
        logits, cache = jax.vmap(model)(cache, token, position)
        return jnp.argmax(logits, axis=-1), logits, cache

    empty = jnp.zeros((batch, CONTEXT, HEADS, WIDTH // HEADS), dtype)
    cache = [{"k": empty, "v": empty} for _ in range(LAYERS)]
    check_decoding(decode_step, params, cache, batch=batch, position=np.array([0, 5, 16]))
