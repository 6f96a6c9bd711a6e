"""A small decode step, jitted and wrapped, timed side by side."""

import time

import jax
import jax.numpy as jnp

import jaxgraph

LAYERS, WIDTH, HEADS, HEAD_DIM, CONTEXT, VOCAB = 12, 512, 8, 64, 256, 8192
STEPS = 100


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def decode_step(params, cache, token, position):
    """One token in, the next one out: plain JAX, nothing of jaxgraph."""
    x = params["embed"][token]
    new_cache = []
    for w, (keys, values) in zip(params["layers"], cache, strict=True):
        q, k, v = jnp.split(rms_norm(x) @ w["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(HEADS, 1, HEAD_DIM) for a in (q, k, v))
        keys = jax.lax.dynamic_update_slice(keys, k, (0, position, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, position, 0))
        scores = jnp.einsum("hqd,hsd->hqs", q, keys) * HEAD_DIM**-0.5
        scores = jnp.where(jnp.arange(CONTEXT) <= position, scores, -jnp.inf)
        attended = jnp.einsum("hqs,hsd->hqd", jax.nn.softmax(scores, axis=-1), values)
        x = x + attended.reshape(WIDTH) @ w["out"]
        x = x + jax.nn.silu(rms_norm(x) @ w["up"]) @ w["down"]
        new_cache.append((keys, values))
    return jnp.argmax(rms_norm(x) @ params["embed"].T), position + 1, new_cache


def random_params(key):
    keys = iter(jax.random.split(key, 4 * LAYERS + 1))

    def random(*shape):
        return jax.random.normal(next(keys), shape) * WIDTH**-0.5

    def layer():
        return {
            "qkv": random(WIDTH, 3 * WIDTH),
            "out": random(WIDTH, WIDTH),
            "up": random(WIDTH, 4 * WIDTH),
            "down": random(4 * WIDTH, WIDTH),
        }

    return {"embed": random(VOCAB, WIDTH), "layers": [layer() for _ in range(LAYERS)]}


def run(step, params):
    """The tokens that a step generates, and the seconds that each one takes at the median."""
    empty = jnp.zeros((HEADS, CONTEXT, HEAD_DIM))
    cache = [(empty.copy(), empty.copy()) for _ in range(LAYERS)]
    token, position = jnp.int32(1), jnp.int32(0)
    tokens, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        token, position, cache = step(params, cache, token, position)
        tokens.append(int(token))
        seconds.append(time.perf_counter() - start)
    return tokens, sorted(seconds)[STEPS // 2]


def main():
    params = random_params(jax.random.key(0))
    jitted = jax.jit(decode_step, donate_argnums=(1,))
    wrapped = jaxgraph.wrap(decode_step, donate_argnums=(1,))

    print(f"{LAYERS} layers of width {WIDTH} on {jax.devices()[0].device_kind}, {STEPS} steps")
    results = {"plain XLA": run(jitted, params), "jaxgraph": run(wrapped, params)}
    for name, (_, seconds) in results.items():
        print(f"{name:10} {seconds * 1e6:8.0f} µs a step")
    print("same tokens:", results["plain XLA"][0] == results["jaxgraph"][0])
    print(wrapped.stats())


if __name__ == "__main__":
    main()
