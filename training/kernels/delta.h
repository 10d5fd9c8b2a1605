// The gated delta rule, forward and backward. Shapes: B batch, N tokens, H heads of dim D.
#pragma once

#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr int kChunk = 32;  // A state is kept every kChunk tokens; the backward pass rebuilds those between.
constexpr double kL2Eps = 1e-6;

// unit = x / sqrt(|x|^2 + eps); returns the factor.
template <typename T, int D>
inline T normalise(const T* x, T* unit) {
  T s = 0;
  for (int i = 0; i < D; i++) s += x[i] * x[i];
  const T factor = T(1) / std::sqrt(s + T(kL2Eps));
  for (int i = 0; i < D; i++) unit[i] = x[i] * factor;
  return factor;
}

// One head's state and one token: next = a * state + k u^T with u = beta (v - a k^T state). May run in place.
// `error` receives v - a k^T state, `out` (if given) q^T next.
template <typename T, int D>
inline void step(const T* state, T* next, const T* q, const T* k, const T* v, T a, T beta, T* u, T* error, T* out) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int n = D / S::lanes;
  Vec recalled[n] = {}, read[n] = {};
  T qk = 0;
  for (int i = 0; i < D; i++) qk += q[i] * k[i];
  for (int i = 0; i < D; i++) {
    const Vec* row = reinterpret_cast<const Vec*>(state + i * D);
    for (int j = 0; j < n; j++) {
      recalled[j] += row[j] * k[i];
      read[j] += row[j] * q[i];
    }
  }
  const Vec* value = reinterpret_cast<const Vec*>(v);
  Vec write[n];
  for (int j = 0; j < n; j++) {
    const Vec e = value[j] - recalled[j] * a;
    write[j] = e * beta;
    reinterpret_cast<Vec*>(error)[j] = e;
    reinterpret_cast<Vec*>(u)[j] = write[j];
  }
  if (out != nullptr) {
    for (int j = 0; j < n; j++) reinterpret_cast<Vec*>(out)[j] = read[j] * a + write[j] * qk;
  }
  for (int i = 0; i < D; i++) {
    const Vec* row = reinterpret_cast<const Vec*>(state + i * D);
    Vec* target = reinterpret_cast<Vec*>(next + i * D);
    for (int j = 0; j < n; j++) target[j] = row[j] * a + write[j] * k[i];
  }
}

template <typename T, int D>
struct Token {  // One token's operands of one head, aligned.
  alignas(64) T q[D], k[D], v[D], u[D], error[D];
  T q_factor, k_factor, a, beta;

  void load(const T* mixed, int heads, int head, T log_decay, T strength) {
    q_factor = normalise<T, D>(mixed + head * D, q);
    k_factor = normalise<T, D>(mixed + (heads + head) * D, k);
    std::memcpy(v, mixed + (2 * heads + head) * D, sizeof(v));
    const T scale = T(1) / std::sqrt(T(D));
    for (int i = 0; i < D; i++) q[i] *= scale;
    a = std::exp(log_decay);
    beta = strength;
  }
};

template <typename T, int D>
void delta_forward(const T* mixed, const T* log_decay, const T* beta, T* out, T* kept, int64_t B, int64_t N, int H) {
  const int64_t chunks = (N + kChunk - 1) / kChunk;
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    alignas(64) T state[D * D];
    alignas(64) T read[D];
    Token<T, D> token;
    for (int64_t bh = begin; bh < end; bh++) {
      const int64_t b = bh / H, h = bh % H;
      std::memset(state, 0, sizeof(state));
      for (int64_t t = 0; t < N; t++) {
        if (t % kChunk == 0) std::memcpy(kept + (bh * chunks + t / kChunk) * D * D, state, sizeof(state));
        const int64_t at = (b * N + t) * H + h;
        token.load(mixed + (b * N + t) * 3 * H * D, H, h, log_decay[at], beta[at]);
        step<T, D>(state, state, token.q, token.k, token.v, token.a, token.beta, token.u, token.error, read);
        std::memcpy(out + at * D, read, sizeof(read));
      }
    }
  });
}

// Gradient of a vector's normalisation: (d - unit (unit . d)) * factor.
template <typename T, int D>
inline void normalise_backward(const T* unit, const T* d, T factor, T* out) {
  T dot = 0;
  for (int i = 0; i < D; i++) dot += unit[i] * d[i];
  for (int i = 0; i < D; i++) out[i] = (d[i] - unit[i] * dot) * factor;
}

