"""jaxgraph: jitted JAX decode steps replayed as chunked CUDA graphs, and never a stale one.

step = jaxgraph.wrap(decode_step, donate_argnums=(1,))
params = step.pack(params)
token, position, cache = step(params, cache, token, position)
print(step.stats()); print(step.explain())
"""

from jaxgraph.explain import Explanation
from jaxgraph.options import Options
from jaxgraph.pack import Packed
from jaxgraph.runtime.native import build_info
from jaxgraph.stats import Event, Stats
from jaxgraph.wrap import GraphedFunction, wrap

__version__ = build_info()["version"]

__all__ = [
    "Event",
    "Explanation",
    "GraphedFunction",
    "Options",
    "Packed",
    "Stats",
    "build_info",
    "wrap",
]
