// Status: the one way in which the core and the devices report trouble.
#pragma once

#include <string>
#include <utility>

namespace jaxgraph {

enum class Code {
  kOk = 0,
  kInvalidArgument,  // the caller's fault: a malformed program, a wrong operand
  kOutOfMemory,      // device or host memory
  kUpdateRefused,    // exec-update found another topology: instantiate instead
  kUnsupported,      // this device cannot do it
  kDeviceError,      // a device call failed; the call can go on eagerly
  kContextPoisoned,  // the device context is lost: nothing can be saved
  kInternal,         // a broken invariant of ours
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status Ok() { return {}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace jaxgraph

#define JAXGRAPH_RETURN_IF_ERROR(expr)                   \
  do {                                                   \
    ::jaxgraph::Status jaxgraph_status_ = (expr);        \
    if (!jaxgraph_status_.ok()) return jaxgraph_status_; \
  } while (0)
