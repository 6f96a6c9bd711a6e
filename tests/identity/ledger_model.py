"""The state machine of one graph key, as plainly as it can be written.

It knows nothing of nodes, chunks or devices: only which program is called with which addresses.
The bases are those of `axpy_programs.BASES`, in a program whose nodes touch each of them at most
twice, so that none is ever worth a slot.
"""

import dataclasses

SET = ("large", "cache")  # bases that make up an address set
COUNTERS = ("executions", "eager", "captures", "replays", "uid_hits", "property_compares", "resets",
            "evictions", "failures")  # fmt: skip


@dataclasses.dataclass
class Variant:
    program: int
    addresses: dict
    follows_weight: bool = False  # its address moved once: it is no part of the uid any more
    stage: str = "cold"
    calls: int = 0
    last_used: float = 0

    def same_set(self, addresses):
        return all(self.addresses[name] == addresses[name] for name in SET)

    def hits_uid(self, program, addresses):
        same_weight = self.follows_weight or self.addresses["weight"] == addresses["weight"]
        return self.program == program and self.same_set(addresses) and same_weight


@dataclasses.dataclass
class Model:
    warmup_calls: int
    max_variants: int
    max_failures: int
    rewarm: bool
    idle: float
    sweep: float
    now: float = 1000
    next_sweep: float = 0

    def __post_init__(self):
        self.clear()

    def clear(self):
        self.variants = []  # most recently used first
        self.history = []  # address sets, newest first
        self.failed = {}  # program: how often
        self.count = dict.fromkeys(COUNTERS, 0)

    def call(self, program, addresses, fault):
        """`fault`: the first launch of an executable in this call fails."""
        variant, changed = self.identify(program, addresses)
        self.variants.remove(variant)
        self.variants.insert(0, variant)
        self.count["executions"] += 1
        self.count[self.run(variant, changed, fault)] += 1
        variant.last_used = self.now
        self.sweep_idle()

    def identify(self, program, addresses):
        for variant in self.variants:
            if variant.hits_uid(program, addresses):
                self.count["uid_hits"] += 1
                variant.addresses = addresses
                return variant, False
        variant = self.variant_to_update(program, addresses)
        if variant is None:
            return self.add(program, addresses), False
        self.count["property_compares"] += 1
        variant.follows_weight |= variant.addresses["weight"] != addresses["weight"]
        variant.addresses = addresses
        return variant, True

    def variant_to_update(self, program, addresses):
        of_program = [v for v in self.variants if v.program == program]
        for variant in of_program:
            if variant.same_set(addresses):
                return variant
        here = (program, *(addresses[name] for name in SET))
        seen = here in self.history
        self.history = [here, *(h for h in self.history if h != here)][: self.max_variants]
        if not of_program or not seen:
            return of_program[0] if of_program else None
        full = len(self.variants) >= self.max_variants
        return self.variants[-1] if full and self.variants[-1].program == program else None

    def add(self, program, addresses):
        self.count["property_compares"] += bool(self.variants)
        variant = Variant(program, addresses)
        for other in self.variants:
            if other.program == program:
                variant.follows_weight = other.follows_weight
                break
        while len(self.variants) >= self.max_variants:
            self.variants.pop()
            self.count["evictions"] += 1
        self.variants.insert(0, variant)
        return variant

    def run(self, variant, changed, fault):
        failed = self.failed.get(variant.program, 0)
        if failed > 0 and failed >= self.max_failures:
            return "eager"
        if changed and self.rewarm and variant.stage != "cold":
            variant.stage, variant.calls = "cold", 0
            self.count["resets"] += 1
        if variant.stage != "captured":
            variant.stage = "warming"
            variant.calls += 1
            if variant.calls < self.warmup_calls:
                return "eager"
        if fault:
            self.failed[variant.program] = failed + 1
            self.count["failures"] += 1
            self.count["resets"] += 1
            variant.stage = "warming"
            return "eager"
        first, variant.stage = variant.stage != "captured", "captured"
        return "captures" if first else "replays"

    def sweep_idle(self):
        if self.now < self.next_sweep:
            return
        self.next_sweep = self.now + self.sweep
        busy = [v for v in self.variants if self.now - v.last_used < self.idle]
        self.count["evictions"] += len(self.variants) - len(busy)
        self.variants = busy
