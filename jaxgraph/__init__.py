"""jaxgraph: jitted JAX decode steps replayed as chunked CUDA graphs, and never a stale one.

step = jaxgraph.wrap(decode_step, donate_argnums=(1,))
params, cache = step.pack(params), step.pack(cache, argnum=1)  # optional: two arguments
token, position, cache = step(params, cache, token, position)
print(step.stats()); print(step.explain())
"""

from jaxgraph.explain import BaseInfo, ChunkInfo, Explanation, SplitInfo, VariantInfo
from jaxgraph.observe import (
    Event,
    Execution,
    NodeChange,
    Stats,
    dump,
    events,
    report,
    reset_stats,
    stats,
    trace,
)
from jaxgraph.observe.events import log_events
from jaxgraph.options import Options, env_bool
from jaxgraph.pack import Packed
from jaxgraph.runtime.native import build_info
from jaxgraph.runtime.tracebacks import leave_our_frames_out
from jaxgraph.wrap import GraphedFunction, explain, wrap

__version__ = build_info()["version"]

leave_our_frames_out()

__all__ = [
    "BaseInfo",
    "ChunkInfo",
    "Event",
    "Execution",
    "Explanation",
    "GraphedFunction",
    "NodeChange",
    "Options",
    "Packed",
    "SplitInfo",
    "Stats",
    "VariantInfo",
    "build_info",
    "dump",
    "events",
    "explain",
    "log_events",
    "report",
    "reset_stats",
    "stats",
    "trace",
    "wrap",
]

if env_bool("JAXGRAPH_DEBUG", default=False):
    log_events()
