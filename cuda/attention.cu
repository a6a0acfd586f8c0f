// Attention of new tokens over the paged cache, in plain float32 arithmetic: any head size, no tensor cores.
//
// A block computes a tile of ROWS rows of one key head of one sequence. Row i of a sequence is its new token i / group
// under query head kv_head * group + i % group, group = num_heads / num_kv_heads: the query heads that share a key head
// lie side by side, so a block reads each key and each value once for all of them. It goes through the keys KEYS at a
// time: all threads bring them to shared memory, then each warp updates its rows with an online softmax, a lane for a
// key, and after that a lane for a dimension.
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

// The sizes of heads and blocks, the same in all of a launch.
struct Sizes {
  int num_heads, num_kv_heads, head_dim, block_size;
  __device__ int group() const { return num_heads / num_kv_heads; }
};

// How a product of query and key becomes a score.
struct Scoring {
  const float* alibi_slopes;
  float scale, soft_cap;
  int window;

  // Of a scaled product; distance = key position - query position.
  __device__ float score(float product, int head, int distance) const {
    if (soft_cap > 0.0f) product = soft_cap * tanhf(product / soft_cap);
    return alibi_slopes == nullptr ? product : product + alibi_slopes[head] * distance;
  }
  // The first position that a query sees.
  __device__ int first_seen(int position) const { return max(0, position - window + 1); }
};

// The new tokens of one sequence and its part of the cache, under one key head.
template <class T>
struct Sequence {
  const T* query;  // of its first new token
  const int* block_table;
  long long query_stride;
  int num_queries, context_len, kv_head;

  __device__ int position(int token) const { return context_len - num_queries + token; }
};

// What a row has gathered so far, beside its accumulators: the largest score and the sum of exp(score - max).
struct RowState {
  float max = -INFINITY;
  float sum = 0.0f;
};

// A block's rows and the keys at hand, in shared memory: 2 * ROWS * head_dim + KEYS * (head_dim | 1) + KEYS * head_dim +
// ROWS * KEYS floats.
struct Tile {
  float* queries;       // [ROWS, head_dim], scaled
  float* accumulators;  // [ROWS, head_dim], sums of exp(score - max) * value
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

// Scaled queries of the tile's rows; accumulators of 0.
template <class T>
__device__ void load_queries(const Tile& tile, const Sequence<T>& sequence, const Sizes& sizes, float scale) {
  const int num_rows = sequence.num_queries * sizes.group() - tile.first_row;
  for (int i = threadIdx.x; i < min(num_rows, ROWS) * sizes.head_dim; i += NUM_THREADS) {
    const int row = tile.first_row + i / sizes.head_dim;
    const int head = sequence.kv_head * sizes.group() + row % sizes.group();
    const T* token = sequence.query + row / sizes.group() * sequence.query_stride;
    tile.queries[i] = scale * to_float(token[head * sizes.head_dim + i % sizes.head_dim]);
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
    const int position = first + row;
    const long long block = sequence.block_table[position / sizes.block_size];
    const long long tile = block * sizes.num_kv_heads + sequence.kv_head;
    const long long slot = tile * sizes.block_size + position % sizes.block_size;
    const auto vector = load<WIDTH>(cache + slot * sizes.head_dim + dimension);
    for (int j = 0; j < WIDTH; ++j) rows[row * row_stride + dimension + j] = to_float(vector.at[j]);
  }
}

// The keys at hand, [first, end), enter one row. Called by a whole warp.
__device__ inline void update_row(const Tile& tile, const Sizes& sizes, const Scoring& scoring, int row, int head,
                                  int position, int first, int end, RowState& state) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int key_position = first + lane;
  float score = -INFINITY;
  if (key_position < end && key_position <= position && key_position >= scoring.first_seen(position)) {
    float product = 0.0f;
    for (int d = 0; d < sizes.head_dim; ++d)
      product += tile.queries[row * sizes.head_dim + d] * tile.keys[lane * tile.key_stride + d];
    score = scoring.score(product, head, key_position - position);
  }
  const float new_max = fmaxf(state.max, warp_max(score));
  const float factor = __expf(state.max - new_max);
  const float weight = __expf(score - new_max);
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

// All keys in [begin, end) that they see enter the tile's rows. The rows' tokens are so close together that each row sees
// one of the first KEYS keys: from there on it has a maximum to subtract.
static_assert(ROWS <= KEYS, "a row could see none of the first keys");
template <int WIDTH, class T>
__device__ void attend(const Tile& tile, const T* key_cache, const T* value_cache, const Sequence<T>& sequence,
                       const Sizes& sizes, const Scoring& scoring, int begin, int end,
                       RowState (&states)[ROWS_PER_WARP]) {
  load_queries(tile, sequence, sizes, scoring.scale);
  for (int first = begin; first < end; first += KEYS) {
    load_rows<WIDTH>(key_cache, sequence, sizes, first, end, tile.keys, tile.key_stride);
    load_rows<WIDTH>(value_cache, sequence, sizes, first, end, tile.values, sizes.head_dim);
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < ROWS_PER_WARP; ++turn) {
      const int row = row_of_warp(turn);
      const int token = (tile.first_row + row) / sizes.group();
      if (token >= sequence.num_queries) continue;
      const int head = sequence.kv_head * sizes.group() + (tile.first_row + row) % sizes.group();
      update_row(tile, sizes, scoring, row, head, sequence.position(token), first, end, states[turn]);
    }
    __syncthreads();
  }
}

