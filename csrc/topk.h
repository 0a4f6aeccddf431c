// The k highest of each row of E scores, the lower expert first among equals; see moe_aiter/kernels/rows/topk.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "numbers.h"

namespace host {

constexpr int64_t TAKEN = std::numeric_limits<int64_t>::min();
constexpr int64_t FEW = 32;  // below, k looks for the highest of E are faster than a heap

// Orders as the score does, with NaN above all and -0 equal to 0, then by the lower expert.
ALWAYS_INLINE int64_t topk_key(float score, int64_t experts_after) {
  const uint32_t bits = bits_of(score), size = bits & 0x7fffffff;
  const int32_t image = score != score ? 0x7fffffff : static_cast<int32_t>(bits == size ? size : 0u - size);
  return static_cast<int64_t>(image) * (int64_t{1} << 32) + experts_after;
}

// For rows [begin, end); `keys` (E,) is scratch.
template <class T>
MULTIVERSION static void topk(const T* scores, T* values, int64_t* ids, int64_t* keys, int64_t begin, int64_t end,
                              int64_t E, int64_t k) {
  for (int64_t t = begin; t < end; ++t) {
    const T* const row = scores + t * E;
    for (int64_t e = 0; e < E; ++e) keys[e] = topk_key(load(row[e]), E - 1 - e);
    if (k > FEW) std::partial_sort(keys, keys + k, keys + E, std::greater<int64_t>());
    for (int64_t j = 0; j < k; ++j) {
      int64_t best = keys[j];
      if (k <= FEW) {
        best = TAKEN;
        for (int64_t e = 0; e < E; ++e) best = std::max(best, keys[e]);
      }
      const int64_t expert = E - 1 - (best & 0xffffffff);
      if (k <= FEW) keys[expert] = TAKEN;
      ids[t * k + j] = expert;
      values[t * k + j] = row[expert];
    }
  }
}

}  // namespace host