// One token backwards. `d_state` enters as dL/d(state after), leaves as dL/d(state before).
template <typename T, int D>
inline void step_backward(const T* state, Token<T, D>& x, const T* d_out, T* d_state, T* d_mixed, int H, int h, T* d_g,
                          T* d_beta) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int n = D / S::lanes;
  alignas(64) T d_read[D], dq[D], dk[D];
  std::memcpy(d_read, d_out, sizeof(d_read));
  const Vec* dO = reinterpret_cast<const Vec*>(d_read);
  const Vec* u = reinterpret_cast<const Vec*>(x.u);
  Vec du[n] = {}, write_dot = {};
  for (int j = 0; j < n; j++) write_dot += u[j] * dO[j];
  const T u_dot = sum_of<T>(write_dot);
  for (int i = 0; i < D; i++) {
    const Vec* s = reinterpret_cast<const Vec*>(state + i * D);
    Vec* d = reinterpret_cast<Vec*>(d_state + i * D);
    Vec read = {};
    for (int j = 0; j < n; j++) {
      d[j] += dO[j] * x.q[i];
      du[j] += d[j] * x.k[i];
      read += s[j] * dO[j];
    }
    dq[i] = x.a * sum_of<T>(read) + x.k[i] * u_dot;
  }
  Vec w[n], d_strength = {}, d_decay = {};
  for (int j = 0; j < n; j++) {
    d_strength += du[j] * reinterpret_cast<const Vec*>(x.error)[j];
    w[j] = du[j] * x.beta;
  }
  *d_beta = sum_of<T>(d_strength);
  std::memcpy(d_mixed + (2 * H + h) * D, w, sizeof(w));
  for (int i = 0; i < D; i++) {
    const Vec* s = reinterpret_cast<const Vec*>(state + i * D);
    Vec* d = reinterpret_cast<Vec*>(d_state + i * D);
    Vec key = {};
    for (int j = 0; j < n; j++) {
      const Vec before = s[j] * x.a;
      key += d[j] * u[j] - before * w[j];
      const Vec rest = d[j] - w[j] * x.k[i];
      d_decay += rest * before;
      d[j] = rest * x.a;
    }
    dk[i] = sum_of<T>(key);
  }
  *d_g = sum_of<T>(d_decay);
  const T scale = T(1) / std::sqrt(T(D));
  for (int i = 0; i < D; i++) {
    x.q[i] /= scale;
    dq[i] *= scale;
  }
  normalise_backward<T, D>(x.q, dq, x.q_factor, d_mixed + h * D);
  normalise_backward<T, D>(x.k, dk, x.k_factor, d_mixed + (H + h) * D);
}

template <typename T, int D>
void delta_backward(const T* mixed, const T* log_decay, const T* beta, const T* kept, const T* d_out, T* d_mixed, T* d_g,
                    T* d_beta, int64_t B, int64_t N, int H) {
  const int64_t chunks = (N + kChunk - 1) / kChunk;
  at::parallel_for(0, B * H, 1, [&](int64_t begin, int64_t end) {
    torch::Tensor scratch = torch::empty({(kChunk + 2) * D * D}, torch::CppTypeToScalarType<T>::value);
    T* states = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(scratch.data_ptr<T>()) + 63) & ~uintptr_t(63));
    std::vector<Token<T, D>> tokens(kChunk);
    alignas(64) T d_state[D * D];
    for (int64_t bh = begin; bh < end; bh++) {
      const int64_t b = bh / H, h = bh % H;
      std::memset(d_state, 0, sizeof(d_state));
      for (int64_t c = chunks - 1; c >= 0; c--) {
        const int64_t first = c * kChunk;
        const int count = std::min<int64_t>(kChunk, N - first);
        std::memcpy(states, kept + (bh * chunks + c) * D * D, sizeof(T) * D * D);
        for (int i = 0; i < count; i++) {
          const int64_t at = (b * N + first + i) * H + h;
          Token<T, D>& x = tokens[i];
          x.load(mixed + (b * N + first + i) * 3 * H * D, H, h, log_decay[at], beta[at]);
          step<T, D>(states + i * D * D, states + (i + 1) * D * D, x.q, x.k, x.v, x.a, x.beta, x.u, x.error, nullptr);
        }
        for (int i = count - 1; i >= 0; i--) {
          const int64_t at = (b * N + first + i) * H + h;
          step_backward<T, D>(states + i * D * D, tokens[i], d_out + at * D, d_state,
                              d_mixed + (b * N + first + i) * 3 * H * D, H, h, d_g + at, d_beta + at);
        }
      }
    }
  });
}

}  // namespace
