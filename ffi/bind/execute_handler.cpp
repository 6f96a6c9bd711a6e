// The handlers run on XLA's threads. They never take the GIL, and no C++ exception leaves them.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ffi/bind/handlers.h"
#include "ffi/core/program.h"
#include "ffi/core/standalone.h"
#include "ffi/runtime/runtime.h"
#include "ffi/runtime/worker_team.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgraph {
namespace {

namespace xffi = ::xla::ffi;

// What XLA keeps for one call site: made at compile time, with no device known, and shared by every
// device and thread that runs the executable. So it is immutable.
struct CallSite {
  std::shared_ptr<const Program> program;
  std::vector<const Base*> operands;  // in the order of the call's arguments
  std::vector<const Base*> results;
};

// One type a platform: each platform's runtime has its own registry and gives its own id.
template <Platform platform>
struct CallSiteOf : CallSite {
  static xffi::TypeId id;
};
template <Platform platform>
xffi::TypeId CallSiteOf<platform>::id = {};

xffi::Error ToFfi(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return xffi::Error::Success();
    case Code::kInvalidArgument:
      return xffi::Error(xffi::ErrorCode::kInvalidArgument, status.message());
    case Code::kOutOfMemory:
      return xffi::Error(xffi::ErrorCode::kResourceExhausted, status.message());
    case Code::kUnsupported:
      return xffi::Error(xffi::ErrorCode::kUnimplemented, status.message());
    case Code::kUpdateRefused:
    case Code::kDeviceError:
    case Code::kContextPoisoned:
    case Code::kInternal:
      break;
  }
  return xffi::Error::Internal(status.message());
}

// Runs `body` (a Status()) and turns what it throws into a status.
template <typename Body>
Status Guarded(Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, "jaxgraph: out of host memory");
  } catch (const std::exception& e) {
    return Status(Code::kInternal, std::string("jaxgraph: ") + e.what());
  } catch (...) {
    return Status(Code::kInternal, "jaxgraph: unknown exception");
  }
}

Status MakeCallSite(std::string_view bytes, CallSite* site) {
  auto program = std::make_shared<Program>();
  JAXGRAPH_RETURN_IF_ERROR(Decode(bytes, program.get()));
  for (const Base& base : program->bases) {
    if (base.kind == BaseKind::kOperand) site->operands.push_back(nullptr);
    if (base.kind == BaseKind::kResult) site->results.push_back(nullptr);
  }
  for (const Base& base : program->bases) {
    if (base.kind == BaseKind::kArena) continue;
    auto& bases = base.kind == BaseKind::kOperand ? site->operands : site->results;
    if (base.index >= bases.size() || bases[base.index] != nullptr) {
      return Status(
          Code::kInvalidArgument,
          "jaxgraph: the operands or results of the program are not numbered 0 to n-1 ('" +
              base.label + "')");
    }
    bases[base.index] = &base;
  }
  site->program = std::move(program);
  return Status::Ok();
}

Status CheckCount(size_t got, const std::vector<const Base*>& bases, const char* what) {
  if (got == bases.size()) return Status::Ok();
  return Status(Code::kInvalidArgument, "jaxgraph: the program takes " +
                                            std::to_string(bases.size()) + " " + what +
                                            ", the call has " + std::to_string(got));
}

// The address of one operand or result, after its size was held against what the program expects.
Status TakeAddress(const xffi::AnyBuffer& buffer, const Base* base, std::vector<char*>* addresses) {
  if (buffer.size_bytes() != base->nbytes) {
    return Status(Code::kInvalidArgument,
                  "jaxgraph: '" + base->label + "' has " + std::to_string(buffer.size_bytes()) +
                      " bytes, the program expects " + std::to_string(base->nbytes));
  }
  addresses->push_back(static_cast<char*>(buffer.untyped_data()));
  return Status::Ok();
}

struct Addresses {
  std::vector<char*> operands;
  std::vector<char*> results;
};

