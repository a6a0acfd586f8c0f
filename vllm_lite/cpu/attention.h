// Attention of new tokens over the paged cache (`kv_cache.h`), softmax in float32.
//
// A row is one new token under one query head; the rows of a sequence under one KV head are its tokens times the
// num_heads / num_kv_heads query heads that share it, in this order. Keys are taken in partitions of 256, at fixed
// positions of the sequence: a row has its own softmax in each, and the results are merged in order. Decodes give single
// partitions to threads, prompt chunks give tiles of rows, and the arithmetic of a row is the same in both, so its bits
// do not depend on how its prompt was cut, on its neighbours, or on the number of threads.
//
//   query, out              [num_tokens, num_heads, head_dim], any stride over tokens
//   query_starts            [num_seqs + 1]
//   context_lens            [num_seqs], the new tokens included; 0: the sequence is left alone
//   block_tables            [num_seqs, any], table_stride apart, valid as far as the context reaches
//   alibi_slopes            [num_heads], or null
//   window                  a query sees itself and the window - 1 tokens before it
//   soft_cap                0 for none
//   partials                results of partitions, partials_size floats
//
// Slots beyond a context may hold anything, NaN included.
//
// A header, so that the compiler works on the two dtypes at the same time.
#pragma once

#include <algorithm>

#include "kv_cache.h"
#include "linear.h"
#include "task.h"

namespace {

constexpr int64_t PARTITION = 256;
constexpr int64_t TILE_ROWS = 48;
// From one row's scores to the next one's: rows a power of 2 apart would fall on the same few lines of the nearest cache.
constexpr int64_t ROW_STRIDE = PARTITION + 32;
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t NEAREST_CACHE_BYTES = 32 * 1024;
constexpr int64_t MAX_BLOCK_SIZE = 32;
// With so many rows it pays to bring a partition's keys and values together first.
constexpr int64_t ROWS_WORTH_GATHERING = 3 * MAX_ROWS;

int64_t padded(int64_t size) { return (size + COLUMNS - 1) / COLUMNS * COLUMNS; }

// What all rows of a call have in common.
template <class T>
struct Call {
  const T* query;
  const T* key_cache;
  const T* value_cache;
  const int32_t* block_tables;
  const float* alibi_slopes;
  T* out;
  int64_t query_stride, out_stride, table_stride, num_heads, window;
  CacheLayout layout;
  float scale, soft_cap;

  int64_t group() const { return num_heads / layout.num_kv_heads; }
  int64_t out_size() const { return padded(layout.head_dim); }
  int64_t first_seen(int64_t position) const { return std::max<int64_t>(0, position - window + 1); }
};

// Rows [first_row, first_row + num_rows) of one sequence under one KV head, TILE_ROWS at most.
struct Tile {
  const int32_t* block_table;
  int64_t first_token;  // of the sequence, among the step's
  int64_t num_queries, context_len, kv_head, first_row, num_rows;

