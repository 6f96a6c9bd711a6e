"""Builds a kernel once for all layers that are alike.

The layers of a model repeat the same kernels over other tensors. Before one is built, its sinks and
all that is computed on the way to them are written down without naming a tensor. Where that was
seen before, the kernel is the same, but for the tensors and where in them it begins to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgraph.graph.ir import Tensor
from jaxgraph.graph.layout import Layout
from jaxgraph.passes.cluster import Cluster, Fit, Misfit, Sink, Storages


@dataclasses.dataclass(eq=False)
class _Reads:
    """What a kernel may read from memory.

    Attributes:
      numbers: the stored tensors, in the order in which the walk meets them, and their numbers.
      starts: by number and type of a read: the offset from which others of the kind are counted.
    """

    numbers: dict[Tensor, int] = dataclasses.field(default_factory=dict)
    starts: dict[tuple[int, np.dtype], int] = dataclasses.field(default_factory=dict)


class Kernels:
    """Builds the kernels of one graph."""

    def __init__(self) -> None:
        self._built: dict[tuple, tuple[Fit, _Reads]] = {}

    def build(self, storages: Storages, sinks: Sequence[Sink], inner: bool = False) -> Fit:
        """What ``Cluster(storages, sinks, inner).build()`` gives, or raises."""
        reads = _Reads()
        pattern = _pattern(storages, sinks, inner, reads)
        if pattern is None:
            return Cluster(storages, sinks, inner).build()
        if pattern in self._built:
            return _of_other_tensors(*self._built[pattern], tuple(sinks), reads)
        fit = Cluster(storages, sinks, inner).build()
        self._built[pattern] = fit, reads
        return fit


def _pattern(
    storages: Storages, sinks: Sequence[Sink], inner: bool, reads: _Reads
) -> tuple[Any, ...] | None:
    """All that a kernel depends on, but for what ``reads`` takes down.

    None: it may depend on more, so that the kernel is alike to none.
    """
    stored = storages.stored
    own = {s.value.id for s in sinks if s.value is s.storage}
    pieced = {s.storage.id for s in sinks} - own
    met = list(dict.fromkeys(s.value for s in sinks))  # grows while it is walked through
    if any(t.id in stored and t.id not in own and (t.is_virtual or t.is_view) for t in met):
        return None  # it is loaded, but whether it is made of reductions counts, too
    number = {t.id: i for i, t in enumerate(met)}
    said: list[Any] = [inner]
    for sink in sinks:
        is_own = sink.value.id in own
        said.append((number[sink.value.id], is_own, sink.place.strides, sink.place.offset))
    for tensor in met:
        if tensor.id not in own:
            base = tensor
            while base.is_view and base.id not in stored:
                base = base.node.inputs[0]
            if base.id in stored and base.id not in own:
                load = _load(storages, tensor, reads)
                if load is None:
                    return None
                said.append((*load, base.id in pieced))
                continue
        if tensor.node.kind == "bitcast":  # an offset that is divided moves by less than it did
            return None
        said.append(tensor.node.form)
        for operand in tensor.node.inputs:
            if operand.id not in number:
                number[operand.id] = len(met)
                met.append(operand)
            said.append(number[operand.id])
    return tuple(said)


def _load(storages: Storages, tensor: Tensor, reads: _Reads) -> tuple[Any, ...] | None:
    """How a tensor lies in what it is a view of; None: no strides say it."""
    try:
        base, layout = storages.layout(tensor)
    except Misfit:
        return None
    at = (reads.numbers.setdefault(base, len(reads.numbers)), tensor.dtype)
    offset = layout.offset - reads.starts.setdefault(at, layout.offset)
    return (*at, layout.shape, layout.strides, offset)


def _of_other_tensors(fit: Fit, old: _Reads, sinks: tuple[Sink, ...], new: _Reads) -> Fit:
    """The kernel of these sinks, given one of the same pattern."""
    tensors, sources = list(new.numbers), []
    for tensor, dtype, layout in fit.sources:
        at = (old.numbers[tensor], dtype)
        offset = layout.offset + new.starts[at] - old.starts[at]
        sources.append((tensors[at[0]], dtype, Layout(layout.shape, layout.strides, offset)))
    return dataclasses.replace(fit, sinks=sinks, sources=sources)
