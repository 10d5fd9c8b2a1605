// What all kernels share: vectors of 64 bytes, and numbers that may be bfloat16 in memory.
#pragma once

#include <c10/util/BFloat16.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

template <typename T>
struct Simd {
  static constexpr int lanes = 64 / sizeof(T);
  typedef T Vec __attribute__((vector_size(64)));
};

template <typename T>
inline typename Simd<T>::Vec splat(T x) {
  typename Simd<T>::Vec v = {};
  return v + x;
}

template <typename T>
inline T sum_of(typename Simd<T>::Vec v) {
  T s = 0;
  for (int i = 0; i < Simd<T>::lanes; i++) s += v[i];
  return s;
}

template <typename T>
inline T silu(T x) {
  return x / (T(1) + std::exp(-x));
}

inline float widen(c10::BFloat16 x) {
  const uint32_t bits = uint32_t(x.x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

// Round to nearest even, without the branch for NaN that would keep loops from being vectorised.
template <typename A, typename T>
inline A narrow(T x) {
  if constexpr (std::is_same_v<A, c10::BFloat16>) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return c10::BFloat16(uint16_t(bits), c10::BFloat16::from_bits());
  } else {
    return x;
  }
}

}  // namespace
