"""Tracebacks and source lines: JAX leaves our frames out, as its own, and names the user's.

`JAX_TRACEBACK_FILTERING=off` shows all frames.
"""

import os

from jax.extend import source_info_util

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def leave_our_frames_out() -> None:
    """To be called once, before anything is traced."""
    source_info_util.register_exclusion(_HERE)
    try:
        from jax._src import traceback_util

        traceback_util.register_exclusion(_HERE)
    except (ImportError, AttributeError):  # no public name for it; without it tracebacks are longer
        pass