  int64_t position(int64_t row, int64_t group) const { return context_len - num_queries + (first_row + row) / group; }
};

// A thread's memory for one tile.
template <class T>
struct Scratch {
  alignas(64) float widened[TILE_ROWS * MAX_HEAD_DIM];         // queries, where products take floats
  alignas(64) T queries[TILE_ROWS * MAX_HEAD_DIM];             // side by side
  alignas(64) float scores[TILE_ROWS * ROW_STRIDE];
  alignas(64) Operand<T> weights[TILE_ROWS * ROW_STRIDE];       // exp(score - max)
  alignas(64) float outs[TILE_ROWS * MAX_HEAD_DIM];            // of one partition
  alignas(64) float merged[TILE_ROWS * MAX_HEAD_DIM];
  alignas(64) T last_values[MAX_BLOCK_SIZE * MAX_HEAD_DIM];    // a block whose end is not part of the context
  alignas(64) Operand<T> panels[PARTITION * MAX_HEAD_DIM];     // keys or values, where many rows take them
  float max[TILE_ROWS], sum[TILE_ROWS];                        // of one partition
  float merged_max[TILE_ROWS], merged_sum[TILE_ROWS];
};

static_assert(sizeof(Scratch<float>) <= MIN_SCRATCH_BYTES && sizeof(Scratch<bf16>) <= MIN_SCRATCH_BYTES);

// Keys in groups of 16, a group's two halves possibly in two blocks, as a source of `multiply_rows`. They come from
// memory, and so do the values that are needed next: both are asked for ahead of their use.
template <class T, int GROUPS>
struct KeyGroups {
  static constexpr int GROUPS_AHEAD = 4;
  // The last ones repeat a group, so that there is always one ahead.
  const T* halves[GROUPS + GROUPS_AHEAD][2];
  const T* values[GROUPS];  // as many elements as the keys of a group
  int64_t row_size, head_dim;
  bool is_split;
  bool fits;  // a partition's values into the nearest cache, until they are needed

  template <int N>
  KeyGroups<T, N> take(int first) const {
    KeyGroups<T, N> result{{}, {}, row_size, head_dim, is_split, fits};
    memcpy(result.halves, halves + first, sizeof result.halves);
    memcpy(result.values, values + first, sizeof result.values);
    return result;
  }
  int64_t num_segments() const { return 1; }
  int64_t segment_size() const { return head_dim; }
  void enter(int64_t) {}
  IntVec words(int group, int64_t k, int v) const {
    const int64_t at = k / STEP<T> * row_size;
    const T* const* half = halves[group];
    if (v == 0) {
      // Read once a step: what lies in the larger caches may stay there.
      __builtin_prefetch(halves[group + GROUPS_AHEAD][0] + at, 0, 0);
      if (fits)
        __builtin_prefetch(values[group] + k * COLUMNS, 0, 0);
      else
        __builtin_prefetch(values[group] + k * COLUMNS);
    }
    if constexpr (LANES == 8) return load_words(half[v] + at);
    return is_split ? join_words(half[0] + at, half[1] + at) : load_words(half[0] + at);
  }
};

// Dimensions in panels of 16 and the values of a partition's tokens, a block for each segment.
template <class T, bool IS_PARTIAL>
struct ValueColumns {
  const T* const* blocks;
  int64_t num_blocks, block_size, head_dim;
  int64_t dim = 0;
  const T* block = nullptr;

