"""jaxgraph's kernels as ordinary JAX functions, for any jitted function, without `wrap`.

On CUDA and on CPUs each is one call of the kernel that a wrapped function would launch; elsewhere,
and under `grad` and `vmap`, it is its plain definition. Inside a wrapped function it is nodes like
any other. On CUDA, XLA may capture the calls in its own command buffers.
"""

from jaxgraph.ops.attention import attention_decode, rope, update_cache
from jaxgraph.ops.products import embedding, glu, linear
from jaxgraph.ops.rows import argmax, layer_norm, rms_norm, softmax

__all__ = [
    "argmax",
    "attention_decode",
    "embedding",
    "glu",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "softmax",
    "update_cache",
]
