// What a Vec is, and the functions that every instruction set shares. A Vec holds kLanes floats:
//
//     load(float*), load(bfloat16*)   kLanes consecutive elements, widened
//     load_split(bfloat16*, a, b)     2 * kLanes elements: those at even places, those at odd ones
//     repeat4(float*)                 4 floats, again and again
//     lookup(float* p, lane)          p[lane[i]], lanes in [0, 2 * kLanes): reads all of them
//     sum_quads(a[4])                 sums of 4 neighbouring lanes of a[0], then of a[1], ...
//     times_power_of_2(x, n)          x * 2^n for an integral n >= kLeastExponent, where it is 0
//     less, both, select              masks
//
// multiply_add may round once or twice; with a factor of 1 it is the plain sum in either case.
#pragma once

#include "memkv/host_device.h"
#include "memkv/softmax_state.h"

namespace memkv {

// 2^f for |f| <= 1/2 is 1 + f * (c1 + f * (c2 + ... + f * c6)): minimax in the relative error under
// the side condition 2^0 = 1, found with the Remez exchange; off by 2.6e-9 at most before rounding.
inline constexpr float kExp2Terms[] = {0.693147214968f,
                                       0.240226527829f,
                                       0.0555031055101f,
                                       0.00961769297299f,
                                       0.00134066439024f,
                                       0.000155946781613f};

// (2^f - 1) / f
template <typename Vec>
MEMKV_HD Vec exp2_slope(Vec f) {
  Vec slope = Vec::all(kExp2Terms[5]);
  for (int i = 4; i >= 0; --i) slope = multiply_add(slope, f, Vec::all(kExp2Terms[i]));
  return slope;
}

// 2^x for x < 127; exactly 1 at 0 and exactly 0 below Vec::kLeastExponent, -inf included.
template <typename Vec>
MEMKV_HD Vec exp2_polynomial(Vec x) {
  x = larger(x, Vec::all(Vec::kLeastExponent));
  const Vec n = nearest(x);
  const Vec f = x - n;
  return times_power_of_2(multiply_add(exp2_slope(f), f, Vec::all(1.0f)), n);
}

// tanh(x) = t / (t + 2) with t = exp(2x) - 1 = 2^n * (2^f - 1) + (2^n - 1): no digits are lost near
// 0.
template <typename Vec>
MEMKV_HD Vec tanh_of(Vec x) {
  const Vec limit = Vec::all(60.0f);
  const Vec doubled = smaller(larger(x * Vec::all(2.0f * kLog2E), Vec::zero() - limit), limit);
  const Vec n = nearest(doubled);
  const Vec f = doubled - n;
  const Vec power = times_power_of_2(Vec::all(1.0f), n);
  const Vec t = multiply_add(power * f, exp2_slope(f), power - Vec::all(1.0f));
  return t / (t + Vec::all(2.0f));
}

}  // namespace memkv