// One new token a sequence, token s of sequence s, its keys split: partition p takes partition_size of those that it sees
// and leaves to `merge` what a softmax over them needs.
//
//   accumulators  [num_seqs, num_heads, num_partitions, head_dim], sums of exp(score - max) * value
//   maxima, sums  [num_seqs, num_heads, num_partitions], the largest score and the sum of exp(score - max)
//   grid (ceil(group / ROWS) * num_partitions, num_kv_heads, num_seqs)
template <class T, int WIDTH>
__global__ void decode(const T* __restrict__ query, const T* __restrict__ key_cache, const T* __restrict__ value_cache,
                       const int* __restrict__ context_lens, const int* __restrict__ block_tables,
                       const float* __restrict__ alibi_slopes, float* __restrict__ accumulators,
                       float* __restrict__ maxima, float* __restrict__ sums, long long query_stride,
                       long long table_stride, int num_heads, int num_kv_heads, int head_dim, int block_size,
                       float scale, float soft_cap, int window, int partition_size, int num_partitions) {
  DYNAMIC_SHARED(float, shared);
  const Sizes sizes{num_heads, num_kv_heads, head_dim, block_size};
  const Scoring scoring{alibi_slopes, scale, soft_cap, window};
  const int seq = blockIdx.z;
  const int partition = blockIdx.x % num_partitions;
  const Sequence<T> sequence{query + seq * query_stride, block_tables + seq * table_stride, query_stride, 1,
                             context_lens[seq], static_cast<int>(blockIdx.y)};
  const int begin = scoring.first_seen(sequence.context_len - 1) + partition * partition_size;
  const int end = min(sequence.context_len, begin + partition_size);
  if (begin >= end) return;

  const Tile tile(shared, head_dim, blockIdx.x / num_partitions * ROWS);
  RowState states[ROWS_PER_WARP];
  attend<WIDTH>(tile, key_cache, value_cache, sequence, sizes, scoring, begin, end, states);

  const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
  for (int turn = 0; turn < ROWS_PER_WARP; ++turn) {
    const int row = row_of_warp(turn);
    if (tile.first_row + row >= sizes.group()) continue;
    const int head = sequence.kv_head * sizes.group() + tile.first_row + row;
    const long long part = (static_cast<long long>(seq) * num_heads + head) * num_partitions + partition;
    for (int d = lane; d < head_dim; d += WARP_SIZE)
      accumulators[part * head_dim + d] = tile.accumulators[row * head_dim + d];
    if (lane == 0) maxima[part] = states[turn].max;
    if (lane == 0) sums[part] = states[turn].sum;
  }
}

// The partitions of `decode` become the output; arguments as there.
//
//   grid (num_heads, num_seqs), any number of threads
template <class T>
__global__ void merge(const float* __restrict__ accumulators, const float* __restrict__ maxima,
                      const float* __restrict__ sums, const int* __restrict__ context_lens, T* __restrict__ out,
                      long long out_stride, int head_dim, int window, int partition_size, int num_partitions) {
  const int num_seen = min(context_lens[blockIdx.y], window);
  const int num_parts = (num_seen + partition_size - 1) / partition_size;
  if (num_parts == 0) return;
  const long long first_part = (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * num_partitions;
  maxima += first_part;
  sums += first_part;
  accumulators += first_part * head_dim;

  float total_max = -INFINITY;
  for (int part = 0; part < num_parts; ++part) total_max = fmaxf(total_max, maxima[part]);
  float total_sum = 0.0f;
  for (int part = 0; part < num_parts; ++part) total_sum += sums[part] * __expf(maxima[part] - total_max);

  T* row = out + blockIdx.y * out_stride + static_cast<long long>(blockIdx.x) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float sum = 0.0f;
    for (int part = 0; part < num_parts; ++part)
      sum += accumulators[static_cast<long long>(part) * head_dim + d] * __expf(maxima[part] - total_max);
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
  const Scoring scoring{alibi_slopes, scale, soft_cap, window};
  const int seq = blockIdx.z;
  const int first_token = query_starts[seq];
  const Sequence<T> sequence{query + first_token * query_stride, block_tables + seq * table_stride, query_stride,
                             query_starts[seq + 1] - first_token, context_lens[seq], static_cast<int>(blockIdx.y)};
  const Tile tile(shared, head_dim, blockIdx.x * ROWS);
  const int num_rows = sequence.num_queries * sizes.group();
  if (sequence.context_len == 0 || tile.first_row >= num_rows) return;
  const int last_row = min(tile.first_row + ROWS, num_rows) - 1;
  const int begin = scoring.first_seen(sequence.position(tile.first_row / sizes.group()));
  const int end = sequence.position(last_row / sizes.group()) + 1;

  RowState states[ROWS_PER_WARP];
  attend<WIDTH>(tile, key_cache, value_cache, sequence, sizes, scoring, begin, end, states);

#pragma unroll
  for (int turn = 0; turn < ROWS_PER_WARP; ++turn) {
    const int row = tile.first_row + row_of_warp(turn);
    if (row >= num_rows) continue;
    const int head = sequence.kv_head * sizes.group() + row % sizes.group();
    T* token = out + (first_token + row / sizes.group()) * out_stride + head * head_dim;
    for (int d = threadIdx.x % WARP_SIZE; d < head_dim; d += WARP_SIZE)
      token[d] = from_float<T>(tile.accumulators[row_of_warp(turn) * head_dim + d] / states[turn].sum);
  }
}