// `num_results`: how many of the call's results are the program's; the first ones.
Status CollectAddresses(const CallSite& site, const xffi::RemainingArgs& args,
                        const xffi::RemainingRets& rets, size_t num_results, Addresses* addresses) {
  JAXGRAPH_RETURN_IF_ERROR(CheckCount(args.size(), site.operands, "operands"));
  JAXGRAPH_RETURN_IF_ERROR(CheckCount(num_results, site.results, "results"));
  addresses->operands.reserve(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<xffi::AnyBuffer>(i);
    if (!buffer.has_value()) return Status(Code::kInternal, buffer.error().message());
    JAXGRAPH_RETURN_IF_ERROR(TakeAddress(*buffer, site.operands[i], &addresses->operands));
  }
  addresses->results.reserve(num_results);
  for (size_t i = 0; i < num_results; ++i) {
    auto buffer = rets.get<xffi::AnyBuffer>(i);
    if (!buffer.has_value()) return Status(Code::kInternal, buffer.error().message());
    JAXGRAPH_RETURN_IF_ERROR(TakeAddress(**buffer, site.results[i], &addresses->results));
  }
  return Status::Ok();
}

template <Platform platform>
xffi::ErrorOr<std::unique_ptr<CallSiteOf<platform>>> Instantiate(xffi::Span<const uint8_t> bytes) {
  auto site = std::make_unique<CallSiteOf<platform>>();
  const Status status = Guarded([&] {
    return MakeCallSite({reinterpret_cast<const char*>(bytes.begin()), bytes.size()}, site.get());
  });
  if (!status.ok()) return xffi::Unexpected(ToFfi(status));
  return site;
}

