// Crowding: what became of recordings that were pushed out for want of room. Programs that have no
// room beside each other would push each other out, and capture anew, for ever; one to which this
// happens again and again before its recordings have paid for themselves waits, and runs eagerly.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "ffi/core/program.h"

namespace jaxgraph {

// What a recording takes of the device's room.
struct Room {
  uint64_t executables = 0;
  uint64_t nodes = 0;  // in them
};

// Of one device. Written and read by any thread.
class Crowding {
 public:
  // After so many replays a recording has paid for its capture and instantiation (measured: 4 us a
  // node, against 3 us a node that a replay saves), with room for doubt.
  static constexpr uint64_t kPaidReplays = 8;
  // So often it may be pushed out before; then it waits.
  static constexpr uint32_t kMostTimes = 3;
  // Executions that it waits before it pushes others out in its turn; twice as many each time.
  static constexpr uint64_t kFirstWait = 256;
  static constexpr uint64_t kLongestWait = 1 << 20;
  // Programs that are remembered; beyond that, the one that was pushed out longest ago is not.
  static constexpr size_t kMostPrograms = 1024;

  // A recording of the program was pushed out after so many replays.
  void NotePushedOut(const Program& program, Room room, uint64_t replays);
  // A recording of the program has no room even alone: it waits until it is forgotten.
  void NoteTooLarge(const Program& program, Room room);

  // Asked once for each execution that would capture: does the program wait? `is_there(room)` says
  // whether its recording would have room beside all others. `why` gets a sentence.
  template <typename F>
  bool Waits(const Program& program, F is_there, std::string* why) {
    std::lock_guard lock(mutex_);
    const auto found = programs_.find(program.id);
    if (found == programs_.end() || found->second.times < kMostTimes) return false;
    if (is_there(found->second.room)) {
      programs_.erase(found);
      return false;
    }
    return WaitsOnceMore(&found->second, why);
  }

  void Clear(uint64_t function_id);  // 0: all

 private:
  struct Pushed {
    uint64_t function_id = 0;
    Room room;
    uint32_t times = 0;  // in a row before it had paid
    bool too_large = false;
    uint64_t waited = 0;  // executions since the last time
    uint64_t wait = kFirstWait;
    uint64_t last = 0;  // number of the last time
  };
  Pushed* Find(const Program& program, Room room);  // made if need be
  static bool WaitsOnceMore(Pushed* pushed, std::string* why);

  std::mutex mutex_;  // guards all below, for as long as a look-up takes
  std::map<Hash128, Pushed> programs_;
  uint64_t next_ = 1;
};

}  // namespace jaxgraph
