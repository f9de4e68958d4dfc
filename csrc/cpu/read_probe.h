#pragma once

#include <cstdint>

namespace memkv {

// Reads count floats once, in order, on the pool's threads, with the widest loads in use.
// Returns a sum that keeps the reading from being left out.
float read_floats(const float* data, int64_t count);

}  // namespace memkv
