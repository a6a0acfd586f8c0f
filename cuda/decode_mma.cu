// Attention of one new token a sequence over the paged cache, on tensor cores: half and bf16, heads of some sizes.
// `merge` of attention.cu makes the output of what it leaves.
//
// A block computes 16 rows (attention.cuh) of one key head of one sequence over one partition of the keys: where a key
// head has up to 16 query heads, each key and value is read once. The warps take turns of KEYS keys. Each has a ring of
// STAGES tiles to itself, which asynchronous copies fill STAGES - 1 turns ahead, so a warp waits for no other until the
// end, when they put their results together.
//
//   query                   [num_seqs, num_heads, D], any stride over tokens
//   key_cache, value_cache  [num_blocks, num_kv_heads, block_size, D], contiguous, aligned to 16 bytes
//   context_lens            [num_seqs], tokens in the cache, the new one included; 0: the sequence is left alone
//   block_tables            [num_seqs, any], table_stride apart; valid as far as the context reaches
//   alibi_slopes            [num_heads], or null
//   accumulators            [num_seqs, num_heads, num_partitions, D], sums of weight * value
//   maxima, sums            [num_seqs, num_heads, num_partitions], the largest score and the sum of the weights
//   window                  the query sees itself and the window - 1 tokens before it
//   soft_cap                0 for none
//   grid (ceil(group / 16) * num_partitions, num_kv_heads, num_seqs); blocks that have nothing to do end at once
//   NUM_WARPS warps; dynamic shared memory for their rings, which the `Results` fit in
//
// Slots beyond a context are not read, whatever they hold.
#include "attention_mma.cuh"

constexpr int KEYS = 16;
template <int D>
constexpr int NUM_WARPS = D <= 128 ? 4 : 2;
template <int D>
constexpr int STAGES = D <= 64 ? 4 : 3;

// What the warps of a block have gathered, each for all rows, in shared memory.
template <int D>
struct Results {
  static constexpr int NUM_RESULTS = NUM_WARPS<D> * WARP_ROWS;
  static constexpr int STRIDE = D + 8;  // spreads the rows that a warp writes at once over the banks
  static constexpr int SIZE = NUM_RESULTS * (STRIDE + 2);

  float* out;     // [NUM_RESULTS, STRIDE]
  float* maxima;  // [NUM_RESULTS]
  float* sums;    // [NUM_RESULTS]

  __device__ explicit Results(float* shared)
      : out(shared), maxima(out + NUM_RESULTS * STRIDE), sums(maxima + NUM_RESULTS) {}

  template <class T>
  __device__ void put(const WarpRows<T, D>& rows) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int result = threadIdx.x / WARP_SIZE * WARP_ROWS + rows.row_of_lane(i);
#pragma unroll
      for (int d = 0; d < D / 8; ++d)
        store(out + result * STRIDE + 8 * d + rows.column_of_lane(),
              Vector<float, 2>{rows.out[d][2 * i], rows.out[d][2 * i + 1]});
      if (threadIdx.x % 4 != 0) continue;  // the other three lanes of a row have the same
      maxima[result] = rows.max[i];
      sums[result] = rows.sum[i];
    }
  }
  __device__ float max_of_row(int row) const {
    float max = -INFINITY;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS<D>; ++warp) max = fmaxf(max, maxima[warp * WARP_ROWS + row]);
    return max;
  }
  // Of `out` or `sums`, once each warp's is brought to the row's largest score.
  __device__ float sum_of_row(const float* from, int stride, int row, float max) const {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NUM_WARPS<D>; ++warp) {
      const int result = warp * WARP_ROWS + row;
      sum += from[result * stride] * exp2f(maxima[result] - max);
    }
    return sum;
  }
};

