#include "ffi/kernels/cuda/jit/nvrtc.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

namespace jaxgraph {
namespace {

std::mutex folders_mutex;
std::vector<std::string>& Folders() {
  static std::vector<std::string> folders;
  return folders;
}

// Newest first: what it compiles, a driver of the same CUDA generation loads.
constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
constexpr const char* kToolkit = "/usr/local/cuda/lib64";

}  // namespace

void SetNvrtcFolders(std::vector<std::string> folders) {
  std::lock_guard<std::mutex> lock(folders_mutex);
  Folders() = std::move(folders);
}

// The functions as nvrtc.h declares them; its header is not needed to build this.
struct Nvrtc::Api {
  using Program = void*;
  int (*version)(int*, int*) = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*create)(Program*, const char*, const char*, int, const char* const*,
                const char* const*) = nullptr;
  int (*destroy)(Program*) = nullptr;
  int (*compile)(Program, int, const char* const*) = nullptr;
  int (*log_size)(Program, size_t*) = nullptr;
  int (*log)(Program, char*) = nullptr;
  int (*cubin_size)(Program, size_t*) = nullptr;
  int (*cubin)(Program, char*) = nullptr;
  int (*ptx_size)(Program, size_t*) = nullptr;
  int (*ptx)(Program, char*) = nullptr;

  bool Load(void* library) {
    const auto find = [library](const char* symbol, auto* function) {
      *function =
          reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, symbol));
      return *function != nullptr;
    };
    return find("nvrtcVersion", &version) && find("nvrtcGetErrorString", &error_string) &&
           find("nvrtcCreateProgram", &create) && find("nvrtcDestroyProgram", &destroy) &&
           find("nvrtcCompileProgram", &compile) && find("nvrtcGetProgramLogSize", &log_size) &&
           find("nvrtcGetProgramLog", &log) && find("nvrtcGetCUBINSize", &cubin_size) &&
           find("nvrtcGetCUBIN", &cubin) && find("nvrtcGetPTXSize", &ptx_size) &&
           find("nvrtcGetPTX", &ptx);
  }
};

struct Nvrtc::Found {
  Api api;
  Nvrtc nvrtc;
  std::string description;
};

const Nvrtc::Found& Nvrtc::Find() {
  // Kept for ever, as the library is: kernels may be compiled as long as the process lives.
  static const Found* const found = [] {
    auto* f = new Found;
    std::vector<std::string> candidates;
    {
      std::lock_guard<std::mutex> lock(folders_mutex);
      for (const std::string& folder : Folders()) {
        for (const char* name : kNames) candidates.push_back(folder + "/" + name);
      }
    }
    for (const char* name : kNames) candidates.push_back(name);
    for (const char* name : kNames) candidates.push_back(std::string(kToolkit) + "/" + name);
    for (const std::string& candidate : candidates) {
      void* library = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL);
      int major = 0, minor = 0;
      if (library == nullptr || !f->api.Load(library)) continue;
      if (f->api.version(&major, &minor) != 0) continue;
      f->nvrtc.api_ = &f->api;
      f->description = std::to_string(major) + "." + std::to_string(minor) + ", " + candidate;
      return f;
    }
    f->description = "no libnvrtc.so.13 or .12 was found";
    return f;
  }();
  return *found;
}

const Nvrtc* Nvrtc::Get() {
  const Found& found = Find();
  return found.nvrtc.api_ != nullptr ? &found.nvrtc : nullptr;
}

const std::string& Nvrtc::Description() { return Find().description; }

Status Nvrtc::Compile(const std::string& source, const std::string& architecture,
                      std::string* image) const {
  Api::Program program = nullptr;
  int result = api_->create(&program, source.c_str(), "jaxgraph.cu", 0, nullptr, nullptr);
  if (result != 0) {
    return Status(Code::kInternal,
                  std::string("nvrtcCreateProgram: ") + api_->error_string(result));
  }
  const std::string target = "--gpu-architecture=" + architecture;
  const char* options[] = {target.c_str(), "--std=c++17", "-w",
                           "--device-as-default-execution-space"};
  result = api_->compile(program, 4, options);
  size_t size = 0;
  std::string log;
  if (result != 0 && api_->log_size(program, &size) == 0) {
    log.resize(size);
    api_->log(program, &log[0]);
  }
  const bool machine = architecture.rfind("sm_", 0) == 0;
  if (result == 0) result = (machine ? api_->cubin_size : api_->ptx_size)(program, &size);
  if (result == 0) {
    image->resize(size);
    result = (machine ? api_->cubin : api_->ptx)(program, &(*image)[0]);
  }
  api_->destroy(&program);
  if (result == 0) return Status::Ok();
  return Status(Code::kInternal, std::string("nvrtcCompileProgram: ") + api_->error_string(result) +
                                     " " + log.substr(0, log.find('\0')));
}

}  // namespace jaxgraph
