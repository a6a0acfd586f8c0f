// out[t] = the activation of x[t], computed in float32. out may be x.
//
//   x, out  [num_tokens, size], any stride over tokens
//   kind    an Activation
#include "task.h"
#include "vector.h"

namespace {

// As in ops/activation.py.
enum Activation { RELU, GELU, GELU_TANH, QUICK_GELU };

// To 2e-7: formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
INLINE Vec erf_of(Vec x) {
  const Vec magnitude = x < 0.0f ? -x : x;
  const Vec t = 1.0f / fma(magnitude, splat(0.3275911f), splat(1.0f));
  Vec p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const Vec result = 1.0f - p * t * exp_of(-magnitude * magnitude);
  return x < 0.0f ? -result : result;
}

INLINE Vec activated(Vec x, int64_t kind) {
  if (kind == RELU) return x < 0.0f ? Vec{} : x;  // NaN stays NaN
  if (kind == GELU) return 0.5f * x * (1.0f + erf_of(0.707106781f * x));
  // 0.5 * (1 + tanh(y)) is the sigmoid of 2 * y.
  const Vec y = kind == GELU_TANH ? 2.0f * 0.797884561f * (x + 0.044715f * x * x * x) : 1.702f * x;
  const Vec small = exp_of(y < 0.0f ? y : -y);
  return x * ((y < 0.0f ? small : splat(1.0f)) / (1.0f + small));
}

template <class T>
void activate(const Task& task, const T* x, T* out, int64_t x_stride, int64_t out_stride, int64_t size, int64_t kind) {
  for (int64_t t = task.begin(task.step.num_tokens); t < task.begin(task.step.num_tokens, 1); ++t)
    for (int64_t i = 0; i < size; i += LANES) {
      const int lanes = size - i < LANES ? static_cast<int>(size - i) : LANES;
      store_first(out + t * out_stride + i, activated(load_first(x + t * x_stride + i, lanes), kind), lanes);
    }
}

}  // namespace

EXPORT_TYPES(activate, activate)
