// Short convolution with SiLU, norms, and the feed-forward gate. Shapes: B batch, N tokens or rows, C or D channels.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "simd.h"

namespace {

constexpr int kWidth = 4;

// The sum under the SiLU at one token, for all channels.
template <typename A, typename T>
inline void convolve(const A* x, const T* w, T* sum, int taps, int C) {
  std::fill(sum, sum + C, T(0));
  for (int lag = 0; lag < taps; lag++) {
    const A* in = x - int64_t(lag) * C;
    const T* tap = w + (kWidth - 1 - lag) * C;
#pragma GCC ivdep
    for (int c = 0; c < C; c++) sum[c] += tap[c] * widen(in[c]);
  }
}

template <typename A, typename T>
void conv_forward(const A* x, const T* w, T* y, int64_t B, int64_t N, int C) {
  at::parallel_for(0, B * N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      T* out = y + row * C;
      convolve(x + row * C, w, out, std::min<int64_t>(row % N + 1, kWidth), C);
#pragma GCC ivdep
      for (int c = 0; c < C; c++) out[c] = silu(out[c]);
    }
  });
}

// dw has one slice a batch row, to be summed by the caller: ranks and threads then give the same bits.
template <typename A, typename T>
void conv_backward(const A* x, const T* w, const T* dy, A* dx, T* dw, int64_t B, int64_t N, int C) {
  at::parallel_for(0, B, 1, [&](int64_t begin, int64_t end) {
    // Slopes of this token and the three after it: all that one token's input gradient needs. From the last token down.
    std::vector<T> sum(C), ring(kWidth * C);
    for (int64_t b = begin; b < end; b++) {
      for (int64_t t = N - 1; t >= 0; t--) {
        const int64_t row = b * N + t;
        const int taps = std::min<int64_t>(t + 1, kWidth);
        T *s = sum.data(), *d = ring.data() + (t % kWidth) * C;
        convolve(x + row * C, w, s, taps, C);
        const T* up = dy + row * C;
#pragma GCC ivdep
        for (int c = 0; c < C; c++) {
          const T gate = T(1) / (T(1) + std::exp(-s[c]));
          d[c] = up[c] * gate * (T(1) + s[c] * (T(1) - gate));
        }
        for (int lag = 0; lag < taps; lag++) {
          const A* in = x + (row - lag) * C;
          T* grad = dw + (b * kWidth + kWidth - 1 - lag) * C;
#pragma GCC ivdep
          for (int c = 0; c < C; c++) grad[c] += d[c] * widen(in[c]);
        }
        std::fill(s, s + C, T(0));
        for (int lag = 0; lag < kWidth && t + lag < N; lag++) {
          const T* later = ring.data() + ((t + lag) % kWidth) * C;
          const T* tap = w + (kWidth - 1 - lag) * C;
#pragma GCC ivdep
          for (int c = 0; c < C; c++) s[c] += later[c] * tap[c];
        }
        A* out = dx + row * C;
#pragma GCC ivdep
        for (int c = 0; c < C; c++) out[c] = narrow<A>(s[c]);
      }
    }
  });
}

// ---- norms and feed-forward gate --------------------------------------------------------------------------------------

// y = x / rms(x) * (offset + w), times silu(z) if there is a z.
template <typename A, typename T>
void norm_forward(const T* x, const A* z, const T* w, A* y, T* factor, int64_t N, int D, T offset, T eps) {
  at::parallel_for(0, N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* a = x + row * D;
      A* out = y + row * D;
      T s = 0;
      for (int i = 0; i < D; i++) s += a[i] * a[i];
      const T f = T(1) / std::sqrt(s / D + eps);
      factor[row] = f;
      if (z == nullptr) {
#pragma GCC ivdep
        for (int i = 0; i < D; i++) out[i] = narrow<A>(a[i] * f * (offset + w[i]));
      } else {
        const A* gate = z + row * D;
#pragma GCC ivdep
        for (int i = 0; i < D; i++) out[i] = narrow<A>(a[i] * f * (offset + w[i]) * silu(widen(gate[i])));
      }
    }
  });
}

template <typename A, typename T>
void norm_backward(const T* x, const A* z, const T* w, const T* factor, const A* dy, T* dx, A* dz, T* dw, int64_t N, int D,
                   T offset) {
  std::vector<T> scratch(D);
  T* d = scratch.data();
  for (int64_t row = 0; row < N; row++) {
    const T* a = x + row * D;
    const A* up = dy + row * D;
    const T f = factor[row];
    T mean = 0;
    if (z == nullptr) {
#pragma GCC ivdep
      for (int i = 0; i < D; i++) {
        const T u = widen(up[i]);
        dw[i] += u * a[i] * f;
        d[i] = u * (offset + w[i]);
        mean += d[i] * a[i];
      }
    } else {
      const A* gate = z + row * D;
      A* d_gate = dz + row * D;
#pragma GCC ivdep
      for (int i = 0; i < D; i++) {
        const T u = widen(up[i]), g = widen(gate[i]);
        const T open = T(1) / (T(1) + std::exp(-g));
        const T act = g * open, unit = a[i] * f;
        d_gate[i] = narrow<A>(u * unit * (offset + w[i]) * open * (T(1) + g * (T(1) - open)));
        dw[i] += u * unit * act;
        d[i] = u * act * (offset + w[i]);
        mean += d[i] * a[i];
      }
    }
    mean *= f * f / D;
    T* out = dx + row * D;
    for (int i = 0; i < D; i++) out[i] = f * (d[i] - a[i] * mean);
  }
}

template <typename A>
void swiglu_forward(const A* x, A* y, int64_t N, int D) {
  at::parallel_for(0, N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const A *gate = x + row * 2 * D, *up = gate + D;
      A* out = y + row * D;
#pragma GCC ivdep
      for (int i = 0; i < D; i++) out[i] = narrow<A>(silu(widen(gate[i])) * widen(up[i]));
    }
  });
}

template <typename A>
void swiglu_backward(const A* x, const A* dy, A* dx, int64_t N, int D) {
  using T = decltype(widen(A()));
  at::parallel_for(0, N, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const A *gate = x + row * 2 * D, *up = gate + D, *d = dy + row * D;
      A *d_gate = dx + row * 2 * D, *d_up = d_gate + D;
#pragma GCC ivdep
      for (int i = 0; i < D; i++) {
        const T g = widen(gate[i]), u = widen(d[i]);
        const T open = T(1) / (T(1) + std::exp(-g));
        d_gate[i] = narrow<A>(u * widen(up[i]) * open * (T(1) + g * (T(1) - open)));
        d_up[i] = narrow<A>(u * g * open);
      }
    }
  });
}

}  // namespace
