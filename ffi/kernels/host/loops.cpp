#include "ffi/kernels/host/loops.h"

namespace jaxgraph {

const HostLoops& Loops() {
  static const HostLoops* const best = [] {
    for (const HostLoops* loops : {Avx512Loops(), Avx2Loops()})
      if (loops != nullptr) return loops;
    return PortableLoops();
  }();
  return *best;
}

}  // namespace jaxgraph
