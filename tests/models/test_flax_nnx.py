"""A Flax NNX module whose attention layers keep their caches themselves."""

import jax.numpy as jnp
import pytest
from decoding import check_decoding

nnx = pytest.importorskip("flax.nnx")

LAYERS, WIDTH, HEADS, VOCAB, CONTEXT = 2, 40, 4, 97, 36


class Block(nnx.Module):
    def __init__(self, dtype, rngs):
        kind = {"param_dtype": dtype, "dtype": dtype, "rngs": rngs}
        self.norm1 = nnx.RMSNorm(WIDTH, **kind)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=True, **kind)
        self.norm2 = nnx.LayerNorm(WIDTH, **kind)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, **kind)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, **kind)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Decoder(nnx.Module):
    def __init__(self, dtype, rngs):
        kind = {"param_dtype": dtype, "dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(VOCAB, WIDTH, **kind)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, **kind)

    def __call__(self, token):
        x = self.embed(token[:, None])
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))[:, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_module_with_its_own_cache_is_one_split(dtype):
    batch = 2
    model = Decoder(dtype, nnx.Rngs(0))
    for block in model.blocks:
        block.attention.init_cache((batch, CONTEXT, WIDTH), dtype=dtype)
    definition, params, cache = nnx.split(model, nnx.Param, ...)

    def decode_step(params, cache, token, position):
        model = nnx.merge(definition, params, cache)
        logits = model(token)
        _, _, cache = nnx.split(model, nnx.Param, ...)
        return jnp.argmax(logits, axis=-1), logits, cache

    check_decoding(decode_step, params, cache, batch=batch)
