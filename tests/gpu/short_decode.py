"""A short decode that touches every path: eager, capture, replay, patches, a moved cache, growth.

Run by scripts/compute_sanitizer.sh and scripts/random_delays.sh. Prints the counters and a digest
of every bit that came out, and fails if a path was not taken. `--small`: the first model alone.
"""

import functools
import hashlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxgraph

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from llama import Config, decode_step, empty_cache, random_params  # noqa: E402

CONFIGS = (
    Config(2, 64, 4, 2, 16, 160, 512),
    Config(2, 576, 9, 3, 64, 1536, 4096),  # two layers of 135m: several blocks in every kernel
)


def main() -> int:
    digest = hashlib.sha256()
    for config in CONFIGS[: 1 if "--small" in sys.argv else None]:
        step = jaxgraph.wrap(functools.partial(decode_step, config=config), donate_argnums=(1,))
        for dtype in (jnp.float32, jnp.bfloat16):
            params = random_params(config, dtype, jax.random.key(0))
            for batch in (1, 3):
                decode(step, params, empty_cache(config, batch, 128, dtype), batch, digest)
            cache = empty_cache(config, 1, 128, dtype)
            example = params, cache, jnp.ones(1, jnp.int32), jnp.int32(0)
            packed = step.pack(params, example_args=example)
            decode(step, packed, step.pack(cache, argnum=1), 1, digest)
        stats = step.stats()
        print(stats)
        assert stats.eager and stats.captures and stats.replays and stats.patches
        assert stats.failures == 0
    print("digest", digest.hexdigest())
    return 0


def decode(step, params, cache, batch, digest) -> None:
    token, position = jnp.ones(batch, jnp.int32), jnp.int32(0)
    for i in range(6):
        if i == 4:
            cache = jax.tree.map(jnp.copy, cache)  # to other addresses
        token, position, cache = step(params, cache, token, position)
        digest.update(np.asarray(token).tobytes())
    for leaf in jax.tree.leaves(cache):
        digest.update(np.asarray(leaf).tobytes())


if __name__ == "__main__":
    sys.exit(main())
