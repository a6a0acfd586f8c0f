// Attention of new tokens over the paged cache, in plain float32 arithmetic: any head size, no tensor cores.
//
// A block computes a tile of ROWS rows (attention.cuh) of one key head of one sequence. It goes through the keys KEYS at
// a time: all threads bring them to shared memory, then each warp updates its rows with an online softmax, a lane for a
// key, and after that a lane for a dimension. decode_mma.cu and prefill_mma.cu do the same on tensor cores.
//
//   query, out              [num_tokens, num_heads, head_dim], any stride over tokens
//   key_cache, value_cache  [num_blocks, num_kv_heads, block_size, head_dim], contiguous
//   context_lens            [num_seqs], tokens in the cache, the new ones included; 0: the sequence is left alone
//   block_tables            [num_seqs, any], table_stride apart; valid as far as the context reaches
//   alibi_slopes            [num_heads], or null
//   window                  a query sees itself and the window - 1 tokens before it
//   soft_cap                0 for none
//   NUM_THREADS threads; dynamic shared memory as `Tile` lays it out
//   WIDTH divides head_dim; the rows of the caches begin at multiples of WIDTH elements' bytes
//
// Slots beyond a context are not read, whatever they hold. Every grid is fixed by sizes that the host knows; blocks
// that have nothing to do end at once.
#include "attention.cuh"
#include "compat.cuh"
#include "vector.cuh"

constexpr int ROWS = 16;
constexpr int KEYS = WARP_SIZE;
constexpr int NUM_WARPS = 4;
constexpr int NUM_THREADS = NUM_WARPS * WARP_SIZE;
constexpr int ROWS_PER_WARP = ROWS / NUM_WARPS;

__device__ inline float warp_max(float x) {
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lanes));
  return x;
}

__device__ inline float warp_sum(float x) {
  for (int lanes = WARP_SIZE / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  return x;
}

// What a row has gathered so far, beside its accumulators: the largest score and the sum of the weights.
struct RowState {
  float max = -INFINITY;
  float sum = 0.0f;
};

// A block's rows and the keys at hand, in shared memory: 2 * ROWS * head_dim + KEYS * (head_dim | 1) + KEYS * head_dim +
// ROWS * KEYS floats.
struct Tile {
  float* queries;       // [ROWS, head_dim]
  float* accumulators;  // [ROWS, head_dim], sums of weight * value
  float* keys;          // [KEYS, key_stride]
  float* values;        // [KEYS, head_dim]
  float* weights;       // [ROWS, KEYS]
  int key_stride;       // odd, so that lanes with a key each meet no bank twice
  int first_row;        // of the tile, among the rows of the sequence

  __device__ Tile(float* shared, int head_dim, int first_row) : key_stride(head_dim | 1), first_row(first_row) {
    queries = shared;
    accumulators = queries + ROWS * head_dim;
    keys = accumulators + ROWS * head_dim;
    values = keys + KEYS * key_stride;
    weights = values + KEYS * head_dim;
  }
};

// The row of a warp's turn: consecutive rows belong to different warps, for there may be few of them.
__device__ inline int row_of_warp(int turn) { return turn * NUM_WARPS + threadIdx.x / WARP_SIZE; }

// Queries of the tile's rows; accumulators of 0.
template <class T>
__device__ void load_queries(const Tile& tile, const Sequence<T>& sequence, const Sizes& sizes) {
  const int num_rows = sequence.num_queries * sizes.group() - tile.first_row;
  for (int i = threadIdx.x; i < min(num_rows, ROWS) * sizes.head_dim; i += NUM_THREADS) {
    const int row = tile.first_row + i / sizes.head_dim;
    tile.queries[i] = to_float(sequence.query_of(row, sizes)[i % sizes.head_dim]);
    tile.accumulators[i] = 0.0f;
  }
}

// Keys or values of positions [first, end), KEYS of them at most. The other rows of the tile are not touched, nor read.
template <int WIDTH, class T>
__device__ void load_rows(const T* cache, const Sequence<T>& sequence, const Sizes& sizes, int first, int end,
                          float* rows, int row_stride) {
  const int vectors_per_row = sizes.head_dim / WIDTH;
  for (int i = threadIdx.x; i < min(KEYS, end - first) * vectors_per_row; i += NUM_THREADS) {
    const int row = i / vectors_per_row;
    const int dimension = i % vectors_per_row * WIDTH;
    const long long cache_row = sequence.cache_row(first + row, sizes);
    const auto vector = load<WIDTH>(cache + cache_row * sizes.head_dim + dimension);
    for (int j = 0; j < WIDTH; ++j) rows[row * row_stride + dimension + j] = to_float(vector.at[j]);
  }
}

// The keys at hand, [first, end), enter one row. Called by a whole warp.
__device__ inline void update_row(const Tile& tile, const Sizes& sizes, const Scoring& scoring, int row, float slope,
                                  int position, int first, int end, RowState& state) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int key_position = first + lane;
  float score = -INFINITY;
  if (key_position < end && key_position <= position && key_position >= scoring.first_seen(position)) {
    float product = 0.0f;
    for (int d = 0; d < sizes.head_dim; ++d)
      product += tile.queries[row * sizes.head_dim + d] * tile.keys[lane * tile.key_stride + d];
    score = scoring.score(product, slope, key_position - position);
  }
  const float new_max = fmaxf(state.max, warp_max(score));
  const float factor = exp2f(state.max - new_max);
  const float weight = exp2f(score - new_max);
  state.sum = state.sum * factor + warp_sum(weight);
  state.max = new_max;

  float* weights = tile.weights + row * KEYS;
  weights[lane] = weight;
  __syncwarp();
  for (int d = lane; d < sizes.head_dim; d += WARP_SIZE) {
    float sum = tile.accumulators[row * sizes.head_dim + d] * factor;
    for (int key = 0; key < min(KEYS, end - first); ++key) sum += weights[key] * tile.values[key * sizes.head_dim + d];
    tile.accumulators[row * sizes.head_dim + d] = sum;
  }
}

