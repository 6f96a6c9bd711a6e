#include "ffi/kernels/cuda/jit/kernel_cache.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>

#include "ffi/core/program.h"
#include "ffi/device/cuda/cuda_error.h"
#include "ffi/kernels/cuda/jit/nvrtc.h"
#include "ffi/kernels/cuda/jit/prelude.h"

namespace jaxgraph {
namespace {

// Loading a library while a stream is being captured by this thread must not end that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { IgnoreCudaError(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { IgnoreCudaError(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

std::string NameOf(const std::string& source) {
  // A source's first line says what it is of: "// expr".
  std::string name = "jaxgraph_" + source.substr(3, source.find('\n') - 3) + "_";
  char digits[3];
  for (const uint8_t byte : HashBytes(source)) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    name += digits;
  }
  return name;
}

Status Load(const std::string& image, const std::vector<std::string>& names,
            std::vector<const void*>* functions) {
  const RelaxedCapture relaxed;
  cudaLibrary_t library = nullptr;  // never unloaded: its kernels live as long as the process
  JAXGRAPH_CUDA_RETURN_IF_ERROR(
      cudaLibraryLoadData(&library, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  for (const std::string& name : names) {
    cudaKernel_t kernel = nullptr;
    JAXGRAPH_CUDA_RETURN_IF_ERROR(cudaLibraryGetKernel(&kernel, library, name.c_str()));
    functions->push_back(kernel);
  }
  return Status::Ok();
}

}  // namespace

std::string TranslationUnit(const std::vector<const std::string*>& sources,
                            const std::vector<std::string>& names) {
  std::string text = kJitPrelude;
  const std::string placeholder = KernelSource::kName;
  for (size_t i = 0; i < sources.size(); ++i) {
    const std::string& source = *sources[i];
    size_t from = 0;
    for (size_t at; (at = source.find(placeholder, from)) != std::string::npos;) {
      text.append(source, from, at - from).append(names[i]);
      from = at + placeholder.size();
    }
    text.append(source, from, std::string::npos);
  }
  return text;
}

KernelCache& KernelCache::Get() {
  static KernelCache* cache = new KernelCache;  // outlives every launch
  return *cache;
}

void KernelCache::Find(const std::vector<const KernelSource*>& sources,
                       const std::vector<size_t>& param_bytes, const std::string& architecture,
                       std::vector<const KernelInfo*>* kernels) {
  // Compiling under the lock: whoever else needs a kernel now would otherwise compile it too.
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Kernel*> found;
  Missing missing;
  for (size_t i = 0; i < sources.size(); ++i) {
    const auto [at, is_new] = kernels_.try_emplace({architecture, sources[i]->text});
    if (is_new) {
      at->second = std::make_unique<Kernel>();
      at->second->name = NameOf(sources[i]->text);
      at->second->info.name = at->second->name.c_str();
      at->second->info.param_bytes = param_bytes[i];
      missing.emplace_back(&at->first.second, at->second.get());
    }
    found.push_back(at->second.get());
  }
  if (!missing.empty()) Compile(missing, architecture);
  kernels->clear();
  for (const Kernel* kernel : found) kernels->push_back(kernel->usable ? &kernel->info : nullptr);
}

void KernelCache::Compile(const Missing& missing, const std::string& architecture) {
  std::vector<const std::string*> sources;
  std::vector<std::string> names;
  for (const auto& [source, kernel] : missing) {
    sources.push_back(source);
    names.push_back(kernel->name);
  }
  std::string image;
  std::vector<const void*> functions;
  const auto start = std::chrono::steady_clock::now();
  Status status = Nvrtc::Get()->Compile(TranslationUnit(sources, names), architecture, &image);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  ++counts_.calls;
  counts_.seconds += took.count();
  if (status.ok()) status = Load(image, names, &functions);
  if (status.ok()) {
    for (size_t i = 0; i < missing.size(); ++i) {
      missing[i].second->info.cuda_function = functions[i];
      missing[i].second->usable = true;
    }
    counts_.kernels += missing.size();
  } else if (missing.size() > 1) {
    // One of them is to blame; the others need not suffer.
    for (const auto& one : missing) Compile({one}, architecture);
  } else {
    ++counts_.failed;
    counts_.last_error = status.message();
  }
}

JitCounts KernelCache::counts() {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace jaxgraph
