// The choice of experts, the counting sort by expert, and rows copied, weighted and summed.  H columns, k choices
// a token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "numbers.h"

namespace host {

constexpr int64_t LANES = 16;   // of a sum: fixed, so that every width of vector adds in the same order
constexpr int64_t CHUNK = 256;  // columns that stay in the first cache as float32

constexpr int64_t TAKEN = std::numeric_limits<int64_t>::min();
constexpr int64_t FEW = 32;  // below, k looks for the highest of E are faster than a heap

// Orders as the score does, with NaN above all and -0 equal to 0, then by the lower expert.
ALWAYS_INLINE int64_t topk_key(float score, int64_t experts_after) {
  const uint32_t bits = bits_of(score), size = bits & 0x7fffffff;
  const int32_t image = score != score ? 0x7fffffff : static_cast<int32_t>(bits == size ? size : 0u - size);
  return static_cast<int64_t>(image) * (int64_t{1} << 32) + experts_after;
}

// The k highest of each row of E scores, the lower expert first among equals; see moe_aiter/kernels/rows/topk.py.
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

// Stable counting sort of `ids` (R,); see moe_aiter/kernels/rows/sort.py.  Returns the highest of them, or -1.
template <class Id>
Id sort_by_expert(const Id* ids, int32_t* order, int32_t* rank, int32_t* sizes, int64_t R, int64_t E) {
  const auto kept = [=](Id id) { return id >= 0 && static_cast<int64_t>(id) < E; };
  Id highest = -1;
  std::fill_n(sizes, E, 0);
  for (int64_t i = 0; i < R; ++i) {
    highest = std::max(highest, ids[i]);
    if (kept(ids[i])) ++sizes[ids[i]];
  }
  std::vector<int32_t> next(E);
  int32_t rows = 0;
  for (int64_t e = 0; e < E; rows += sizes[e++]) next[e] = rows;
  for (int64_t i = 0; i < R; ++i) {
    rank[i] = kept(ids[i]) ? next[ids[i]]++ : -1;
    if (rank[i] >= 0) order[rank[i]] = static_cast<int32_t>(i);
  }
  std::fill(order + rows, order + R, -1);
  return highest;
}

ALWAYS_INLINE float sum(const float* x, int64_t n) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int64_t lane = 0; lane < LANES; ++lane) lanes[lane] += x[i + lane];
  for (int64_t lane = 0; i + lane < n; ++lane) lanes[lane] += x[i + lane];
  for (int64_t half = LANES / 2; half > 0; half /= 2)
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// to[h] = w * x[h]
template <class T>
ALWAYS_INLINE void scale(const T* __restrict x, float w, T* __restrict to, int64_t H) {
  for (int64_t h = 0; h < H; ++h) store(to[h], w * load(x[h]));
}

// to[h] += w * x[h]
template <class T>
ALWAYS_INLINE void add(const T* __restrict x, float w, float* __restrict to, int64_t H) {
  for (int64_t h = 0; h < H; ++h) to[h] += w * load(x[h]);
}

// out[r] = weights[order[r]] * x[order[r] / k], for rows [begin, end)
template <class T>
MULTIVERSION static void gather(const T* x, const int32_t* order, const float* weights, T* out, int64_t begin, int64_t end,
                          int64_t H, int64_t k) {
  for (int64_t r = begin; r < end; ++r) {
    const int32_t choice = order[r];
    if (choice < 0)
      std::fill_n(out + r * H, H, T{0});
    else if (!weights)
      std::copy_n(x + choice / k * H, H, out + r * H);
    else
      scale(x + choice / k * H, weights[choice], out + r * H, H);
  }
}

// to[order[r] / k] += weights[order[r]] * rows[r], for rows [begin, end) in turn
template <class T>
MULTIVERSION static void accumulate(const T* rows, const int32_t* order, const float* weights, float* to, int64_t begin,
                              int64_t end, int64_t H, int64_t k) {
  for (int64_t r = begin; r < end; ++r) {
    if (const int32_t choice = order[r]; choice >= 0)
      add(rows + r * H, weights ? weights[choice] : 1.0f, to + choice / k * H, H);
  }
}

// out[t] = sum over j of weights[t, j] * rows[rank[t, j]], for tokens [begin, end)
template <class T>
MULTIVERSION static void unpermute(const T* rows, const int32_t* rank, const float* weights, T* out, int64_t begin,
                             int64_t end, int64_t H, int64_t k) {
  float acc[CHUNK];
  for (int64_t t = begin; t < end; ++t)
    for (int64_t first = 0; first < H; first += CHUNK) {
      const int64_t n = std::min(CHUNK, H - first);
      std::fill_n(acc, n, 0.0f);
      for (int64_t i = t * k; i < (t + 1) * k; ++i)
        if (rank[i] >= 0) add(rows + rank[i] * H + first, weights ? weights[i] : 1.0f, acc, n);
      T* const to = out + t * H + first;
      for (int64_t h = 0; h < n; ++h) store(to[h], acc[h]);
    }
}

// out[t, j] = <rows[rank[t, j]], x[t]>, for tokens [begin, end)
template <class T>
MULTIVERSION static void row_dots(const T* rows, const T* x, const int32_t* rank, float* out, int64_t begin, int64_t end,
                            int64_t H, int64_t k) {
  float products[CHUNK];
  for (int64_t i = begin * k; i < end * k; ++i) {
    out[i] = 0.0f;
    if (rank[i] < 0) continue;
    for (int64_t first = 0; first < H; first += CHUNK) {
      const int64_t n = std::min(CHUNK, H - first);
      const T *a = rows + rank[i] * H + first, *b = x + i / k * H + first;
      for (int64_t h = 0; h < n; ++h) products[h] = load(a[h]) * load(b[h]);
      out[i] += sum(products, n);
    }
  }
}

// sums[h] += weights[order[r]] * rows[r, h], over rows [0, n) in turn, for columns [begin, end)
template <class T>
MULTIVERSION static void column_sums(const T* rows, const int32_t* order, const float* weights, float* sums, int64_t n,
                               int64_t begin, int64_t end, int64_t H) {
  for (int64_t r = 0; r < n; ++r)
    add(rows + r * H + begin, weights ? weights[order[r]] : 1.0f, sums + begin, end - begin);
}

}  // namespace host
