// How a block of the cache lies in memory. For one KV head:
//
//   keys    float [head_dim][block_size],     bf16 [head_dim / 2][block_size][2]
//   values  float [block_size][head_dim],     bf16 [block_size / 2][head_dim][2]
//
// Scores are then products with 16 keys side by side, and outputs are products with the values of consecutive tokens.
#pragma once

#include "vector.h"

struct CacheLayout {
  int64_t num_kv_heads, block_size, head_dim;

  // Where a block of a head begins, in elements.
  int64_t tile(int64_t block, int64_t head) const { return (block * num_kv_heads + head) * block_size * head_dim; }

  template <class T>
  int64_t key_at(int64_t offset, int64_t dim) const {
    return dim / STEP<T> * block_size * STEP<T> + offset * STEP<T> + dim % STEP<T>;
  }
  template <class T>
  int64_t value_at(int64_t offset, int64_t dim) const {
    return offset / STEP<T> * head_dim * STEP<T> + dim * STEP<T> + offset % STEP<T>;
  }
};
