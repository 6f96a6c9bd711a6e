// Counters: what is counted of one wrapped function, under one name in the core, in the bindings
// and in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxgraph {

// X(enumerator, name). Monotone until they are reset. Times are nanoseconds of the host.
#define JAXGRAPH_COUNTERS(X)                                                                     \
  X(kEagerWarmup, eager_warmup) /* executions eager since the variant is not warm */             \
  X(kEagerNotCapturable, eager_not_capturable) /* a node forbids the capture */                  \
  X(kEagerFailures, eager_failures)            /* it has failed too often */                     \
  X(kEagerMemory, eager_memory)                /* its executables alone exceed the budget */     \
  X(kEagerCrowded, eager_crowded)              /* there is no room for its executables */        \
  X(kEagerOutside, eager_outside)              /* switched off, or within a foreign capture */   \
  X(kEagerRecovered, eager_recovered)          /* from the chunk on that failed in this call */  \
  X(kCaptures, captures)                       /* executions that captured, and ran it */        \
  X(kReplays, replays)                         /* executions of existing executables */          \
  X(kPatches, patches)                         /* nodes set in an executable */                  \
  X(kExecUpdates, exec_updates)                /* chunks updated in place */                     \
  X(kUpdatesRefused, updates_refused)          /* chunks whose topology was another one */       \
  X(kInstantiations, instantiations)           /* chunks instantiated */                         \
  X(kUidHits, uid_hits)                        /* executions in which no node was looked at */   \
  X(kPropertyCompares, property_compares)      /* executions in which nodes were compared */     \
  X(kNodesCompared, nodes_compared)                                                              \
  X(kWarmupsFirst, warmups_first)           /* variants begun: nothing was under the key */      \
  X(kWarmupsVariant, warmups_variant)       /* ... beside others under the key */                \
  X(kResetsAddress, resets_address)         /* variants sent back to warmup: an address moved */ \
  X(kResetsArena, resets_arena)             /* ... the arena moved */                            \
  X(kResetsFailure, resets_failure)         /* ... a chunk failed */                             \
  X(kEvictionsVariants, evictions_variants) /* variants dropped: too many under one key */       \
  X(kEvictionsIdle, evictions_idle)         /* ... nobody called them */                         \
  X(kEvictionsCount, evictions_count)       /* ... too many executables on the device */         \
  X(kEvictionsMemory, evictions_memory)     /* ... the memory budget */                          \
  X(kFailuresQuery, failures_query)         /* device calls that failed and were survived */     \
  X(kFailuresFork, failures_fork)                                                                \
  X(kFailuresCapture, failures_capture)                                                          \
  X(kFailuresInstantiate, failures_instantiate)                                                  \
  X(kFailuresUpdate, failures_update)                                                            \
  X(kFailuresPatch, failures_patch)                                                              \
  X(kFailuresLaunch, failures_launch)                                                            \
  X(kChunkLaunches, chunk_launches)             /* executables launched */                       \
  X(kArenaMovesSameSize, arena_moves_same_size) /* the suspicious kind */                        \
  X(kArenaMovesResized, arena_moves_resized)                                                     \
  X(kArenaGrowths, arena_growths) /* it grew where it was */                                     \
  X(kDecideNs, decide_ns)         /* until it was known what may run, uid hits not counted */    \
  X(kEagerNs, eager_ns)           /* the rest of eager executions */                             \
  X(kRecordNs, record_ns)         /* ... of those that captured, or were updated */              \
  X(kReplayNs, replay_ns)         /* ... of replays, patches included */                         \
  X(kPlanNs, plan_ns)             /* emission of launches; part of eager, record */              \
  X(kCaptureNs, capture_ns)       /* part of record_ns, as the next two */                       \
  X(kInstantiateNs, instantiate_ns)                                                              \
  X(kUpdateNs, update_ns)

enum class Counter : uint8_t {
#define JAXGRAPH_ENUMERATOR(enumerator, name) enumerator,
  JAXGRAPH_COUNTERS(JAXGRAPH_ENUMERATOR)
#undef JAXGRAPH_ENUMERATOR
      kNumCounters,
};
const char* NameOf(Counter counter);     // "capture_ns"
std::string PhaseName(Counter counter);  // "capture" for kCaptureNs
constexpr size_t kNumCounters = static_cast<size_t>(Counter::kNumCounters);

// The values of one moment, over all devices.
struct Counters {
#define JAXGRAPH_FIELD(enumerator, name) uint64_t name = 0;
  JAXGRAPH_COUNTERS(JAXGRAPH_FIELD)
#undef JAXGRAPH_FIELD

  // Sums of the above.
  uint64_t executions = 0;  // of native splits: eager + captures + replays
  uint64_t eager = 0;       // executions that launched kernels one by one
  uint64_t warmups = 0;
  uint64_t resets = 0;
  uint64_t evictions = 0;
  uint64_t failures = 0;

  // Gauges, which no reset touches.
  uint64_t live_execs = 0;
  uint64_t live_exec_nodes = 0;  // launches in them
  uint64_t exec_bytes = 0;       // what they take of the device's memory, by estimate
  uint64_t arena_bytes = 0;      // largest arena that ran this function

  // Calls fn(name, value) for every counter; the sums and gauges included.
  template <typename F>
  void ForEach(F fn) const {
    fn("executions", executions);
    fn("eager", eager);
    fn("warmups", warmups);
    fn("resets", resets);
    fn("evictions", evictions);
    fn("failures", failures);
#define JAXGRAPH_VISIT(enumerator, name) fn(#name, name);
    JAXGRAPH_COUNTERS(JAXGRAPH_VISIT)
#undef JAXGRAPH_VISIT
    fn("live_execs", live_execs);
    fn("live_exec_nodes", live_exec_nodes);
    fn("exec_bytes", exec_bytes);
    fn("arena_bytes", arena_bytes);
  }

  void Add(const Counters& other);  // gauges of a maximum take the larger one
};

}  // namespace jaxgraph
