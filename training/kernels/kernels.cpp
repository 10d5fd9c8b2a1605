// Fused forward and backward kernels of a small Qwen3.5 on a CPU, for float and double.
//
// Each is checked against naive.py. Tensors are contiguous. Activations (type A) may be bfloat16, which halves the memory
// traffic and lets matrix products run at full speed; arithmetic (type T) is float, or double for tests.
#include <torch/extension.h>

#include "delta.h"
#include "layers.h"

using torch::Tensor;

#define FOR_HEAD_DIM(D_VALUE, ...)                                    \
  switch (D_VALUE) {                                                  \
    case 16: { constexpr int D = 16; __VA_ARGS__; break; }            \
    case 32: { constexpr int D = 32; __VA_ARGS__; break; }            \
    case 64: { constexpr int D = 64; __VA_ARGS__; break; }            \
    default: TORCH_CHECK(false, "head dim must be 16, 32 or 64");     \
  }

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
