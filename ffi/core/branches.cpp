#include "ffi/core/branches.h"

#include <algorithm>

namespace jaxgraph {
namespace {

// More branches than this share streams, in turn: that is still a legal order.
constexpr size_t kMaxSideStreams = 7;

}  // namespace

SideStreams::~SideStreams() {
  for (Stream stream : streams_) device_->DestroyStream(stream);
}

Status SideStreams::Get(size_t index, Stream* stream) {
  while (streams_.size() <= index) {
    streams_.reserve(streams_.size() + 1);  // before there is one to keep
    Stream made = nullptr;
    JAXGRAPH_RETURN_IF_ERROR(device_->CreateStream(&made));
    streams_.push_back(made);
  }
  *stream = streams_[index];
  return Status::Ok();
}

Status Branches::Fork(const std::vector<Launch>& launches, size_t first) {
  region_ = launches[first].region;
  if (region_ == 0) return Status::Ok();
  for (size_t i = first; i < launches.size() && launches[i].region == region_; ++i) {
    const uint32_t number = launches[i].branch;
    const auto same = [&](const Branch& b) { return b.number == number; };
    if (std::any_of(open_.begin(), open_.end(), same)) continue;
    Branch branch{number, main_};
    if (const size_t index = open_.size(); index > 0) {
      JAXGRAPH_RETURN_IF_ERROR(side_->Get((index - 1) % kMaxSideStreams, &branch.stream));
      if (index <= kMaxSideStreams) JAXGRAPH_RETURN_IF_ERROR(device_->Fork(main_, branch.stream));
    }
    open_.push_back(branch);
  }
  return Status::Ok();
}

// From one region, or none, to the next.
Status Branches::Enter(const std::vector<Launch>& launches, size_t first, bool must_fork) {
  JAXGRAPH_RETURN_IF_ERROR(Join());
  const Status forked = Fork(launches, first);
  if (forked.ok() || must_fork || forked.code() == Code::kContextPoisoned) return forked;
  ++fork_failures_;
  last_fork_failure_ = forked;
  JAXGRAPH_RETURN_IF_ERROR(Join());  // those that were forked; nothing runs on them yet
  region_ = launches[first].region;
  return Status::Ok();
}

Status Branches::Join() {
  region_ = 0;
  Status status;
  const size_t streams = std::min(open_.size(), kMaxSideStreams + 1);
  for (size_t i = 1; i < streams; ++i) {
    const Status joined = device_->Join(open_[i].stream, main_);
    if (status.ok()) status = joined;
  }
  open_.clear();
  return status;
}

Stream Branches::StreamOf(const Launch& launch) const {
  for (const Branch& branch : open_) {
    if (branch.number == launch.branch) return branch.stream;
  }
  return main_;
}

}  // namespace jaxgraph
