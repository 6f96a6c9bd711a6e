#include "ffi/core/crowding.h"

#include <algorithm>

namespace jaxgraph {

Crowding::Pushed* Crowding::Find(const Program& program, Room room) {
  if (programs_.size() >= kMostPrograms && programs_.count(program.id) == 0) {
    programs_.erase(std::min_element(
        programs_.begin(), programs_.end(),
        [](const auto& a, const auto& b) { return a.second.last < b.second.last; }));
  }
  Pushed& pushed = programs_[program.id];
  pushed.function_id = program.function_id;
  pushed.room = room;
  pushed.last = next_++;
  return &pushed;
}

void Crowding::NotePushedOut(const Program& program, Room room, uint64_t replays) {
  std::lock_guard lock(mutex_);
  if (replays >= kPaidReplays) {
    programs_.erase(program.id);
    return;
  }
  Pushed* pushed = Find(program, room);
  if (++pushed->times > kMostTimes) pushed->wait = std::min(2 * pushed->wait, kLongestWait);
}

void Crowding::NoteTooLarge(const Program& program, Room room) {
  std::lock_guard lock(mutex_);
  Pushed* pushed = Find(program, room);
  pushed->times = kMostTimes;
  pushed->too_large = true;
}

bool Crowding::WaitsOnceMore(Pushed* pushed, std::string* why) {
  const std::string executables = std::to_string(pushed->room.executables) + " executables";
  if (pushed->too_large) {
    *why = "its " + executables + " alone have no room within the limits";
    return true;
  }
  if (++pushed->waited > pushed->wait) {
    pushed->waited = 0;
    return false;
  }
  *why = "no room: its " + executables + " were pushed out " + std::to_string(pushed->times) +
         " times within " + std::to_string(kPaidReplays) +
         " replays; it waits until there is room" + ", or for " + std::to_string(pushed->wait) +
         " executions";
  return true;
}

void Crowding::Clear(uint64_t function_id) {
  std::lock_guard lock(mutex_);
  for (auto it = programs_.begin(); it != programs_.end();) {
    const bool cleared = function_id == 0 || it->second.function_id == function_id;
    it = cleared ? programs_.erase(it) : std::next(it);
  }
}

}  // namespace jaxgraph
