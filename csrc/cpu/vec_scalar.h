// 4 floats as the compiler's own vector type: no instruction beyond the target's baseline (SSE2,
// NEON). What each function means is in vec_math.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "memkv/bfloat16.h"
#include "memkv/host_device.h"
#include "vec_math.h"

namespace memkv::scalar {

using Float4 = float __attribute__((vector_size(16)));
using Int4 = int32_t __attribute__((vector_size(16)));

struct Vec {
  static constexpr int kLanes = 4;
  static constexpr float kLeastExponent = -127.0f;
  using Index = Int4;
  using Mask = Int4;

  Float4 r;

  MEMKV_HD static Vec zero() { return {Float4{}}; }
  MEMKV_HD static Vec all(float x) { return {Float4{x, x, x, x}}; }
  MEMKV_HD static Vec load(const float* p) {
    Vec x;
    memcpy(&x.r, p, sizeof(x.r));
    return x;
  }
  MEMKV_HD static Vec load(const bfloat16* p) {
    return {Float4{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}};
  }
  MEMKV_HD static Vec repeat4(const float* p) { return load(p); }
  MEMKV_HD void store(float* p) const { memcpy(p, &r, sizeof(r)); }

  MEMKV_HD static void load_split(const bfloat16* p, Vec& even, Vec& odd) {
    Int4 bits;
    memcpy(&bits, p, sizeof(bits));
    even.r = Float4(bits << 16);
    odd.r = Float4(bits & int32_t(0xffff0000u));
  }

  MEMKV_HD static Index index(const int32_t* p) {
    Index i;
    memcpy(&i, p, sizeof(i));
    return i;
  }
  MEMKV_HD static Index index_from(int32_t first) {
    return Index{first, first + 1, first + 2, first + 3};
  }
  MEMKV_HD static Index index_all(int32_t x) { return Index{x, x, x, x}; }
  MEMKV_HD static Mask less(Index a, Index b) { return a < b; }
  MEMKV_HD static Mask both(Mask a, Mask b) { return a & b; }
  MEMKV_HD static Vec select(Mask mask, Vec yes, Vec no) {
    return {Float4((mask & Int4(yes.r)) | (~mask & Int4(no.r)))};
  }
  MEMKV_HD static Vec lookup(const float* p, Index lane) {
    return {Float4{p[lane[0]], p[lane[1]], p[lane[2]], p[lane[3]]}};
  }
};

MEMKV_HD Vec operator+(Vec a, Vec b) { return {a.r + b.r}; }
MEMKV_HD Vec operator-(Vec a, Vec b) { return {a.r - b.r}; }
MEMKV_HD Vec operator*(Vec a, Vec b) { return {a.r * b.r}; }
MEMKV_HD Vec operator/(Vec a, Vec b) { return {a.r / b.r}; }
// Two roundings: the baseline has no fused instruction, and a call of fmaf for each lane is slow.
MEMKV_HD Vec multiply_add(Vec a, Vec b, Vec c) { return {a.r * b.r + c.r}; }
MEMKV_HD Vec larger(Vec a, Vec b) { return Vec::select(a.r > b.r, a, b); }
MEMKV_HD Vec smaller(Vec a, Vec b) { return Vec::select(a.r < b.r, a, b); }
MEMKV_HD float largest(Vec a) {
  const float low = a.r[0] > a.r[1] ? a.r[0] : a.r[1], high = a.r[2] > a.r[3] ? a.r[2] : a.r[3];
  return low > high ? low : high;
}
// Adding and taking away 1.5 * 2^23 leaves the nearest integer, for |x| < 2^22.
MEMKV_HD Vec nearest(Vec x) { return {(x.r + 12582912.0f) - 12582912.0f}; }
MEMKV_HD Vec times_power_of_2(Vec x, Vec n) {
  const Int4 biased = __builtin_convertvector(n.r, Int4) + 127;
  return {x.r * Float4(biased << 23)};
}
MEMKV_HD Vec finite_or_zero(Vec x) {
  return Vec::select(x.r == -__builtin_huge_valf(), Vec::zero(), x);
}

// Adds within quads: a[v] holds four terms of token v.
MEMKV_HD Vec sum_quads(const Vec a[4]) {
  Vec sums;
  for (int v = 0; v < 4; ++v) {
    sums.r[v] = (a[v].r[0] + a[v].r[2]) + (a[v].r[1] + a[v].r[3]);
  }
  return sums;
}

MEMKV_HD Vec exp2_of(Vec x) { return exp2_polynomial(x); }

}  // namespace memkv::scalar
