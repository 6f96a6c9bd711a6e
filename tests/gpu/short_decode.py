"""A short decode that touches every path: eager, capture, replay, patches, a moved cache, growth.

Run by scripts/compute_sanitizer.sh; prints the counters and fails if a path was not taken.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import jaxgraph

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama import Config, decode_step, empty_cache, random_params  # noqa: E402

CONFIG = Config(2, 64, 4, 2, 16, 160, 512)


def main() -> int:
    step = jaxgraph.wrap(functools.partial(decode_step, config=CONFIG), donate_argnums=(1,))
    for dtype in (jnp.float32, jnp.bfloat16):
        params = random_params(CONFIG, dtype, jax.random.key(0))
        for batch in (1, 3):
            cache = empty_cache(CONFIG, batch, 32, dtype)
            token, position = jnp.ones(batch, jnp.int32), jnp.int32(0)
            for i in range(6):
                if i == 4:
                    cache = jax.tree.map(jnp.copy, cache)
                token, position, cache = step(params, cache, token, position)
            jax.block_until_ready(token)
    stats = step.stats()
    print(stats)
    assert stats.eager and stats.captures and stats.replays and stats.patches
    assert stats.failures == 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
