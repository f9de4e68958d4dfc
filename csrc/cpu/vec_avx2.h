// 8 floats in an AVX register, with AVX2 and FMA; what each function means is in vec_math.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "memkv/bfloat16.h"
#include "memkv/host_device.h"
#include "vec_math.h"

namespace memkv::avx2 {

struct Vec {
  static constexpr int kLanes = 8;
  static constexpr float kLeastExponent = -127.0f;
  using Index = __m256i;
  using Mask = __m256i;

  __m256 r;

  MEMKV_HD static Vec zero() { return {_mm256_setzero_ps()}; }
  MEMKV_HD static Vec all(float x) { return {_mm256_set1_ps(x)}; }
  MEMKV_HD static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  MEMKV_HD static Vec load(const bfloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
  }
  MEMKV_HD static Vec repeat4(const float* p) {
    return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))};
  }
  MEMKV_HD void store(float* p) const { _mm256_storeu_ps(p, r); }

  MEMKV_HD static void load_split(const bfloat16* p, Vec& even, Vec& odd) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even.r = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    odd.r = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000u))));
  }

  MEMKV_HD static Index index(const int32_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  MEMKV_HD static Index index_from(int32_t first) {
    return _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  MEMKV_HD static Index index_all(int32_t x) { return _mm256_set1_epi32(x); }
  MEMKV_HD static Mask less(Index a, Index b) { return _mm256_cmpgt_epi32(b, a); }
  MEMKV_HD static Mask both(Mask a, Mask b) { return _mm256_and_si256(a, b); }
  MEMKV_HD static Vec select(Mask mask, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.r, yes.r, _mm256_castsi256_ps(mask))};
  }
  MEMKV_HD static Vec lookup(const float* p, Index lane) {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(p), lane);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(p + 8), lane);
    // Bit 3 of a lane number says which half it is in: moved to the sign for the blend.
    return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(lane, 28)))};
  }
};

MEMKV_HD Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.r, b.r)}; }
MEMKV_HD Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.r, b.r)}; }
MEMKV_HD Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.r, b.r)}; }
MEMKV_HD Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.r, b.r)}; }
MEMKV_HD Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.r, b.r, c.r)}; }
MEMKV_HD Vec larger(Vec a, Vec b) { return {_mm256_max_ps(a.r, b.r)}; }
MEMKV_HD Vec smaller(Vec a, Vec b) { return {_mm256_min_ps(a.r, b.r)}; }
MEMKV_HD float largest(Vec a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.r), _mm256_extractf128_ps(a.r, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
MEMKV_HD Vec nearest(Vec x) {
  return {_mm256_round_ps(x.r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
MEMKV_HD Vec times_power_of_2(Vec x, Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.r), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(x.r, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)))};
}
MEMKV_HD Vec finite_or_zero(Vec x) {
  const __m256 finite = _mm256_cmp_ps(x.r, _mm256_set1_ps(-__builtin_huge_valf()), _CMP_NEQ_UQ);
  return {_mm256_and_ps(finite, x.r)};
}

// Adds within quads: 128-bit half t of a[v] holds four terms of token v * 2 + t.
MEMKV_HD Vec sum_quads(const Vec a[4]) {
  const __m256 low =
      _mm256_add_ps(_mm256_unpacklo_ps(a[0].r, a[1].r), _mm256_unpackhi_ps(a[0].r, a[1].r));
  const __m256 high =
      _mm256_add_ps(_mm256_unpacklo_ps(a[2].r, a[3].r), _mm256_unpackhi_ps(a[2].r, a[3].r));
  const __m256d low_d = _mm256_castps_pd(low), high_d = _mm256_castps_pd(high);
  const __m256 sums = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low_d, high_d)),
                                    _mm256_castpd_ps(_mm256_unpackhi_pd(low_d, high_d)));
  return {_mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))};
}

MEMKV_HD Vec exp2_of(Vec x) { return exp2_polynomial(x); }

}  // namespace memkv::avx2
