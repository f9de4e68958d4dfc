// A softmax that is summed piece by piece: over blocks, segments, ranges and threads alike.
//
// Scores are in units of log2 (score * log2(e)), so that a weight is exp2(score - max). The state
// of one query row over a set of keys S is
//
//     max = max over S of score          -inf while no key was seen
//     sum = sum over S of exp2(score - max)
//     out = sum over S of exp2(score - max) * value      kept by the caller, next to the state
//
// Two states over disjoint sets merge into the state of the union, exactly:
//
//     max = larger(a.max, b.max)
//     sum = a.sum * exp2(a.max - max) + b.sum * exp2(b.max - max)      and out likewise
//
// Real is float, or a vector of floats with one row in each lane; larger(), exp2_of() and select()
// are found for it by its namespace.
#pragma once

#include <cmath>

#include "memkv/host_device.h"

namespace memkv {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kMinusInfinity = -__builtin_huge_valf();

MEMKV_HD float larger(float a, float b) { return a > b ? a : b; }
#ifdef __CUDA_ARCH__
// One instruction: what is below 2^-126 is 0.
MEMKV_HD float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
MEMKV_HD float exp2_of(float x) { return exp2f(x); }
#endif
// 0 where x is -inf, else x: the point to measure from when no key was seen yet.
MEMKV_HD float finite_or_zero(float x) { return x == kMinusInfinity ? 0.0f : x; }

// What multiplies the two sides' sums and outputs when they merge.
template <typename Real>
struct MergeFactors {
  Real ours, theirs;  // in [0, 1]; one of them is 1, unless neither side saw a key
};

template <typename Real>
struct SoftmaxState {
  Real max;
  Real sum;

  // Make room for scores up to `top`; returns what the out summed so far is to be multiplied by.
  MEMKV_HD Real raise(Real top) {
    const Real raised = larger(max, top);
    const Real keep = exp2_of(max - finite_or_zero(raised));
    max = raised;
    sum = sum * keep;
    return keep;
  }

  // The weight of a score that is at most max; 0 for a masked one (-inf).
  MEMKV_HD Real weight(Real score) const { return exp2_of(score - finite_or_zero(max)); }

  MEMKV_HD void add(Real weight_of_score) { sum = sum + weight_of_score; }

  MEMKV_HD MergeFactors<Real> merge(const SoftmaxState& other) {
    const Real ours = raise(other.max);
    const Real theirs = exp2_of(other.max - finite_or_zero(max));
    sum = sum + other.sum * theirs;
    return {ours, theirs};
  }
};

MEMKV_HD SoftmaxState<float> empty_softmax() { return {kMinusInfinity, 0.0f}; }

// The normalised output. A division, not a product with 1 / sum: values that are all 1 give 1.
MEMKV_HD float finish(const SoftmaxState<float>& state, float out) {
  return state.sum > 0.0f ? out / state.sum : 0.0f;
}

// Natural log of the sum of exp(score); -inf for a row that saw no key.
MEMKV_HD float log_sum_exp(const SoftmaxState<float>& state) {
  return state.sum > 0.0f ? kLn2 * (state.max + log2f(state.sum)) : kMinusInfinity;
}

}  // namespace memkv
