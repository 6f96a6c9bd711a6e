// Reader and Writer: the bytes of programs, little endian, without padding. A Reader never reads
// past its end: the first short read makes it fail for good, and every later read gives zeros.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace jaxgraph {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the wire format is the memory format of little-endian machines");

class Writer {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void PutBytes(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
  }
  void PutString(std::string_view s) {
    Put(static_cast<uint32_t>(s.size()));
    PutBytes(s.data(), s.size());
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T Get() {
    static_assert(std::is_arithmetic_v<T>, "read enums as integers and check them");
    T value{};
    GetBytes(&value, sizeof value);
    return value;
  }
  void GetBytes(void* data, size_t size) {
    if (size > bytes_.size()) {
      Fail();
      return;
    }
    if (size == 0) return;  // memcpy does not take null, not even for nothing
    std::memcpy(data, bytes_.data(), size);
    bytes_.remove_prefix(size);
  }
  std::string GetString() {
    const size_t size = Get<uint32_t>();
    if (size > bytes_.size()) {
      Fail();
      return {};
    }
    std::string s(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return s;
  }
  // A count of things that take at least `min_bytes` each: a hostile count fails here, before
  // anybody allocates for it.
  size_t GetCount(size_t min_bytes) {
    const size_t count = Get<uint32_t>();
    if (count > bytes_.size() / min_bytes) {
      Fail();
      return 0;
    }
    return count;
  }

  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && bytes_.empty(); }

 private:
  void Fail() {
    ok_ = false;
    bytes_ = {};
  }

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace jaxgraph
