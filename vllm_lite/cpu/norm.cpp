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
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) sum += map(load(row + i));
  if (i < size) {
    Vec part = map(load_first(row + i, static_cast<int>(size - i)));
    for (int lane = static_cast<int>(size - i); lane < LANES; ++lane) part[lane] = 0.0f;
    sum += part;
  }
  return sum_of(sum);
}

// Stores map(elements, where they begin, how many) for the vectors of a row, the last one possibly shorter.
template <class T, class Map>
void map_row(const T* row, T* to, int64_t size, const Map& map) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(to + i, map(load(row + i), i, LANES));
  if (i < size) {
    const int lanes = static_cast<int>(size - i);
    store_first(to + i, map(load_first(row + i, lanes), i, lanes), lanes);
  }
}

template <class T>
void rms_norm(const Task& task, const T* x, const T* weight, T* out, double eps, int64_t num_heads, int64_t size,
              int64_t x_stride, int64_t x_head_stride, int64_t out_stride, int64_t out_head_stride) {
  for_heads(task, x, out, num_heads, x_stride, x_head_stride, out_stride, out_head_stride, [&](const T* row, T* to) {
    const float mean = sum_over(row, size, [](Vec v) { return v * v; }) / static_cast<float>(size);
    const Vec factor = splat(1.0f / std::sqrt(mean + static_cast<float>(eps)));
    map_row(row, to, size, [&](Vec v, int64_t i, int lanes) {
      // Rounded before the weight comes in, as Hugging Face's models do.
      return round_to<T>(v * factor) * load_first(weight + i, lanes);
    });
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
    map_row(row, to, size, [&](Vec v, int64_t i, int lanes) {
      const Vec result = (v - mean) * factor * load_first(weight + i, lanes);
      return bias == nullptr ? result : result + load_first(bias + i, lanes);
    });
  });
}

}  // namespace

EXPORT_TYPES(rms_norm, rms_norm)
EXPORT_TYPES(layer_norm, layer_norm)