// What a warp gathers for rows first_row + [0, 16) of its share of the keys.
template <class T, int D>
__device__ WarpRows<T, D> attend(T* shared, const T* key_cache, const T* value_cache, const Sequence<T>& sequence,
                                 const Sizes& sizes, const Scoring& scoring, int first_row, const Range& keys) {
  using Tile = KeyTile<T, D, KEYS>;
  constexpr int AHEAD = STAGES<D> - 1;
  constexpr int STEP = NUM_WARPS<D> * KEYS;
  static_assert(Results<D>::SIZE * sizeof(float) <= NUM_WARPS<D> * STAGES<D> * Tile::SIZE * sizeof(T),
                "the results do not fit where the rings were");
  const int warp = threadIdx.x / WARP_SIZE;
  const int lane = threadIdx.x % WARP_SIZE;
  T* ring = shared + warp * STAGES<D> * Tile::SIZE;
  int first = keys.begin + warp * KEYS;  // key of the warp's turn
  // Lane i looks up where key i lies some turns before it is used, so that no copy waits for the block table.
  const auto find = [&](int turn) {
    const int position = first + turn * STEP + lane;
    return position < keys.end ? sequence.cache_row(position, sizes) : -1;
  };
  const auto copy = [&](int turn, int cache_row, int stage) {
    if (first + turn * STEP < keys.end)
      Tile(ring + stage * Tile::SIZE).template copy<KEYS>(key_cache, value_cache, cache_row, 0);
    cp_async_commit();
  };
  int cache_rows[AHEAD];
#pragma unroll
  for (int turn = 0; turn < AHEAD; ++turn) cache_rows[turn] = find(turn);
#pragma unroll
  for (int turn = 0; turn < AHEAD; ++turn) copy(turn, cache_rows[turn], turn);
  int next_cache_row = find(AHEAD);

  WarpRows<T, D> rows(sequence, sizes, scoring, first_row, sizes.group());
  for (int stage = 0; first < keys.end; first += STEP, stage = (stage + 1) % STAGES<D>) {
    cp_async_wait<AHEAD - 1>();
    __syncwarp();  // all lanes' copies are there, and all lanes are done with the tile that is filled next
    copy(AHEAD, next_cache_row, (stage + AHEAD) % STAGES<D>);
    next_cache_row = find(AHEAD + 1);
    rows.update(Tile(ring + stage * Tile::SIZE), scoring, first, keys.end);
  }
  rows.finish();
  return rows;
}

template <class T, int D>
__global__ void __launch_bounds__(NUM_WARPS<D> * WARP_SIZE)
    decode_mma(const T* __restrict__ query, const T* __restrict__ key_cache, const T* __restrict__ value_cache,
               const int* __restrict__ context_lens, const int* __restrict__ block_tables,
               const float* __restrict__ alibi_slopes, float* __restrict__ accumulators, float* __restrict__ maxima,
               float* __restrict__ sums, long long query_stride, long long table_stride, int num_heads,
               int num_kv_heads, int block_size, float scale, float soft_cap, int window, int least_keys,
               int num_partitions) {
  DYNAMIC_SHARED(T, shared);
  const Sizes sizes{num_heads, num_kv_heads, D, block_size};
  const Scoring scoring(alibi_slopes, scale, soft_cap, window);
  const int seq = blockIdx.z;
  const int partition = blockIdx.x % num_partitions;
  const int first_row = blockIdx.x / num_partitions * WARP_ROWS;
  const Sequence<T> sequence{query + seq * query_stride, block_tables + seq * table_stride, query_stride, 1,
                             context_lens[seq], static_cast<int>(blockIdx.y)};
  const Range keys = partition_of(sequence.context_len, scoring, partition, least_keys, num_partitions);
  if (keys.begin >= keys.end) return;

  const WarpRows<T, D> rows = attend<T, D>(shared, key_cache, value_cache, sequence, sizes, scoring, first_row, keys);
  __syncthreads();  // no warp needs the rings any more
  const Results<D> results(reinterpret_cast<float*>(shared));
  results.put(rows);
  __syncthreads();

  const int num_rows = min(WARP_ROWS, sizes.group() - first_row);
  const long long first_head = static_cast<long long>(seq) * num_heads + sequence.kv_head * sizes.group() + first_row;
  for (int i = threadIdx.x; i < num_rows * D; i += NUM_WARPS<D> * WARP_SIZE) {
    const int row = i / D;
    const int dimension = i % D;
    const float max = results.max_of_row(row);
    const long long part = (first_head + row) * num_partitions + partition;
    accumulators[part * D + dimension] = results.sum_of_row(results.out + dimension, results.STRIDE, row, max);
    if (dimension == 0) maxima[part] = max;
    if (dimension == 0) sums[part] = results.sum_of_row(results.sums, 1, row, max);
  }
}
