#pragma once

#include <cstddef>

namespace memkv {

// Asks the system for huge pages under [begin, begin + bytes), best before it is touched. False
// where the system has none to offer. huge_pages_linux.cpp or no_huge_pages.cpp.
bool prefer_huge_pages(void* begin, size_t bytes);

}  // namespace memkv
