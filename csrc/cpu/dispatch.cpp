#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace memkv {
namespace {

const AttentionKernels* find(const std::string& name) {
  std::string known;
  for (const AttentionKernels* set : runnable_kernels()) {
    if (name == set->name) return set;
    known += known.empty() ? set->name : std::string(", ") + set->name;
  }
  throw std::invalid_argument("instruction set '" + name + "' is not one of: " + known);
}

std::atomic<const AttentionKernels*> in_use{nullptr};

}  // namespace

const AttentionKernels& kernels() {
  const AttentionKernels* set = in_use.load();
  if (set == nullptr) {
    const char* wanted = std::getenv("MEMKV_ISA");
    set = wanted != nullptr && *wanted != '\0' ? find(wanted) : runnable_kernels().back();
    in_use.store(set);
  }
  return *set;
}

void set_isa(const std::string& name) { in_use.store(find(name)); }

}  // namespace memkv
