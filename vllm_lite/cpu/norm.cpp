// Normalisation over the last dimension, in float32.
//
//   x, out        [num_tokens, num_heads, size], any strides over tokens and heads; out may be x
//   weight, bias  [size]; the bias may be null
#include <cmath>

#include "task.h"
#include "vector.h"

namespace {

// Calls each(x, out) for all heads of this thread's tokens.
template <class T, class Each>
void for_heads(const Task& task, const T* x, T* out, int64_t num_heads, int64_t x_stride, int64_t x_head_stride,
               int64_t out_stride, int64_t out_head_stride, const Each& each) {
  for (int64_t t = task.begin(task.step.num_tokens); t < task.begin(task.step.num_tokens, 1); ++t)
    for (int64_t head = 0; head < num_heads; ++head)
      each(x + t * x_stride + head * x_head_stride, out + t * out_stride + head * out_head_stride);
}

// Sum of map(element) over a row; lanes beyond its end add nothing.
template <class T, class Map>
float sum_over(const T* row, int64_t size, const Map& map) {
  Vec sum{};
  for (int64_t i = 0; i < size; i += LANES) {
    const int lanes = size - i < LANES ? static_cast<int>(size - i) : LANES;
    Vec part = map(load_first(row + i, lanes));
    for (int lane = lanes; lane < LANES; ++lane) part[lane] = 0.0f;
    sum += part;
  }
  return sum_of(sum);
}

template <class T>
void rms_norm(const Task& task, const T* x, const T* weight, T* out, double eps, int64_t num_heads, int64_t size,
              int64_t x_stride, int64_t x_head_stride, int64_t out_stride, int64_t out_head_stride) {
  for_heads(task, x, out, num_heads, x_stride, x_head_stride, out_stride, out_head_stride, [&](const T* row, T* to) {
    const float mean = sum_over(row, size, [](Vec v) { return v * v; }) / static_cast<float>(size);
    const Vec factor = splat(1.0f / std::sqrt(mean + static_cast<float>(eps)));
    for (int64_t i = 0; i < size; i += LANES) {
      const int lanes = size - i < LANES ? static_cast<int>(size - i) : LANES;
      // Rounded before the weight comes in, as Hugging Face's models do.
      const Vec normed = round_to<T>(load_first(row + i, lanes) * factor);
      store_first(to + i, normed * load_first(weight + i, lanes), lanes);
    }
  });
}

template <class T>
void layer_norm(const Task& task, const T* x, const T* weight, const T* bias, T* out, double eps, int64_t num_heads,
                int64_t size, int64_t x_stride, int64_t x_head_stride, int64_t out_stride, int64_t out_head_stride) {
  for_heads(task, x, out, num_heads, x_stride, x_head_stride, out_stride, out_head_stride, [&](const T* row, T* to) {
    const float count = static_cast<float>(size);
    const Vec mean = splat(sum_over(row, size, [](Vec v) { return v; }) / count);
    const float variance = sum_over(row, size, [&](Vec v) { return (v - mean) * (v - mean); }) / count;
    const Vec factor = splat(1.0f / std::sqrt(variance + static_cast<float>(eps)));
    for (int64_t i = 0; i < size; i += LANES) {
      const int lanes = size - i < LANES ? static_cast<int>(size - i) : LANES;
      Vec result = (load_first(row + i, lanes) - mean) * factor * load_first(weight + i, lanes);
      if (bias != nullptr) result += load_first(bias + i, lanes);
      store_first(to + i, result, lanes);
    }
  });
}

}  // namespace

EXPORT_TYPES(rms_norm, rms_norm)
EXPORT_TYPES(layer_norm, layer_norm)