// All of the keys that they see enter the tile's rows. The rows' tokens are so close together that each row sees
// one of the first KEYS keys: from there on it has a maximum to subtract.
static_assert(ROWS <= KEYS, "a row could see none of the first keys");
template <int WIDTH, class T>
__device__ void attend(const Tile& tile, const T* key_cache, const T* value_cache, const Sequence<T>& sequence,
                       const Sizes& sizes, const Scoring& scoring, const Range& keys,
                       RowState (&states)[ROWS_PER_WARP]) {
  load_queries(tile, sequence, sizes);
  for (int first = keys.begin; first < keys.end; first += KEYS) {
    load_rows<WIDTH>(key_cache, sequence, sizes, first, keys.end, tile.keys, tile.key_stride);
    load_rows<WIDTH>(value_cache, sequence, sizes, first, keys.end, tile.values, sizes.head_dim);
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < ROWS_PER_WARP; ++turn) {
      const int row = row_of_warp(turn);
      const int row_of_sequence = tile.first_row + row;
      if (row_of_sequence >= sequence.num_queries * sizes.group()) continue;
      const int position = sequence.position(row_of_sequence, sizes);
      const float slope = scoring.slope(sequence.head(row_of_sequence, sizes));
      update_row(tile, sizes, scoring, row, slope, position, first, keys.end, states[turn]);
    }
    __syncthreads();
  }
}

// One new token a sequence, token s of sequence s, its keys split into partitions: each leaves to `merge` what a softmax
// over its keys needs.
//
//   accumulators  [num_seqs, num_heads, num_partitions, head_dim], sums of weight * value
//   maxima, sums  [num_seqs, num_heads, num_partitions], the largest score and the sum of the weights
//   grid (ceil(group / ROWS) * num_partitions, num_kv_heads, num_seqs)
template <class T, int WIDTH>
__global__ void decode(const T* __restrict__ query, const T* __restrict__ key_cache, const T* __restrict__ value_cache,
                       const int* __restrict__ context_lens, const int* __restrict__ block_tables,
                       const float* __restrict__ alibi_slopes, float* __restrict__ accumulators,
                       float* __restrict__ maxima, float* __restrict__ sums, long long query_stride,
                       long long table_stride, int num_heads, int num_kv_heads, int head_dim, int block_size,
                       float scale, float soft_cap, int window, int least_keys, int num_partitions) {
  DYNAMIC_SHARED(float, shared);
  const Sizes sizes{num_heads, num_kv_heads, head_dim, block_size};
  const Scoring scoring(alibi_slopes, scale, soft_cap, window);
  const int seq = blockIdx.z;
  const int partition = blockIdx.x % num_partitions;
  const Sequence<T> sequence{query + seq * query_stride, block_tables + seq * table_stride, query_stride, 1,
                             context_lens[seq], static_cast<int>(blockIdx.y)};
  const Range keys = partition_of(sequence.context_len, scoring, partition, least_keys, num_partitions);
  if (keys.begin >= keys.end) return;

  const Tile tile(shared, head_dim, blockIdx.x / num_partitions * ROWS);
  RowState states[ROWS_PER_WARP];
  attend<WIDTH>(tile, key_cache, value_cache, sequence, sizes, scoring, keys, states);

  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int turn = 0; turn < ROWS_PER_WARP; ++turn) {
    const int row = row_of_warp(turn);
    if (tile.first_row + row >= sizes.group()) continue;
    const int head = sequence.head(tile.first_row + row, sizes);
    const long long part = (static_cast<long long>(seq) * num_heads + head) * num_partitions + partition;
    for (int d = lane; d < head_dim; d += WARP_SIZE)
      accumulators[part * head_dim + d] = tile.accumulators[row * head_dim + d];
    if (lane == 0) maxima[part] = states[turn].max;
    if (lane == 0) sums[part] = states[turn].sum;
  }
}