  template <int N>
  ValueColumns take(int panel) const {
    ValueColumns result = *this;
    result.dim += panel * COLUMNS;
    return result;
  }
  int64_t num_segments() const { return num_blocks; }
  int64_t segment_size() const { return block_size; }
  void enter(int64_t segment) { block = blocks[segment] + dim * STEP<T>; }
  IntVec words(int panel, int64_t token, int v) const {
    const int64_t column = panel * COLUMNS + v * LANES;
    const T* from = block + token * head_dim + column * STEP<T>;
    if constexpr (!IS_PARTIAL) return load_words(from);
    return load_words(from, static_cast<int>(std::clamp<int64_t>(head_dim - dim - column, 0, LANES)));
  }
};

// Calls each(first row, number of rows) for tiles of products.
template <class Each>
INLINE void for_tiles(int64_t num_rows, const Each& each) {
  for (int64_t r = 0; r < num_rows; r += MAX_ROWS)
    each(r, static_cast<int>(std::min<int64_t>(MAX_ROWS, num_rows - r)));
}

// The queries of a tile as operands of products, [num_rows, head_dim].
template <class T>
const Operand<T>* load_queries(const Call<T>& call, const Tile& tile, Scratch<T>& scratch) {
  const int64_t group = call.group(), head_dim = call.layout.head_dim;
  for (int64_t r = 0; r < tile.num_rows; ++r) {
    const int64_t row = tile.first_row + r, token = tile.first_token + row / group;
    const T* query = call.query + token * call.query_stride + (tile.kv_head * group + row % group) * head_dim;
    memcpy(scratch.queries + r * head_dim, query, head_dim * sizeof(T));
  }
  int64_t stride = head_dim;
  return operand_rows<T>(scratch.queries, stride, tile.num_rows, head_dim, scratch.widened);
}

// scores[r][key - first] of the keys [begin, end) of the partition that begins at `first`, by groups of 16.
template <class T>
void score_keys(const Call<T>& call, const Tile& tile, const Operand<T>* queries, int64_t first, int64_t begin,
                int64_t end, Scratch<T>& scratch) {
  const CacheLayout& layout = call.layout;
  const int num_groups = static_cast<int>((end - begin + COLUMNS - 1) / COLUMNS);
  KeyGroups<T, PARTITION / COLUMNS> source{{}, {}, layout.block_size * STEP<T>, layout.head_dim};
  source.is_split = layout.block_size < COLUMNS;
  source.fits = PARTITION * layout.head_dim * static_cast<int64_t>(sizeof(T)) <= NEAREST_CACHE_BYTES;
  for (int g = 0; g < num_groups; ++g)
    for (int half = 0; half < 2; ++half) {
      // A half beyond the context stands for keys that are masked: any valid address will do.
      int64_t key = begin + g * COLUMNS + half * 8;
      if (key >= end) key = begin + g * COLUMNS;
      const int64_t tile_start = layout.tile(tile.block_table[key / layout.block_size], tile.kv_head);
      const int64_t offset = key % layout.block_size;
      source.halves[g][half] = call.key_cache + tile_start + offset * STEP<T>;
      if (half == 0) source.values[g] = call.value_cache + tile_start + offset * layout.head_dim;
    }
  for (int g = 0; g < source.GROUPS_AHEAD; ++g) source.halves[num_groups + g][0] = source.halves[num_groups - 1][0];
  float* scores = scratch.scores + (begin - first);
  const auto multiply = [&](auto element, const auto& keys) {
    for_tiles(tile.num_rows, [&](int64_t r, int rows) {
      multiply_rows<decltype(element)>(rows, queries + r * layout.head_dim, layout.head_dim, keys, num_groups,
                                       scores + r * ROW_STRIDE, ROW_STRIDE);
    });
  };
  if (tile.num_rows < ROWS_WORTH_GATHERING)
    multiply(T{}, source);
  else
    multiply(Operand<T>{}, gathered<T, PARTITION / COLUMNS>(source, num_groups, scratch.panels));
}

INLINE IntVec lane_numbers() {
  IntVec result;
  for (int i = 0; i < LANES; ++i) result[i] = i;
  return result;
}

// Weights exp(score - max) of a row, 0 for keys it does not see, with their maximum and sum.
template <class T>
void weigh_row(const Call<T>& call, const Tile& tile, int64_t r, int64_t first, int64_t begin, int64_t end,
               Scratch<T>& scratch) {
  const int64_t group = call.group(), position = tile.position(r, group);
  const int64_t head = tile.kv_head * group + (tile.first_row + r) % group;
  const int32_t last_key = static_cast<int32_t>(position - first);
  const int32_t first_key = static_cast<int32_t>(call.first_seen(position) - first);
  const float slope = call.alibi_slopes == nullptr ? 0.0f : call.alibi_slopes[head];
  float* scores = scratch.scores + r * ROW_STRIDE;
  Operand<T>* weights = scratch.weights + r * ROW_STRIDE;

  Vec most = splat(-INFINITY);
  for (int64_t i = begin - first; i < end - first; i += LANES) {
    const IntVec key = lane_numbers() + static_cast<int32_t>(i);
    Vec score = load(scores + i) * call.scale;
    if (call.soft_cap > 0.0f) score = call.soft_cap * tanh_of(score / call.soft_cap);
    if (call.alibi_slopes != nullptr) score += slope * __builtin_convertvector(key - last_key, Vec);
    score = key > last_key || key < first_key ? splat(-INFINITY) : score;
    store(scores + i, score);
    most = vec_max(most, score);
  }
  const float max = max_of(most);
  // A row that sees no key of the partition subtracts 0, and gets weights of 0.
  const Vec offset = splat(max == -INFINITY ? 0.0f : max);
  Vec sum{};
  for (int64_t i = begin - first; i < end - first; i += LANES) {
    const Vec weight = exp_of(load(scores + i) - offset);
    store(weights + i, weight);
    sum += weight;
  }
  scratch.max[r] = max;
  scratch.sum[r] = sum_of(sum);
}

// outs[r] = sum of weights times values over the keys [begin, end), which are whole blocks.
template <class T>
void sum_values(const Call<T>& call, const Tile& tile, int64_t first, int64_t begin, int64_t end, Scratch<T>& scratch) {
  const CacheLayout& layout = call.layout;
  const int64_t block_size = layout.block_size, head_dim = layout.head_dim;
  const T* blocks[PARTITION / 8];
  int64_t num_blocks = 0;
  for (int64_t key = begin; key < std::min(end, tile.context_len); key += block_size) {
    const T* block = call.value_cache + layout.tile(tile.block_table[key / block_size], tile.kv_head);
    if (key + block_size > tile.context_len) {
      // 0 * NaN is NaN: what is not part of the context must not be there.
      memcpy(scratch.last_values, block, block_size * head_dim * sizeof(T));
      for (int64_t offset = tile.context_len - key; offset < block_size; ++offset)
        for (int64_t d = 0; d < head_dim; ++d) scratch.last_values[layout.value_at<T>(offset, d)] = T{};
      block = scratch.last_values;
    }
    blocks[num_blocks++] = block;
  }
  const int num_whole = static_cast<int>(head_dim / COLUMNS);
  const int64_t out_size = call.out_size();
  const Operand<T>* weights = scratch.weights + (begin - first);
  const ValueColumns<T, false> whole{blocks, num_blocks, block_size, head_dim};
  const ValueColumns<T, true> rest{blocks, num_blocks, block_size, head_dim, num_whole * COLUMNS};
  const auto multiply = [&](auto element, auto most_panels, const auto& panels, int num_panels, int64_t column) {
    for_tiles(tile.num_rows, [&](int64_t r, int rows) {
      multiply_rows<decltype(element), most_panels>(rows, weights + r * ROW_STRIDE, ROW_STRIDE, panels, num_panels,
                                                    scratch.outs + r * out_size + column, static_cast<int>(out_size));
    });
  };
  constexpr std::integral_constant<int, MAX_PANELS> MANY;
  if (tile.num_rows < ROWS_WORTH_GATHERING)
    multiply(T{}, MANY, whole, num_whole, 0);
  else
    multiply(Operand<T>{}, MANY, gathered<T, MAX_HEAD_DIM / COLUMNS>(whole, num_whole, scratch.panels), num_whole, 0);
  if (head_dim % COLUMNS != 0) multiply(T{}, std::integral_constant<int, 1>(), rest, 1, num_whole * COLUMNS);
}

// The tile's rows over one partition: `max`, `sum` and `outs` of the scratch memory.
template <class T>
void attend_partition(const Call<T>& call, const Tile& tile, const Operand<T>* queries, int64_t partition,
                      Scratch<T>& scratch) {
  const int64_t group = call.group(), first = partition * PARTITION;
  const int64_t unit = std::max<int64_t>(COLUMNS, call.layout.block_size);
  const int64_t seen_end = std::min(first + PARTITION, tile.position(tile.num_rows - 1, group) + 1);
  const int64_t seen_begin = std::max(first, call.first_seen(tile.position(0, group)));
  const int64_t begin = seen_begin / unit * unit, end = (seen_end + unit - 1) / unit * unit;
  score_keys(call, tile, queries, first, begin, std::min(end, tile.context_len), scratch);
  for (int64_t r = 0; r < tile.num_rows; ++r) weigh_row(call, tile, r, first, begin, end, scratch);
  sum_values(call, tile, first, begin, end, scratch);
}

// Partitions of which the rows see something: [first, end).
template <class T>
int64_t first_partition(const Call<T>& call, int64_t first_position) {
  return call.first_seen(first_position) / PARTITION;
}
int64_t end_partition(int64_t last_position) { return last_position / PARTITION + 1; }

// Adds a partition's result to what a row has gathered.
INLINE void merge(float& merged_max, float& merged_sum, float* merged, float max, float sum, const float* out,
                  int64_t size) {
  if (max == -INFINITY) return;  // nothing was seen
  if (merged_max == -INFINITY) {
    merged_max = max;
    merged_sum = sum;
    memcpy(merged, out, size * sizeof(float));
    return;
  }
  const float new_max = merged_max > max ? merged_max : max;
  const float old_share = exp_of(merged_max - new_max), new_share = exp_of(max - new_max);
  merged_sum = merged_sum * old_share + sum * new_share;
  const Vec old_factor = splat(old_share), new_factor = splat(new_share);
  for (int64_t i = 0; i < size; i += LANES)
    store(merged + i, fma(load(merged + i), old_factor, load(out + i) * new_factor));
  merged_max = new_max;
}

template <class T>
void store_row(const Call<T>& call, const Tile& tile, int64_t r, const float* merged, float sum) {
  const int64_t group = call.group(), row = tile.first_row + r, head_dim = call.layout.head_dim;
  const int64_t token = tile.first_token + row / group, head = tile.kv_head * group + row % group;
  T* out = call.out + token * call.out_stride + head * head_dim;
  const Vec factor = splat(1.0f / sum);
  for (int64_t d = 0; d < head_dim; d += LANES)
    store_first(out + d, load(merged + d) * factor, static_cast<int>(std::min<int64_t>(LANES, head_dim - d)));
}

// All partitions of a tile, and its rows of `out`.
template <class T>
void attend_tile(const Call<T>& call, const Tile& tile, Scratch<T>& scratch) {
  const int64_t group = call.group(), size = call.out_size();
  const Operand<T>* queries = load_queries(call, tile, scratch);
  std::fill(scratch.merged, scratch.merged + tile.num_rows * size, 0.0f);
  std::fill(scratch.merged_sum, scratch.merged_sum + tile.num_rows, 0.0f);
  std::fill(scratch.merged_max, scratch.merged_max + tile.num_rows, -INFINITY);
  const int64_t end = end_partition(tile.position(tile.num_rows - 1, group));
  for (int64_t p = first_partition(call, tile.position(0, group)); p < end; ++p) {
    attend_partition(call, tile, queries, p, scratch);
    for (int64_t r = 0; r < tile.num_rows; ++r)
      merge(scratch.merged_max[r], scratch.merged_sum[r], scratch.merged + r * size, scratch.max[r], scratch.sum[r],
            scratch.outs + r * size, size);
  }
  for (int64_t r = 0; r < tile.num_rows; ++r)
    store_row(call, tile, r, scratch.merged + r * size, scratch.merged_sum[r]);
}

// Where the partitions of the decodes lie in one flat order, sequence by sequence.
template <class T>
struct Decodes {
  const Call<T>& call;
  const int32_t* context_lens;
  int64_t num_seqs;

