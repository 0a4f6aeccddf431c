// The activation between an expert's two products, and its gradient.  I channels; see moe_aiter/kernels/experts/glu.py.
#pragma once

#include "rows.h"

namespace host {

enum class Layout { plain, halves, pairs };  // of a row of z: no gate; gates then ups; gate, up, gate, up

template <class F, Layout layout, class T>
ALWAYS_INLINE void glu_rows(F f, const T* z, T* out, int64_t begin, int64_t end, int64_t I) {
  constexpr int64_t step = layout == Layout::pairs ? 2 : 1, parts = layout == Layout::plain ? 1 : 2;
  for (int64_t r = begin; r < end; ++r) {
    const T* __restrict gate = z + r * parts * I;
    const T* __restrict up = gate + (layout == Layout::pairs ? 1 : I);
    T* __restrict to = out + r * I;
    for (int64_t i = 0; i < I; ++i) {
      float a = f.value(load(gate[i * step]));
      if constexpr (parts == 2) a *= f.up(load(up[i * step]));
      store(to[i], a);
    }
  }
}

// What the gradient of one block of rows reads and writes; `order` gives a row its weight and its place in dweights.
template <class T>
struct GluGradient {
  const T* dout;         // (n, I) the gradient of the unweighted output
  const T* z;            // (n, parts * I)
  T* dz;                 // (n, parts * I)
  const int32_t* order;  // (n,) or none: every weight is 1, and nothing below is written
  const float* weights;  // (R,) by choice
  T* weighted;           // (n, I) weight * activation
  float* dweights;       // (R,) by choice: <dout, activation>
};

// At most CHUNK channels of one row, `step` elements of z apart.  The pointers are arguments because only there does
// __restrict hold for every compiler, and without it this loop is not vectorised.
template <class F, bool gated, bool weighted, int64_t step, class T, class D>
ALWAYS_INLINE void glu_gradient_chunk(F f, const T* __restrict dout, const T* __restrict gate, const T* __restrict up,
                                      D* __restrict dgate, D* __restrict dup, T* __restrict a,
                                      float* __restrict products, float w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    float value, slope;
    f.both(load(gate[i * step]), value, slope);
    const float da = load(dout[i]), dwa = w * da;
    if constexpr (gated) {
      const float x = load(up[i * step]), other = f.up(x);
      store(dup[i], dwa * value * f.up_slope(x));
      value *= other;
      slope *= other;
    }
    store(dgate[i], dwa * slope);
    if constexpr (weighted) {
      store(a[i], w * value);
      products[i] = da * value;
    }
  }
}

template <class F, Layout layout, bool weighted, class T>
ALWAYS_INLINE void glu_gradient_rows(F f, const GluGradient<T>& g, int64_t begin, int64_t end, int64_t I) {
  constexpr int64_t step = layout == Layout::pairs ? 2 : 1, parts = layout == Layout::plain ? 1 : 2;
  constexpr bool gated = parts == 2;
  float products[CHUNK], dgate[CHUNK], dup[CHUNK];
  for (int64_t r = begin; r < end; ++r) {
    const float w = weighted ? g.weights[g.order[r]] : 1.0f;
    float dot = 0.0f;
    for (int64_t first = 0; first < I; first += CHUNK) {
      const int64_t n = std::min(CHUNK, I - first), at = r * parts * I + first * step;
      const T *dout = g.dout + r * I + first, *z = g.z + at;
      T *a = weighted ? g.weighted + r * I + first : nullptr, *dz = g.dz + at;
      if constexpr (layout == Layout::pairs) {
        glu_gradient_chunk<F, gated, weighted, step>(f, dout, z, z + 1, dgate, dup, a, products, w, n);
        for (int64_t i = 0; i < n; ++i) {
          store(dz[2 * i], dgate[i]);
          store(dz[2 * i + 1], dup[i]);
        }
      } else {
        glu_gradient_chunk<F, gated, weighted, step>(f, dout, z, z + I, dz, dz + I, a, products, w, n);
      }
      if constexpr (weighted) dot += sum(products, n);
    }
    if constexpr (weighted) g.dweights[g.order[r]] = dot;
  }
}

template <class F, class T>
MULTIVERSION static void glu(F f, Layout layout, const T* z, T* out, int64_t begin, int64_t end, int64_t I) {
  if (layout == Layout::plain) glu_rows<F, Layout::plain>(f, z, out, begin, end, I);
  if (layout == Layout::halves) glu_rows<F, Layout::halves>(f, z, out, begin, end, I);
  if (layout == Layout::pairs) glu_rows<F, Layout::pairs>(f, z, out, begin, end, I);
}

template <class F, bool weighted, class T>
MULTIVERSION static void glu_gradient(F f, Layout layout, const GluGradient<T>& g, int64_t begin, int64_t end,
                                      int64_t I) {
  if (layout == Layout::plain) glu_gradient_rows<F, Layout::plain, weighted>(f, g, begin, end, I);
  if (layout == Layout::halves) glu_gradient_rows<F, Layout::halves, weighted>(f, g, begin, end, I);
  if (layout == Layout::pairs) glu_gradient_rows<F, Layout::pairs, weighted>(f, g, begin, end, I);
}

}  // namespace host
