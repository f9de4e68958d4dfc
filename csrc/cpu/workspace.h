// Memory that a thread keeps from call to call: grown, never shrunk, 64-byte aligned.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace memkv {

class Workspace {
 public:
  void* at_least(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      memory_.reset(::operator new(bytes, kAlignment));
      bytes_ = bytes;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(void* p) const { ::operator delete(p, kAlignment); }
  };

  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

}  // namespace memkv
