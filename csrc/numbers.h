// float32 arithmetic that the compiler can vectorise: bfloat16, exp, erf, tanh and the activations.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__GNUC__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE inline
#endif

// One binary for every x86-64: the loops are compiled three times, and the loader takes the widest that runs.  Not
// under a sanitizer, which the loader would call before the sanitizer is ready.  Such a function must not throw, and so not allocate: GCC
// leaves out what its callers do about an exception.
#if defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && !defined(__clang__) && __GNUC__ >= 12 && defined(__x86_64__) && defined(__linux__)
#define MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MULTIVERSION
#endif

namespace host {

using bfloat16 = uint16_t;  // its bits

ALWAYS_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

ALWAYS_INLINE float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

ALWAYS_INLINE float load(const float& x) { return x; }
ALWAYS_INLINE float load(const bfloat16& x) { return from_bits(uint32_t{x} << 16); }
ALWAYS_INLINE void store(float& to, float x) { to = x; }
ALWAYS_INLINE void store(bfloat16& to, float x) {  // to the nearest, ties to even; NaN stays NaN
  const uint32_t bits = bits_of(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
  to = static_cast<bfloat16>((x == x ? rounded : 0x7fc00000) >> 16);
}

// e^x to 1.5 ulp, for x in [-87.3, 88.3]; above inf, below 0, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial that is minimax for (e^r - 1 - r) / r^2.
ALWAYS_INLINE float exp(float exponent) {
  float x = exponent < -87.33f ? -87.33f : exponent;
  x = x > 89.0f ? 89.0f : x;
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x * 1.44269504f + shift, n = shifted - shift;
  const float r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two parts; the first times n is exact
  float p = 1.39411236e-3f;
  p = p * r + 8.36318079e-3f;
  p = p * r + 4.16663736e-2f;
  p = p * r + 1.66665763e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  return exponent < -87.33f ? 0.0f : p * from_bits((bits_of(shifted) + 127) << 23);
}

// erf(x) to 2 ulp.  Below 1 it is x times a polynomial in x^2; above, 1 - e^q with a polynomial q for log erfc;
// both are minimax.  From 4 on, erfc is below half an ulp of 1.
ALWAYS_INLINE float erf(float x) {
  const float t = x < 0 ? -x : x, s = x * x;
  float small = 7.85386146e-5f;
  small = small * s - 8.01019371e-4f;
  small = small * s + 5.18832775e-3f;
  small = small * s - 2.68538129e-2f;
  small = small * s + 1.12835854e-1f;
  small = small * s - 3.76126260e-1f;
  small = (small * s + 1.12837911f) * t;
  const float u = t > 4.0f ? 4.0f : t;
  float q = 1.85574027e-4f;
  q = q * u - 2.93960748e-3f;
  q = q * u + 2.18053181e-2f;
  q = q * u - 1.03037372e-1f;
  q = q * u - 6.38225675e-1f;
  q = q * u - 1.12704003f;
  q = q * u - 3.53719312e-4f;
  const float y = t < 1.0f ? small : 1.0f - exp(q);
  return x < 0 ? -y : y;
}

// tanh(x) to 4 ulp.  Near 0, where the difference would cancel, it is x plus a minimax polynomial.
ALWAYS_INLINE float tanh(float x) {
  const float s = x * x;
  float near = 0.01643744f;
  near = near * s - 0.05267174f;
  near = near * s + 0.13320724f;
  near = near * s - 0.33332947f;
  near = near * s * x + x;
  return s < 0.3f ? near : 2.0f / (1.0f + exp(-2.0f * x)) - 1.0f;
}

// f and its slope, and h of what f is multiplied by, as in moe_aiter/kernels/base/activations.py.
struct Identity {
  static ALWAYS_INLINE float up(float x) { return x; }
  static ALWAYS_INLINE float up_slope(float) { return 1.0f; }
};

struct Silu : Identity {
  static ALWAYS_INLINE float value(float x) { return x / (1.0f + exp(-x)); }
  static ALWAYS_INLINE void both(float x, float& value, float& slope) {
    const float sig = 1.0f / (1.0f + exp(-x));
    value = x * sig;
    slope = sig * (1.0f + x * (1.0f - sig));
  }
};

struct Gelu : Identity {
  static ALWAYS_INLINE float value(float x) { return 0.5f * x * (1.0f + erf(x * 0.707106781f)); }
  static ALWAYS_INLINE void both(float x, float& value, float& slope) {
    const float phi = 0.5f * (1.0f + erf(x * 0.707106781f));
    value = x * phi;
    slope = phi + x * exp(-0.5f * x * x) * 0.398942280f;
  }
};

struct GeluTanh : Identity {
  static constexpr float SCALE = 1.59576912f, CUBE = 0.044715f;  // 2 sqrt(2 / pi)
  static ALWAYS_INLINE float value(float x) { return x / (1.0f + exp(-SCALE * x * (1.0f + CUBE * x * x))); }
  static ALWAYS_INLINE void both(float x, float& value, float& slope) {
    const float e = exp(-SCALE * x * (1.0f + CUBE * x * x)), sig = 1.0f / (1.0f + e);
    const float rest = x > 0 ? e * sig : 1.0f - sig;  // 1 - sig, without cancellation
    value = x * sig;
    slope = sig + value * rest * SCALE * (1.0f + 3.0f * CUBE * x * x);
  }
};

struct Relu : Identity {
  static ALWAYS_INLINE float value(float x) { return x < 0 ? 0.0f : x; }
  static ALWAYS_INLINE void both(float x, float& value, float& slope) {
    value = x < 0 ? 0.0f : x;
    slope = x <= 0 ? 0.0f : 1.0f;
  }
};

struct Relu2 : Identity {
  static ALWAYS_INLINE float value(float x) { return (x < 0 ? 0.0f : x) * (x < 0 ? 0.0f : x); }
  static ALWAYS_INLINE void both(float x, float& value, float& slope) {
    const float y = x < 0 ? 0.0f : x;
    value = y * y;
    slope = 2.0f * y;
  }
};

struct SiluLimit {
  float gate_max, up_limit, alpha, up_offset;
  ALWAYS_INLINE float value(float x) const {
    const float y = x > gate_max ? gate_max : x;
    return y / (1.0f + exp(-alpha * y));
  }
  ALWAYS_INLINE void both(float x, float& value, float& slope) const {
    const float y = x > gate_max ? gate_max : x, sig = 1.0f / (1.0f + exp(-alpha * y));
    value = y * sig;
    slope = x > gate_max ? 0.0f : sig + alpha * value * (1.0f - sig);
  }
  ALWAYS_INLINE float up(float x) const {
    return (x > up_limit ? up_limit : x < -up_limit ? -up_limit : x) + up_offset;
  }
  ALWAYS_INLINE float up_slope(float x) const { return x > up_limit ? 0.0f : x < -up_limit ? 0.0f : 1.0f; }
};

struct SiluSoftcap {
  float gate_cap, up_cap;
  ALWAYS_INLINE float value(float x) const { return gate_cap * tanh(x / gate_cap) / (1.0f + exp(-x)); }
  ALWAYS_INLINE void both(float x, float& value, float& slope) const {
    const float t = tanh(x / gate_cap), sig = 1.0f / (1.0f + exp(-x));
    value = gate_cap * t * sig;
    slope = sig * (1.0f - t * t) + value * (1.0f - sig);
  }
  ALWAYS_INLINE float up(float x) const { return up_cap * tanh(x / up_cap); }
  ALWAYS_INLINE float up_slope(float x) const {
    const float t = tanh(x / up_cap);
    return 1.0f - t * t;
  }
};

}  // namespace host