  int64_t first(int64_t seq) const { return first_partition(call, context_lens[seq] - 1); }
  int64_t count(int64_t seq) const {
    return context_lens[seq] == 0 ? 0 : end_partition(context_lens[seq] - 1) - first(seq);
  }
  int64_t total() const {
    int64_t result = 0;
    for (int64_t seq = 0; seq < num_seqs; ++seq) result += count(seq);
    return result;
  }
  Tile tile(int64_t seq, int64_t kv_head, int64_t first_row) const {
    return {call.block_tables + seq * call.table_stride, seq, 1, context_lens[seq], kv_head, first_row,
            std::min(TILE_ROWS, call.group() - first_row)};
  }
  // A partial result holds the maxima, the sums and the outputs of a group.
  int64_t partial_size() const { return call.group() * (2 + call.out_size()); }
  float* partial(float* partials, int64_t partition, int64_t kv_head) const {
    return partials + (partition * call.layout.num_kv_heads + kv_head) * partial_size();
  }
  // Where too many partitions would be at work, there is enough work without cutting sequences.
  bool is_cut(int64_t partials_size) const { return total() * call.layout.num_kv_heads * partial_size() <= partials_size; }
};

// One partition under one KV head, into its partial result.
template <class T>
void attend_part(const Decodes<T>& decodes, int64_t seq, int64_t kv_head, int64_t partition, float* partial,
                 Scratch<T>& scratch) {
  const int64_t group = decodes.call.group(), size = decodes.call.out_size();
  for (int64_t row = 0; row < group; row += TILE_ROWS) {
    const Tile tile = decodes.tile(seq, kv_head, row);
    attend_partition(decodes.call, tile, load_queries(decodes.call, tile, scratch), partition, scratch);
    memcpy(partial + row, scratch.max, tile.num_rows * sizeof(float));
    memcpy(partial + group + row, scratch.sum, tile.num_rows * sizeof(float));
    memcpy(partial + 2 * group + row * size, scratch.outs, tile.num_rows * size * sizeof(float));
  }
}

template <class T>
Call<T> call_of(const T* query, const T* key_cache, const T* value_cache, const int32_t* block_tables,
                const float* alibi_slopes, T* out, int64_t query_stride, int64_t out_stride, int64_t table_stride,
                int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t window,
                double scale, double soft_cap) {
  return {query, key_cache, value_cache, block_tables, alibi_slopes, out, query_stride, out_stride, table_stride,
          num_heads, window, {num_kv_heads, block_size, head_dim}, static_cast<float>(scale), static_cast<float>(soft_cap)};
}

// The step's first num_decodes sequences, whose tokens are its first.
template <class T>
void decode(const Task& task, const T* query, const T* key_cache, const T* value_cache, const int32_t* context_lens,
            const int32_t* block_tables, const float* alibi_slopes, T* out, float* partials, int64_t partials_size,
            int64_t query_stride, int64_t out_stride, int64_t table_stride, int64_t num_heads, int64_t num_kv_heads,
            int64_t head_dim, int64_t block_size, int64_t window, double scale, double soft_cap) {
  const Call<T> call = call_of(query, key_cache, value_cache, block_tables, alibi_slopes, out, query_stride, out_stride,
                               table_stride, num_heads, num_kv_heads, head_dim, block_size, window, scale, soft_cap);
  const Decodes<T> decodes{call, context_lens, task.step.num_decodes};
  Scratch<T>& scratch = *static_cast<Scratch<T>*>(task.scratch);
  const bool is_cut = decodes.is_cut(partials_size);
  int64_t item = task.take(), begin = 0, before = 0;
  for (int64_t seq = 0; seq < decodes.num_seqs; ++seq) {
    const int64_t count = decodes.count(seq), num_pieces = is_cut ? count : std::min<int64_t>(count, 1);
    for (; item < begin + num_pieces * num_kv_heads; item = task.take()) {
      const int64_t piece = (item - begin) / num_kv_heads, kv_head = (item - begin) % num_kv_heads;
      if (num_pieces > 1)
        attend_part(decodes, seq, kv_head, decodes.first(seq) + piece, decodes.partial(partials, before + piece, kv_head),
                    scratch);
      else
        for (int64_t row = 0; row < call.group(); row += TILE_ROWS)
          attend_tile(call, decodes.tile(seq, kv_head, row), scratch);
    }
    begin += num_pieces * num_kv_heads;
    before += count;
  }
}

// Joins what `decode` has left in parts; takes the same arguments.
template <class T>
void merge_decode(const Task& task, const T* query, const T* key_cache, const T* value_cache, const int32_t* context_lens,
                  const int32_t* block_tables, const float* alibi_slopes, T* out, float* partials, int64_t partials_size,
                  int64_t query_stride, int64_t out_stride, int64_t table_stride, int64_t num_heads,
                  int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t window, double scale,
                  double soft_cap) {
  const Call<T> call = call_of(query, key_cache, value_cache, block_tables, alibi_slopes, out, query_stride, out_stride,
                               table_stride, num_heads, num_kv_heads, head_dim, block_size, window, scale, soft_cap);
  const Decodes<T> decodes{call, context_lens, task.step.num_decodes};
  if (!decodes.is_cut(partials_size)) return;
  const int64_t group = call.group(), size = call.out_size();
  float* merged = static_cast<Scratch<T>*>(task.scratch)->merged;
  int64_t before = 0, item = 0;
  for (int64_t seq = 0; seq < decodes.num_seqs; ++seq) {
    const int64_t count = decodes.count(seq);
    for (int64_t kv_head = 0; count > 1 && kv_head < num_kv_heads; ++kv_head) {
      if (item++ % task.num_threads != task.thread) continue;
      const Tile tile = decodes.tile(seq, kv_head, 0);
      for (int64_t row = 0; row < group; ++row) {
        float max = -INFINITY, sum = 0.0f;
        std::fill(merged, merged + size, 0.0f);
        for (int64_t p = 0; p < count; ++p) {
          const float* partial = decodes.partial(partials, before + p, kv_head);
          merge(max, sum, merged, partial[row], partial[group + row], partial + 2 * group + row * size, size);
        }
        store_row(call, tile, row, merged, sum);
      }
    }
    before += count;
  }
}

// The sequences after the step's decodes.
template <class T>
void prefill(const Task& task, const T* query, const T* key_cache, const T* value_cache, const int32_t* query_starts,
             const int32_t* context_lens, const int32_t* block_tables, const float* alibi_slopes, T* out,
             int64_t query_stride, int64_t out_stride, int64_t table_stride, int64_t num_heads, int64_t num_kv_heads,
             int64_t head_dim, int64_t block_size, int64_t window, double scale, double soft_cap) {
  const Call<T> call = call_of(query, key_cache, value_cache, block_tables, alibi_slopes, out, query_stride, out_stride,
                               table_stride, num_heads, num_kv_heads, head_dim, block_size, window, scale, soft_cap);
  Scratch<T>& scratch = *static_cast<Scratch<T>*>(task.scratch);
  const int64_t group = call.group();
  const int64_t rows_of_tile = group <= TILE_ROWS ? TILE_ROWS / group * group : TILE_ROWS;
  int64_t item = task.take(), begin = 0;
  for (int64_t seq = task.step.num_decodes; seq < task.step.num_seqs; ++seq) {
    if (context_lens[seq] == 0) continue;
    const int64_t num_queries = query_starts[seq + 1] - query_starts[seq], num_rows = num_queries * group;
    const int64_t num_tiles = (num_rows + rows_of_tile - 1) / rows_of_tile;
    for (; item < begin + num_tiles * num_kv_heads; item = task.take()) {
      // The last rows see the most keys: they come first, so that no thread is left with a long one.
      const int64_t first_row = (num_tiles - 1 - (item - begin) / num_kv_heads) * rows_of_tile;
      const Tile tile{block_tables + seq * table_stride, query_starts[seq], num_queries, context_lens[seq],
                      (item - begin) % num_kv_heads, first_row, std::min(rows_of_tile, num_rows - first_row)};
      attend_tile(call, tile, scratch);
    }
    begin += num_tiles * num_kv_heads;
  }
}

}  // namespace
