// 16 floats in an AVX-512 register; what each function means is in vec_math.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "memkv/bfloat16.h"
#include "memkv/host_device.h"
#include "vec_math.h"

namespace memkv::avx512 {

struct Vec {
  static constexpr int kLanes = 16;
  static constexpr float kLeastExponent = -160.0f;
  using Index = __m512i;
  using Mask = __mmask16;

  __m512 r;

  MEMKV_HD static Vec zero() { return {_mm512_setzero_ps()}; }
  MEMKV_HD static Vec all(float x) { return {_mm512_set1_ps(x)}; }
  MEMKV_HD static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  MEMKV_HD static Vec load(const bfloat16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
  }
  MEMKV_HD static Vec repeat4(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
  MEMKV_HD void store(float* p) const { _mm512_storeu_ps(p, r); }

  MEMKV_HD static void load_split(const bfloat16* p, Vec& even, Vec& odd) {
    const __m512i bits = _mm512_loadu_si512(p);
    even.r = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    odd.r = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))));
  }

  MEMKV_HD static Index index(const int32_t* p) { return _mm512_loadu_si512(p); }
  MEMKV_HD static Index index_from(int32_t first) {
    return _mm512_add_epi32(
        _mm512_set1_epi32(first),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  MEMKV_HD static Index index_all(int32_t x) { return _mm512_set1_epi32(x); }
  MEMKV_HD static Mask less(Index a, Index b) { return _mm512_cmplt_epi32_mask(a, b); }
  MEMKV_HD static Mask both(Mask a, Mask b) { return a & b; }
  MEMKV_HD static Vec select(Mask mask, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(mask, no.r, yes.r)};
  }
  MEMKV_HD static Vec lookup(const float* p, Index lane) {
    return {_mm512_permutex2var_ps(_mm512_loadu_ps(p), lane, _mm512_loadu_ps(p + 16))};
  }
};

MEMKV_HD Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.r, b.r)}; }
MEMKV_HD Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.r, b.r)}; }
MEMKV_HD Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.r, b.r)}; }
MEMKV_HD Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.r, b.r)}; }
MEMKV_HD Vec multiply_add(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.r, b.r, c.r)}; }
MEMKV_HD Vec larger(Vec a, Vec b) { return {_mm512_max_ps(a.r, b.r)}; }
MEMKV_HD Vec smaller(Vec a, Vec b) { return {_mm512_min_ps(a.r, b.r)}; }
MEMKV_HD float largest(Vec a) { return _mm512_reduce_max_ps(a.r); }
MEMKV_HD Vec nearest(Vec x) {
  return {_mm512_roundscale_ps(x.r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
MEMKV_HD Vec times_power_of_2(Vec x, Vec n) { return {_mm512_scalef_ps(x.r, n.r)}; }
MEMKV_HD Vec finite_or_zero(Vec x) {
  const __mmask16 finite =
      _mm512_cmp_ps_mask(x.r, _mm512_set1_ps(-__builtin_huge_valf()), _CMP_NEQ_UQ);
  return {_mm512_maskz_mov_ps(finite, x.r)};
}

// Adds within quads: 128-bit part t of a[v] holds four terms of token v * 4 + t.
MEMKV_HD Vec sum_quads(const Vec a[4]) {
  const __m512 low =
      _mm512_add_ps(_mm512_unpacklo_ps(a[0].r, a[1].r), _mm512_unpackhi_ps(a[0].r, a[1].r));
  const __m512 high =
      _mm512_add_ps(_mm512_unpacklo_ps(a[2].r, a[3].r), _mm512_unpackhi_ps(a[2].r, a[3].r));
  const __m512d low_d = _mm512_castps_pd(low), high_d = _mm512_castps_pd(high);
  const __m512 sums = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low_d, high_d)),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(low_d, high_d)));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return {_mm512_permutexvar_ps(order, sums)};
}

MEMKV_HD Vec exp2_of(Vec x) { return exp2_polynomial(x); }

}  // namespace memkv::avx512
