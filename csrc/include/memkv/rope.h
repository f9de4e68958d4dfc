// Rotating the query instead of the keys:   R(p) q · R(j + d) k  =  R(p - d) q · R(j) k
//
// A key stays as it was stored, rotated to j; its segment places it at j + d. The query, which the
// model rotated to p, is turned by -d once for every segment. cos and sin are of the plain angles
// -d * inv_freq, computed in float64: a model's scaled cos and sin went into q and k already.
#pragma once

#include "memkv/host_device.h"

namespace memkv {

// Which dimensions turn together. Those from rotary_dim on do not turn.
struct RotaryPairs {
  int rotary_dim;    // even; 0: a layer without RoPE
  bool interleaved;  // (2i, 2i + 1), else (i, i + rotary_dim / 2)

  MEMKV_HD int count() const { return rotary_dim / 2; }
  MEMKV_HD int first(int pair) const { return interleaved ? 2 * pair : pair; }
  MEMKV_HD int second(int pair) const { return interleaved ? 2 * pair + 1 : pair + count(); }
};

// Turns (a, b) by an angle.
template <typename Real>
MEMKV_HD void rotate_pair(Real& a, Real& b, Real cos, Real sin) {
  const Real turned = a * cos - b * sin;
  b = b * cos + a * sin;
  a = turned;
}

// Element d of a row whose pairs are turned by the angles of cos and sin.
template <typename Real>
MEMKV_HD Real
turned_element(const Real* row, const Real* cos, const Real* sin, const RotaryPairs& pairs, int d) {
  if (d >= pairs.rotary_dim) return row[d];
  const bool second = pairs.interleaved ? d % 2 != 0 : d >= pairs.count();
  const int pair = pairs.interleaved ? d / 2 : second ? d - pairs.count() : d;
  Real a = row[pairs.first(pair)], b = row[pairs.second(pair)];
  rotate_pair(a, b, cos[pair], sin[pair]);
  return second ? b : a;
}

}  // namespace memkv
