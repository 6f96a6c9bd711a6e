// NVRTC, found at run time: no build of ours needs it, and a process without it interprets.
#pragma once

#include <string>
#include <vector>

#include "ffi/core/status.h"

namespace jaxgraph {

// Folders to look in first (where pip puts it beside jax). Counts until the first use.
void SetNvrtcFolders(std::vector<std::string> folders);

class Nvrtc {
 public:
  // Null where there is none; looked for once.
  static const Nvrtc* Get();
  // "13.0, /path/libnvrtc.so.13", or why there is none.
  static const std::string& Description();

  // Compiles for "sm_90" to machine code, for "compute_90" to PTX.
  Status Compile(const std::string& source, const std::string& architecture,
                 std::string* image) const;

 private:
  struct Found;
  static const Found& Find();

  struct Api;
  const Api* api_ = nullptr;
};

}  // namespace jaxgraph
