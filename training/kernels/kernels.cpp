// Fused forward and backward kernels of a small Qwen3.5 on a CPU, for float and double.
//
// Each is checked against naive.py. Tensors are contiguous. Activations (type A) may be bfloat16, which halves the memory
// traffic and lets matrix products run at full speed; arithmetic (type T) is float, or double for tests.
#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

using torch::Tensor;

namespace {

constexpr int kChunk = 32;  // A state is kept every kChunk tokens; the backward pass rebuilds those between.
constexpr double kL2Eps = 1e-6;

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

// ---- gated delta rule -------------------------------------------------------------------------------------------------

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
    Tensor scratch = torch::empty({(kChunk + 2) * D * D}, torch::CppTypeToScalarType<T>::value);
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

#define FOR_HEAD_DIM(D_VALUE, ...)                                    \
  switch (D_VALUE) {                                                  \
    case 16: { constexpr int D = 16; __VA_ARGS__; break; }            \
    case 32: { constexpr int D = 32; __VA_ARGS__; break; }            \
    case 64: { constexpr int D = 64; __VA_ARGS__; break; }            \
    default: TORCH_CHECK(false, "head dim must be 16, 32 or 64");     \
  }

// ---- short convolution and SiLU ---------------------------------------------------------------------------------------

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

// ---- what Python calls ------------------------------------------------------------------------------------------------

#define DISPATCH(TENSOR, NAME, ...) AT_DISPATCH_FLOATING_TYPES((TENSOR).scalar_type(), NAME, [&] { __VA_ARGS__; })
#define PTR(TENSOR) (TENSOR).data_ptr<scalar_t>()

std::vector<Tensor> gated_delta_forward(Tensor mixed, Tensor log_decay, Tensor beta) {
  const int64_t B = mixed.size(0), N = mixed.size(1), H = beta.size(2), dim = mixed.size(2) / (3 * H);
  auto out = torch::empty({B, N, H * dim}, mixed.options());
  auto kept = torch::empty({B * H, (N + kChunk - 1) / kChunk, dim * dim}, mixed.options());
  DISPATCH(mixed, "gated_delta_forward",
           FOR_HEAD_DIM(dim, delta_forward<scalar_t, D>(PTR(mixed), PTR(log_decay), PTR(beta), PTR(out), PTR(kept), B,
                                                             N, H)));
  return {out, kept};
}

std::vector<Tensor> gated_delta_backward(Tensor mixed, Tensor log_decay, Tensor beta, Tensor kept, Tensor d_out) {
  const int64_t B = mixed.size(0), N = mixed.size(1), H = beta.size(2), dim = mixed.size(2) / (3 * H);
  auto d_mixed = torch::empty_like(mixed), d_g = torch::empty_like(log_decay), d_beta = torch::empty_like(beta);
  DISPATCH(mixed, "gated_delta_backward",
           FOR_HEAD_DIM(dim, delta_backward<scalar_t, D>(PTR(mixed), PTR(log_decay), PTR(beta), PTR(kept), PTR(d_out),
                                                              PTR(d_mixed), PTR(d_g), PTR(d_beta), B, N, H)));
  return {d_mixed, d_g, d_beta};
}

// Calls BODY with A the activations' type and T the arithmetic's.
#define WITH_TYPES(ACTIVATION, BODY)                                                     \
  switch ((ACTIVATION).scalar_type()) {                                                  \
    case torch::kDouble: { using A = double; using T = double; BODY; break; }            \
    case torch::kFloat: { using A = float; using T = float; BODY; break; }               \
    case torch::kBFloat16: { using A = c10::BFloat16; using T = float; BODY; break; }    \
    default: TORCH_CHECK(false, "activations must be double, float or bfloat16");        \
  }
#define ACT(TENSOR) (TENSOR).data_ptr<A>()
#define ACT_OR_NULL(TENSOR) ((TENSOR).numel() ? (TENSOR).data_ptr<A>() : nullptr)
#define NUM(TENSOR) (TENSOR).data_ptr<T>()

Tensor short_conv_forward(Tensor x, Tensor taps) {
  auto y = torch::empty(x.sizes(), taps.options());
  WITH_TYPES(x, (conv_forward<A, T>(ACT(x), NUM(taps), NUM(y), x.size(0), x.size(1), x.size(2))));
  return y;
}

std::vector<Tensor> short_conv_backward(Tensor x, Tensor taps, Tensor dy) {
  auto dx = torch::empty_like(x);
  auto dw = torch::zeros({x.size(0), kWidth, x.size(2)}, taps.options());
  WITH_TYPES(x, (conv_backward<A, T>(ACT(x), NUM(taps), NUM(dy), ACT(dx), NUM(dw), x.size(0), x.size(1), x.size(2))));
  return {dx, dw.sum(0)};
}

// `z` decides the type of the output; without elements it is no gate.
std::vector<Tensor> rms_norm_forward(Tensor x, Tensor z, Tensor w, double offset, double eps) {
  const int64_t D = w.size(0), N = x.numel() / D;
  auto y = torch::empty(x.sizes(), z.options()), factor = torch::empty({N}, x.options());
  WITH_TYPES(z, (norm_forward<A, T>(NUM(x), ACT_OR_NULL(z), NUM(w), ACT(y), NUM(factor), N, D, offset, eps)));
  return {y, factor};
}

std::vector<Tensor> rms_norm_backward(Tensor x, Tensor z, Tensor w, Tensor factor, Tensor dy, double offset) {
  const int64_t D = w.size(0), N = x.numel() / D;
  auto dx = torch::empty_like(x), dz = torch::empty_like(z), dw = torch::zeros_like(w);
  WITH_TYPES(z, (norm_backward<A, T>(NUM(x), ACT_OR_NULL(z), NUM(w), NUM(factor), ACT(dy), NUM(dx), ACT_OR_NULL(dz),
                                     NUM(dw), N, D, offset)));
  return {dx, dz, dw};
}

Tensor swiglu_forward_op(Tensor x) {
  const int64_t D = x.size(-1) / 2, N = x.numel() / (2 * D);
  auto shape = x.sizes().vec();
  shape.back() = D;
  auto y = torch::empty(shape, x.options());
  WITH_TYPES(x, (swiglu_forward<A>(ACT(x), ACT(y), N, D), void(T())));
  return y;
}

Tensor swiglu_backward_op(Tensor x, Tensor dy) {
  const int64_t D = x.size(-1) / 2, N = x.numel() / (2 * D);
  auto dx = torch::empty_like(x);
  WITH_TYPES(x, (swiglu_backward<A>(ACT(x), ACT(dy), ACT(dx), N, D), void(T())));
  return dx;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gated_delta_forward", &gated_delta_forward);
  m.def("gated_delta_backward", &gated_delta_backward);
  m.def("short_conv_forward", &short_conv_forward);
  m.def("short_conv_backward", &short_conv_backward);
  m.def("rms_norm_forward", &rms_norm_forward);
  m.def("rms_norm_backward", &rms_norm_backward);
  m.def("swiglu_forward", &swiglu_forward_op);
  m.def("swiglu_backward", &swiglu_backward_op);
}