// The partitions of `decode` and `decode_mma` become the output; arguments as there. The warps take turns of partitions.
//
//   grid (num_heads, num_seqs), any number of warps; dynamic shared memory: head_dim floats a warp
template <class T>
__global__ void merge(const float* __restrict__ accumulators, const float* __restrict__ maxima,
                      const float* __restrict__ sums, const int* __restrict__ context_lens, T* __restrict__ out,
                      long long out_stride, int head_dim, int window, int least_keys, int num_partitions) {
  DYNAMIC_SHARED(float, shared);
  const int num_seen = min(context_lens[blockIdx.y], window);
  if (num_seen == 0) return;
  const int num_keys = keys_per_partition(num_seen, least_keys, num_partitions);
  const int num_parts = (num_seen + num_keys - 1) / num_keys;
  const long long first_part = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * num_partitions;
  maxima += first_part;
  sums += first_part;
  accumulators += first_part * head_dim;
  const int num_warps = blockDim.x / WARP_SIZE;
  const int warp = threadIdx.x / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE;

  float total_max = -INFINITY;
  for (int part = lane; part < num_parts; part += WARP_SIZE) total_max = fmaxf(total_max, maxima[part]);
  total_max = warp_max(total_max);
  float total_sum = 0.0f;
  for (int part = lane; part < num_parts; part += WARP_SIZE) total_sum += sums[part] * exp2f(maxima[part] - total_max);
  total_sum = warp_sum(total_sum);

  for (int d = lane; d < head_dim; d += WARP_SIZE) {
    float sum = 0.0f;
#pragma unroll 8
    for (int part = warp; part < num_parts; part += num_warps)
      sum += accumulators[static_cast<long long>(part) * head_dim + d] * exp2f(maxima[part] - total_max);
    shared[warp * head_dim + d] = sum;
  }
  __syncthreads();
  T* row = out + blockIdx.y * out_stride + static_cast<long long>(blockIdx.x) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float sum = 0.0f;
    for (int other = 0; other < num_warps; ++other) sum += shared[other * head_dim + d];
    row[d] = from_float<T>(sum / total_sum);
  }
}

// Any number of new tokens a sequence: tokens [query_starts[s], query_starts[s + 1]) are the last of sequence s, and each
// sees those up to itself. Blocks skip the keys that no row of theirs sees.
//
//   query_starts  [num_seqs + 1]
//   grid (ceil(longest number of new tokens * group / ROWS), num_kv_heads, num_seqs)
template <class T, int WIDTH>
__global__ void prefill(const T* __restrict__ query, const T* __restrict__ key_cache, const T* __restrict__ value_cache,
                        const int* __restrict__ query_starts, const int* __restrict__ context_lens,
                        const int* __restrict__ block_tables, const float* __restrict__ alibi_slopes,
                        T* __restrict__ out, long long query_stride, long long out_stride, long long table_stride,
                        int num_heads, int num_kv_heads, int head_dim, int block_size, float scale, float soft_cap,
                        int window) {
  DYNAMIC_SHARED(float, shared);
  const Sizes sizes{num_heads, num_kv_heads, head_dim, block_size};
  const Scoring scoring(alibi_slopes, scale, soft_cap, window);
  const int seq = blockIdx.z;
  const int first_token = query_starts[seq];
  const Sequence<T> sequence{query + first_token * query_stride, block_tables + seq * table_stride, query_stride,
                             query_starts[seq + 1] - first_token, context_lens[seq], static_cast<int>(blockIdx.y)};
  const Tile tile(shared, head_dim, blockIdx.x * ROWS);
  const int num_rows = sequence.num_queries * sizes.group();
  if (sequence.context_len == 0 || tile.first_row >= num_rows) return;
  const int last_row = min(tile.first_row + ROWS, num_rows) - 1;
  const Range keys = sequence.seen_by(tile.first_row, last_row, sizes, scoring);

  RowState states[ROWS_PER_WARP];
  attend<WIDTH>(tile, key_cache, value_cache, sequence, sizes, scoring, keys, states);

#pragma unroll
  for (int turn = 0; turn < ROWS_PER_WARP; ++turn) {
    const int row = tile.first_row + row_of_warp(turn);
    if (row >= num_rows) continue;
    T* token = out + (first_token + row / sizes.group()) * out_stride + sequence.head(row, sizes) * head_dim;
    for (int d = threadIdx.x % WARP_SIZE; d < head_dim; d += WARP_SIZE)
      token[d] = from_float<T>(tile.accumulators[row_of_warp(turn) * head_dim + d] / states[turn].sum);
  }
}
