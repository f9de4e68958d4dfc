// bfloat16 as stored: the upper half of a float32.
#pragma once

#include <cstdint>
#include <cstring>

#include "memkv/host_device.h"

namespace memkv {

struct bfloat16 {
  uint16_t bits;
};

MEMKV_HD float to_float(float x) { return x; }

MEMKV_HD float to_float(bfloat16 x) {
  const uint32_t wide = uint32_t{x.bits} << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

// Rounds to nearest, ties to even; a NaN stays a NaN whatever its payload.
MEMKV_HD bfloat16 to_bfloat16(float x) {
  uint32_t wide;
  memcpy(&wide, &x, sizeof(wide));
  if ((wide & 0x7fffffffu) > 0x7f800000u) return {uint16_t((wide >> 16) | 0x40u)};
  return {uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16)};
}

MEMKV_HD void store_float(float* to, float x) { *to = x; }
MEMKV_HD void store_float(bfloat16* to, float x) { *to = to_bfloat16(x); }

}  // namespace memkv
