// Rotary positions: turns elements (i, i + num_pairs) of every head in place by the angle of its token's position.
//
//   heads      [num_tokens, num_heads, head_dim], any stride over tokens; elements from 2 * num_pairs on stay
//   positions  [num_tokens]
//   cos_sin    [max_model_len, 2 * num_pairs]: cosines, then sines
#include "task.h"
#include "vector.h"

namespace {

template <class T>
void rotary(const Task& task, T* heads, const int32_t* positions, const float* cos_sin, int64_t stride,
            int64_t num_heads, int64_t head_dim, int64_t num_pairs) {
  for (int64_t t = task.begin(task.step.num_tokens); t < task.begin(task.step.num_tokens, 1); ++t) {
    const float* angles = cos_sin + positions[t] * 2 * num_pairs;
    for (int64_t h = 0; h < num_heads; ++h) {
      T* first = heads + t * stride + h * head_dim;
      T* second = first + num_pairs;
      for (int64_t i = 0; i < num_pairs; i += LANES) {
        const int lanes = num_pairs - i < LANES ? static_cast<int>(num_pairs - i) : LANES;
        const Vec cosine = load_first(angles + i, lanes), sine = load_first(angles + num_pairs + i, lanes);
        const Vec a = load_first(first + i, lanes), b = load_first(second + i, lanes);
        store_first(first + i, a * cosine - b * sine, lanes);
        store_first(second + i, b * cosine + a * sine, lanes);
      }
    }
  }
}

}  // namespace

EXPORT_TYPES(rotary, rotary)
