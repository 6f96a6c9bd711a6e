"""Fork-join regions: independent branches of a split that may run at once.

A decode step is one long chain with short parallel stretches: the experts of a mixture, parallel
blocks, several heads of a product. A stretch lies between two units that everything else comes
before or after; what lies between them and hangs together is a component, and components know
nothing of each other.

Running them at once pays only for kernels that are too small to fill the device. Neighbours that
one kernel covers anyway (`fusion_runs`) are therefore one unit here, and `pays` weighs the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxgraph.plan import units as un
from jaxgraph.plan.schedule import fusion_runs
from jaxgraph.plan.units import Unit

# The executor has a stream of its own for so many branches (ffi/core/branches.cpp); components
# beyond that share them.
MAX_BRANCHES = 8

# A region is never cut into chunks; longer stretches are left in one chain.
MAX_REGION_UNITS = 256

# What `pays` reckons with, microseconds on an H200 (docs/performance.md): a short kernel from its
# predecessor's end to its own in one chain of dependent launches, the same behind a full edge, a
# fork and join, a branch of it, and a byte at 4.3 TB/s.
CHAINED_US = 1.6
LAUNCHED_US = 2.3
FORK_JOIN_US = 2.0
BRANCH_US = 0.4
US_PER_BYTE = 1 / 4.3e6
LEAST_GAIN = 0.97  # less is not worth the streams


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a unit stands: region from 1 on, branch from 0 on."""

    region: int
    branch: int


@dataclasses.dataclass(eq=False)
class _Step:
    """A run of neighbouring units that one kernel may cover."""

    units: list[Unit]
    sources: set[int] = dataclasses.field(default_factory=set)  # steps that it waits for itself
    before: int = 0  # bit sets over steps: all that must come before, all that must come after
    after: int = 0

    @property
    def nbytes(self) -> int:
        refs = {(r.tensor, r.layout): r for u in self.units for r in (*u.srcs, *u.outs)}
        return sum(r.layout.size * r.dtype.itemsize for r in refs.values())


def mark_regions(
    order: Sequence[Unit], before: Mapping[Unit, set[Unit]]
) -> tuple[list[Unit], dict[Unit, Mark]]:
    """Finds the regions that pay.

    Args:
      order: all units, in a legal order.
      before: for each unit those that must run before it.

    Returns:
      A legal order in which every region is one run, branch after branch, and the marks of the
      units that stand in regions.
    """
    steps = _steps(order, before)
    marks: dict[Unit, Mark] = {}
    ordered: list[Unit] = []
    region = 0
    for stretch in _stretches(steps):
        branches = _branches(steps, stretch)
        if branches is not None:
            region += 1
            for number, branch in enumerate(branches):
                for unit in branch:
                    marks[unit] = Mark(region, number)
                ordered += branch
        else:
            ordered += [u for i in stretch for u in steps[i].units]
    return ordered, marks


def pays(branches: Sequence[tuple[int, int]]) -> bool:
    """Is it worth while to run branches of (launches, bytes) at once?

    Reading is bound by the device's bandwidth whoever reads, so only what a launch costs beyond its
    bytes can be saved, and a fork costs something, too.
    """
    chained = sum(n * CHAINED_US + nbytes * US_PER_BYTE for n, nbytes in branches)
    longest = max(n * LAUNCHED_US + nbytes * US_PER_BYTE for n, nbytes in branches)
    reading = LAUNCHED_US + sum(nbytes for _, nbytes in branches) * US_PER_BYTE
    at_once = max(longest, reading) + FORK_JOIN_US + BRANCH_US * len(branches)
    return at_once < LEAST_GAIN * chained


def _steps(order: Sequence[Unit], before: Mapping[Unit, set[Unit]]) -> list[_Step]:
    steps: list[_Step] = []
    number: dict[Unit, int] = {}
    runs = fusion_runs(order)
    for i, unit in enumerate(order):
        waits = 0
        sources = {number[source] for source in before[unit]}
        for source in sources:
            waits |= 1 << source | steps[source].before
        known = 1 << len(steps) - 1 | steps[-1].before if steps else 0
        # The sum of all branches may stand behind the last branch's product, but is no part of it.
        late = unit.op == un.EXPR and waits & ~known
        if i == 0 or runs[i] != runs[i - 1] or late:
            steps.append(_Step([]))
        here = len(steps) - 1
        steps[here].units.append(unit)
        steps[here].sources |= sources - {here}
        steps[here].before |= waits & ~(1 << here)
        number[unit] = here
    for i in reversed(range(len(steps))):
        for j in steps[i].sources:
            steps[j].after |= 1 << i | steps[i].after
    return steps


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def _stretches(steps: Sequence[_Step]) -> list[list[int]]:
    """The steps in order, cut in front of and behind every one that the others wait for.

    Those that nothing waits for (an update of a cache that only the caller reads) do not count:
    else there would be no such step after the first of them.
    """
    counted = sum(1 << i for i, s in enumerate(steps) if s.after)
    stretches: list[list[int]] = [[]]
    for i, step in enumerate(steps):
        if counted & ~(step.before | step.after | 1 << i) == 0:
            stretches += [[i], []]
        else:
            stretches[-1].append(i)
    return [s for s in stretches if s]


def _branches(steps: Sequence[_Step], stretch: Sequence[int]) -> list[list[Unit]] | None:
    """The stretch's components as branches; None: it stays one chain."""
    components = _components(steps, stretch)
    units = [[u for i in c for u in steps[i].units] for c in components]
    if len(components) < 2 or sum(map(len, units)) > MAX_REGION_UNITS:
        return None
    weights = [
        (sum(any(u.op != un.VIEW for u in steps[i].units) for i in c),
         sum(steps[i].nbytes for i in c))
        for c in components
    ]  # fmt: skip
    # The heaviest first, each to the branch with the least to do.
    branches = [[0, 0, []] for _ in range(min(MAX_BRANCHES, len(components)))]
    by_weight = sorted(range(len(components)), key=lambda c: (-weights[c][1], -weights[c][0], c))
    for c in by_weight:
        least = min(branches, key=lambda b: b[0] * LAUNCHED_US + b[1] * US_PER_BYTE)
        least[0] += weights[c][0]
        least[1] += weights[c][1]
        least[2].append(c)
    if not pays([(n, nbytes) for n, nbytes, _ in branches]):
        return None
    return [[u for c in sorted(cs) for u in units[c]] for _, _, cs in branches]


def _components(steps: Sequence[_Step], stretch: Sequence[int]) -> list[list[int]]:
    mask = sum(1 << i for i in stretch)
    components: list[list[int]] = []
    seen = 0
    for i in stretch:
        if seen >> i & 1:
            continue
        found, todo = 0, 1 << i
        while todo:
            j = _bits(todo & -todo)[0]
            found |= 1 << j
            todo = (todo | (steps[j].before | steps[j].after) & mask) & ~found
        seen |= found
        components.append(_bits(found))
    return components
