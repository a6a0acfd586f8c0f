// Attention of prompt chunks over the paged cache, on tensor cores: half and bf16, heads of some sizes.
//
// A block computes ROWS rows (attention.cuh) of one key head of one sequence, 16 a warp. It goes through the keys that
// its rows see, KEYS at a time, in two tiles in turn: while one is used, asynchronous copies fill the other. So a key or a
// value is read once for all the query heads of a key head and ROWS / group new tokens, and not at all if none of these
// sees it.
//
//   query, out              [num_tokens, num_heads, D], any stride over tokens
//   key_cache, value_cache  [num_blocks, num_kv_heads, block_size, D], contiguous, aligned to 16 bytes
//   query_starts            [num_seqs + 1]: tokens [query_starts[s], query_starts[s + 1]) are the last of sequence s, and
//                           each sees those up to itself
//   context_lens            [num_seqs], tokens in the cache, the new ones included; 0: the sequence is left alone
//   block_tables            [num_seqs, any], table_stride apart; valid as far as the context reaches
//   alibi_slopes            [num_heads], or null
//   window                  a query sees itself and the window - 1 tokens before it
//   soft_cap                0 for none
//   grid (ceil(longest number of new tokens * group / ROWS), num_kv_heads, num_seqs)
//   NUM_WARPS warps; dynamic shared memory for two tiles
//
// Slots beyond a context are not read, whatever they hold. Blocks that have nothing to do end at once.
#include "attention_mma.cuh"

constexpr int NUM_WARPS = 8;
constexpr int ROWS = NUM_WARPS * WARP_ROWS;
template <int D>
constexpr int KEYS = D <= 128 ? 64 : 32;
// Keys of a tile that a warp computes at once: as many as its registers hold scores of, for two blocks on a multiprocessor
// with small heads, for one with others.
template <int D>
constexpr int STEP = D <= 64 ? 32 : D <= 128 ? 64 : 16;

// The rows below num_rows of a warp, first_row + [0, 16) of their sequence, become the output of its tokens.
template <class T, int D>
__device__ void write(const WarpRows<T, D>& rows, const Sequence<T>& sequence, const Sizes& sizes, int first_row,
                      int num_rows, T* out, long long out_stride) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + rows.row_of_lane(i);
    if (row >= num_rows) continue;
    T* to = out + row / sizes.group() * out_stride + sequence.head(row, sizes) * D + rows.column_of_lane();
    const bool is_even = reinterpret_cast<size_t>(to) % sizeof(unsigned) == 0;
    const float factor = 1.0f / rows.sum[i];
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      const float first = rows.out[d][2 * i] * factor;
      const float second = rows.out[d][2 * i + 1] * factor;
      if (is_even) {
        *reinterpret_cast<unsigned*>(to + 8 * d) = pack<T>(first, second);
      } else {
        to[8 * d] = from_float<T>(first);
        to[8 * d + 1] = from_float<T>(second);
      }
    }
  }
}

template <class T, int D>
__global__ void __launch_bounds__(NUM_WARPS* WARP_SIZE, D <= 64 ? 2 : 0)
    prefill_mma(const T* __restrict__ query, const T* __restrict__ key_cache, const T* __restrict__ value_cache,
                const int* __restrict__ query_starts, const int* __restrict__ context_lens,
                const int* __restrict__ block_tables, const float* __restrict__ alibi_slopes, T* __restrict__ out,
                long long query_stride, long long out_stride, long long table_stride, int num_heads, int num_kv_heads,
                int block_size, float scale, float soft_cap, int window) {
  DYNAMIC_SHARED(T, shared);
  using Tile = KeyTile<T, D, KEYS<D>>;
  const Sizes sizes{num_heads, num_kv_heads, D, block_size};
  const Scoring scoring(alibi_slopes, scale, soft_cap, window);
  const int seq = blockIdx.z;
  const int first_token = query_starts[seq];
  const Sequence<T> sequence{query + first_token * query_stride, block_tables + seq * table_stride, query_stride,
                             query_starts[seq + 1] - first_token, context_lens[seq], static_cast<int>(blockIdx.y)};
  // The last tokens, which see the most keys, begin first.
  const int first_row = (gridDim.x - 1 - blockIdx.x) * ROWS;
  const int num_rows = sequence.num_queries * sizes.group();
  if (sequence.context_len == 0 || first_row >= num_rows) return;
  const Range keys = sequence.seen_by(first_row, min(first_row + ROWS, num_rows) - 1, sizes, scoring);

  // Each warp copies some keys of a tile. Lane i looks up where the warp's key i lies a tile ahead, so that no copy waits
  // for the block table.
  constexpr int KEYS_OF_WARP = KEYS<D> / NUM_WARPS;
  const int warp = threadIdx.x / WARP_SIZE;
  const auto find = [&](int first) {
    const int position = first + warp * KEYS_OF_WARP + static_cast<int>(threadIdx.x % WARP_SIZE);
    return position < keys.end ? sequence.cache_row(position, sizes) : -1;
  };
  const auto copy = [&](int stage, int cache_row) {
    const Tile tile(shared + stage * Tile::SIZE);
    tile.template copy<KEYS_OF_WARP>(key_cache, value_cache, cache_row, warp * KEYS_OF_WARP);
    cp_async_commit();
  };
  copy(0, find(keys.begin));
  int next_cache_row = find(keys.begin + KEYS<D>);

  const int first_of_warp = first_row + warp * WARP_ROWS;
  const int last_of_warp = min(first_of_warp + WARP_ROWS, num_rows) - 1;
  WarpRows<T, D> rows(sequence, sizes, scoring, first_of_warp, num_rows);
  const Range seen_by_warp = sequence.seen_by(first_of_warp, last_of_warp, sizes, scoring);
  for (int first = keys.begin, stage = 0; first < keys.end; first += KEYS<D>, stage = 1 - stage) {
    cp_async_wait<0>();
    __syncthreads();  // all warps' copies are there, and all warps are done with the other tile
    if (first + KEYS<D> < keys.end) copy(1 - stage, next_cache_row);
    next_cache_row = find(first + 2 * KEYS<D>);
    if (first_of_warp >= num_rows) continue;
#pragma unroll 1
    for (int i = 0; i < KEYS<D>; i += STEP<D>) {
      if (first + i >= seen_by_warp.end || first + i + STEP<D> <= seen_by_warp.begin) continue;
      rows.update(Tile(shared + stage * Tile::SIZE).template part<STEP<D>>(i), scoring, first + i, keys.end);
    }
  }
  rows.finish();
  write(rows, sequence, sizes, first_of_warp, num_rows, out + first_token * out_stride, out_stride);
}
