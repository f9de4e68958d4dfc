#include <sys/mman.h>

#include <cstdint>

#include "huge_pages.h"

namespace memkv {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

}  // namespace

bool prefer_huge_pages(void* begin, size_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t inside = (first + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (first + bytes) / kHugePage * kHugePage;
  return inside < end && madvise(reinterpret_cast<void*>(inside), end - inside, MADV_HUGEPAGE) == 0;
}

}  // namespace memkv
