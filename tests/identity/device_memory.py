"""Reads and writes device memory by address, on any platform, with the core's own copy kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from axpy_programs import encode, testing

from jaxgraph import Options

U8, COPY = 5, 6


def platform():
    """The default device's platform in the native module's words."""
    return "CUDA" if jax.default_backend() == "gpu" else "cpu"


def read(address, nbytes):
    """The bytes that lie there; whatever JAX still computes is not waited for."""
    to = jax.block_until_ready(jnp.zeros(nbytes, jnp.uint8))
    _copy(address, to.unsafe_buffer_pointer(), nbytes)
    return np.array(to)


def write(address, data):
    """Puts an array of bytes there."""
    source = jax.block_until_ready(jnp.asarray(data, jnp.uint8))
    _copy(source.unsafe_buffer_pointer(), address, data.size)


def _copy(source, destination, nbytes):
    base = dict(index=0, hint=0, written=False, alias=-1)
    out, src = ((U8, b, 0, (nbytes,), (1,)) for b in (2, 1))
    program = encode(
        {
            "function": "device_memory",
            "function_id": 1,
            "split": 0,
            "key": bytes(16),
            "arena_bytes": 0,
            "options": Options().exec_options() | {"disabled": True},
            "bases": [
                base | dict(kind=0, nbytes=0, label="arena", written=True),
                base | dict(kind=1, nbytes=nbytes, label="source"),
                base | dict(kind=2, nbytes=nbytes, label="destination", written=True),
            ],
            "nodes": [(COPY, 0, 0, 0, b"", [out], [src], "copy")],
        }
    )
    machine = testing.Machine(platform())
    machine.execute(testing.load(program), [source], [destination])
    del machine  # waits for its stream
