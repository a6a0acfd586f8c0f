// Writes keys and values into the slots of their tokens.
//
//   key, value    [num_tokens, num_kv_heads, head_dim], any stride over tokens
//   slot_mapping  [num_tokens], block * block_size + offset; -1 writes nothing
#include "kv_cache.h"

#include "task.h"

namespace {

template <class T>
void write_kv(const Task& task, const T* key, const T* value, const int32_t* slot_mapping, T* key_cache, T* value_cache,
              int64_t key_stride, int64_t value_stride, int64_t num_kv_heads, int64_t block_size, int64_t head_dim) {
  const CacheLayout layout{num_kv_heads, block_size, head_dim};
  const int64_t count = task.step.num_tokens * num_kv_heads;
  for (int64_t i = task.begin(count); i < task.begin(count, 1); ++i) {
    const int64_t token = i / num_kv_heads, head = i % num_kv_heads, slot = slot_mapping[token];
    if (slot < 0) continue;
    const int64_t tile = layout.tile(slot / block_size, head), offset = slot % block_size;
    const T* from_key = key + token * key_stride + head * head_dim;
    const T* from_value = value + token * value_stride + head * head_dim;
    for (int64_t d = 0; d < head_dim; d += STEP<T>)
      memcpy(key_cache + tile + layout.key_at<T>(offset, d), from_key + d, STEP<T> * sizeof(T));
    // Two tokens of a bf16 pair may be written by two threads at once: element by element, they do not meet.
    for (int64_t d = 0; d < head_dim; ++d) value_cache[tile + layout.value_at<T>(offset, d)] = from_value[d];
  }
}

}  // namespace

EXPORT_TYPES(write_kv, write_kv)