xffi::Error ExecuteHost(int32_t ordinal, xffi::ThreadPool pool, CallSiteOf<Platform::kHost>* site,
                        xffi::RemainingArgs args, xffi::RemainingRets rets) {
  return ToFfi(Guarded([&] {
    Addresses addresses;
    JAXGRAPH_RETURN_IF_ERROR(CollectAddresses(*site, args, rets, rets.size(), &addresses));
    DeviceRuntime* device = nullptr;
    JAXGRAPH_RETURN_IF_ERROR(Runtime::Get().ForDevice(Platform::kHost, ordinal, &device));
    WorkerTeam team(static_cast<int>(pool.num_threads()),
                    [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
    ParallelFor* stream = &team;
    return device->executor->Execute(site->program, addresses.operands, addresses.results, stream);
  }));
}

xffi::Error ExecuteCuda(int32_t ordinal, void* stream, CallSiteOf<Platform::kCuda>* site,
                        xffi::RemainingArgs args, xffi::RemainingRets rets) {
  return ToFfi(Guarded([&] {
    Addresses addresses;
    JAXGRAPH_RETURN_IF_ERROR(CollectAddresses(*site, args, rets, rets.size(), &addresses));
    DeviceRuntime* device = nullptr;
    JAXGRAPH_RETURN_IF_ERROR(Runtime::Get().ForDevice(Platform::kCuda, ordinal, &device));
    return device->executor->Execute(site->program, addresses.operands, addresses.results, stream);
  }));
}

// A kernel by itself: the call's last result is its scratch memory.
Status Launch(const DeviceRuntime& device, const CallSite& site, const xffi::RemainingArgs& args,
              const xffi::RemainingRets& rets, Stream stream) {
  const size_t num_results = rets.size() - std::min<size_t>(rets.size(), 1);
  Addresses given;
  JAXGRAPH_RETURN_IF_ERROR(CollectAddresses(site, args, rets, num_results, &given));
  auto scratch = rets.get<xffi::AnyBuffer>(num_results);
  if (!scratch.has_value()) return Status(Code::kInternal, scratch.error().message());
  if ((*scratch)->size_bytes() < site.program->arena_bytes) {
    return Status(Code::kInvalidArgument, "jaxgraph: the program needs " +
                                              std::to_string(site.program->arena_bytes) +
                                              " bytes of scratch memory, the call brings " +
                                              std::to_string((*scratch)->size_bytes()));
  }
  std::vector<char*> addresses = {static_cast<char*>((*scratch)->untyped_data())};
  addresses.insert(addresses.end(), given.operands.begin(), given.operands.end());
  addresses.insert(addresses.end(), given.results.begin(), given.results.end());
  return LaunchStandalone(device.device.get(), *device.emitter, *site.program, addresses, stream);
}

xffi::Error LaunchHost(int32_t ordinal, xffi::ThreadPool pool, CallSiteOf<Platform::kHost>* site,
                       xffi::RemainingArgs args, xffi::RemainingRets rets) {
  return ToFfi(Guarded([&] {
    DeviceRuntime* device = nullptr;
    JAXGRAPH_RETURN_IF_ERROR(Runtime::Get().ForDevice(Platform::kHost, ordinal, &device));
    WorkerTeam team(static_cast<int>(pool.num_threads()),
                    [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
    ParallelFor* stream = &team;
    return Launch(*device, *site, args, rets, stream);
  }));
}

xffi::Error LaunchCuda(int32_t ordinal, void* stream, CallSiteOf<Platform::kCuda>* site,
                       xffi::RemainingArgs args, xffi::RemainingRets rets) {
  return ToFfi(Guarded([&] {
    DeviceRuntime* device = nullptr;
    JAXGRAPH_RETURN_IF_ERROR(Runtime::Get().ForDevice(Platform::kCuda, ordinal, &device));
    return Launch(*device, *site, args, rets, stream);
  }));
}

// What every handler of a platform is given.
auto HostBinding() {
  return xffi::Ffi::Bind()
      .Ctx<xffi::DeviceOrdinal>()
      .Ctx<xffi::ThreadPool>()
      .Ctx<xffi::State<CallSiteOf<Platform::kHost>>>()
      .RemainingArgs()
      .RemainingRets();
}
auto CudaBinding() {
  return xffi::Ffi::Bind()
      .Ctx<xffi::DeviceOrdinal>()
      .Ctx<xffi::PlatformStream<void*>>()
      .Ctx<xffi::State<CallSiteOf<Platform::kCuda>>>()
      .RemainingArgs()
      .RemainingRets();
}

// XLA must know the state's type before it takes the handler: it asks the instantiate handler for
// the type's id when the handler is registered, and that call is the first that brings the
// platform's own API. (Registering the type from Python, before the backend has started, keeps
// JAX's CPU backend from starting.)
template <Platform platform>
XLA_FFI_Error* RegisterCallSite(const XLA_FFI_CallFrame* frame, const char* name) {
  static std::mutex mutex;  // not a once_flag: a registration that failed is tried again
  std::lock_guard<std::mutex> lock(mutex);
  if (CallSiteOf<platform>::id.type_id != 0) return nullptr;
  // XLA keeps the pointer.
  static const XLA_FFI_TypeInfo info = xffi::MakeTypeInfo<CallSiteOf<platform>>();
  return xffi::Ffi::RegisterTypeId(frame->api, name, &CallSiteOf<platform>::id, &info);
}

}  // namespace
}  // namespace jaxgraph

using jaxgraph::CallSiteOf;
using jaxgraph::Platform;

extern "C" {

XLA_FFI_Error* JaxgraphInstantiateHost(XLA_FFI_CallFrame* frame) {
  if (auto* e = jaxgraph::RegisterCallSite<Platform::kHost>(frame, "jaxgraph_call_site_host")) {
    return e;
  }
  static auto* handler = xla::ffi::Ffi::BindInstantiate()
                             .Attr<xla::ffi::Span<const uint8_t>>("program")
                             .To(jaxgraph::Instantiate<Platform::kHost>)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* JaxgraphInstantiateCuda(XLA_FFI_CallFrame* frame) {
  if (auto* e = jaxgraph::RegisterCallSite<Platform::kCuda>(frame, "jaxgraph_call_site_cuda")) {
    return e;
  }
  static auto* handler = xla::ffi::Ffi::BindInstantiate()
                             .Attr<xla::ffi::Span<const uint8_t>>("program")
                             .To(jaxgraph::Instantiate<Platform::kCuda>)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* JaxgraphExecuteHost(XLA_FFI_CallFrame* frame) {
  static auto* handler = jaxgraph::HostBinding().To(jaxgraph::ExecuteHost).release();
  return handler->Call(frame);
}

XLA_FFI_Error* JaxgraphExecuteCuda(XLA_FFI_CallFrame* frame) {
  static auto* handler = jaxgraph::CudaBinding().To(jaxgraph::ExecuteCuda).release();
  return handler->Call(frame);
}

XLA_FFI_Error* JaxgraphLaunchHost(XLA_FFI_CallFrame* frame) {
  static auto* handler = jaxgraph::HostBinding().To(jaxgraph::LaunchHost).release();
  return handler->Call(frame);
}

// It only enqueues kernels, always the same for the same buffers: XLA may capture it.
XLA_FFI_Error* JaxgraphLaunchCuda(XLA_FFI_CallFrame* frame) {
  static auto* handler = jaxgraph::CudaBinding()
                             .To(jaxgraph::LaunchCuda, {xla::ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

}  // extern "C"
