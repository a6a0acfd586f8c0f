// What the attention kernels share: sizes, scores, where a sequence's keys lie, and how the keys of a decode are split.
//
// Row i of a sequence is its new token i / group under query head kv_head * group + i % group, group = num_heads /
// num_kv_heads: the query heads that share a key head lie side by side, so that a block reads each key and each value
// once for all of them. Scores are in powers of 2: the weight of a key is exp2(score - largest score).
#pragma once

#include "compat.cuh"

constexpr float LOG2_E = 1.44269504f;

// The sizes of heads and blocks, the same in all of a launch.
struct Sizes {
  int num_heads, num_kv_heads, head_dim, block_size;
  __device__ int group() const { return num_heads / num_kv_heads; }
};

// How a product of query and key becomes a score.
struct Scoring {
  const float* alibi_slopes;
  float factor;  // of a product; with a cap, what tanh takes
  float cap;     // 0 for none
  int window;

  __device__ Scoring(const float* alibi_slopes, float scale, float soft_cap, int window)
      : alibi_slopes(alibi_slopes),
        factor(soft_cap > 0.0f ? scale / soft_cap : scale * LOG2_E),
        cap(soft_cap * LOG2_E),
        window(window) {}

  // Of a query head, as `score` takes it.
  __device__ float slope(int head) const { return alibi_slopes == nullptr ? 0.0f : alibi_slopes[head] * LOG2_E; }
  // distance = key position - query position.
  __device__ float score(float product, float slope, int distance) const {
    product *= factor;
    // tanh(x) = 1 - 2 / (exp(2 x) + 1), as good as tanhf to a float of 1 and much shorter.
    if (cap > 0.0f) product = cap * (1.0f - __fdividef(2.0f, exp2f(2.0f * LOG2_E * product) + 1.0f));
    return product + slope * distance;
  }
  // The first position that a query sees.
  __device__ int first_seen(int position) const { return max(0, position - window + 1); }
};

// Positions [begin, end); none where begin is not before end.
struct Range {
  int begin, end;
};

// The new tokens of one sequence and its part of the cache, under one key head.
template <class T>
struct Sequence {
  const T* query;  // of its first new token
  const int* block_table;
  long long query_stride;
  int num_queries, context_len, kv_head;

  // Of a row: its query's token and head, and how its query begins.
  __device__ int position(int row, const Sizes& sizes) const { return context_len - num_queries + row / sizes.group(); }
  __device__ int head(int row, const Sizes& sizes) const { return kv_head * sizes.group() + row % sizes.group(); }
  __device__ const T* query_of(int row, const Sizes& sizes) const {
    return query + row / sizes.group() * query_stride + head(row, sizes) * sizes.head_dim;
  }
  // The keys that some of these rows see.
  __device__ Range seen_by(int first_row, int last_row, const Sizes& sizes, const Scoring& scoring) const {
    return {scoring.first_seen(position(first_row, sizes)), position(last_row, sizes) + 1};
  }
  // Where a position's key and value lie in the caches seen as [rows, head_dim]; there are fewer rows than 2^31.
  __device__ int cache_row(int position, const Sizes& sizes) const {
    const int block = block_table[position / sizes.block_size];
    return (block * sizes.num_kv_heads + kv_head) * sizes.block_size + position % sizes.block_size;
  }
};

// The keys of one partition of a decode. Those that the query sees are split evenly into num_partitions, but into fewer
// if these were of less than least_keys: the host, which fixes the grid, does not know the lengths.
__device__ inline int keys_per_partition(int num_seen, int least_keys, int num_partitions) {
  return max(least_keys, (num_seen + num_partitions - 1) / num_partitions);
}
__device__ inline Range partition_of(int context_len, const Scoring& scoring, int partition, int least_keys,
                                     int num_partitions) {
  const int first_seen = scoring.first_seen(context_len - 1);
  const int num_keys = keys_per_partition(context_len - first_seen, least_keys, num_partitions);
  const int begin = first_seen + partition * num_keys;
  return {begin, min(context_len, begin + num_keys)};
}
