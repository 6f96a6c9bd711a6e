// The compiled kernels of the process, by source and architecture. What is decided of a source
// (compiled, or left to the interpreter) holds as long as the process lives, and so do KernelInfos:
// their address is a kernel's identity.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/device/launch.h"
#include "ffi/kernels/cuda/jit/source.h"

namespace jaxgraph {

// Counts of the whole process.
struct JitCounts {
  uint64_t kernels = 0;  // compiled
  uint64_t failed = 0;   // sources that could not be compiled or loaded
  uint64_t calls = 0;    // of NVRTC
  double seconds = 0;    // spent in them
  std::string last_error;
};

class KernelCache {
 public:
  static KernelCache& Get();

  // Compiles those of the sources that are new, in few calls; (*kernels)[i] is null where
  // sources[i] could not be compiled. `param_bytes`: of each kernel's struct.
  void Find(const std::vector<const KernelSource*>& sources, const std::vector<size_t>& param_bytes,
            const std::string& architecture, std::vector<const KernelInfo*>* kernels);

  JitCounts counts();

 private:
  struct Kernel {
    std::string name;
    KernelInfo info{};
    bool usable = false;
  };
  using Missing = std::vector<std::pair<const std::string*, Kernel*>>;  // source, kernel

  void Compile(const Missing& missing, const std::string& architecture);

  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::unique_ptr<Kernel>> kernels_;
  JitCounts counts_;
};

// The text that is compiled for several sources; names[i] is the kernel of sources[i].
std::string TranslationUnit(const std::vector<const std::string*>& sources,
                            const std::vector<std::string>& names);

}  // namespace jaxgraph
