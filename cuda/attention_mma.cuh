// Attention on tensor cores, one warp's share: 16 rows against a tile of keys and values in shared memory.
//
// T is half or bf16, D the size of a head. The queries of the rows, the largest scores, the sums of the weights and the
// output stay in registers, as m16n8k16 lays them out: of every 16x8 result a lane has columns 2 * (lane % 4) and the
// next, of rows lane / 4 and lane / 4 + 8. A result of the first product, scores = queries * keys, is laid out as the
// second one, out += weights * values, wants its left side, so the weights need not move.
#pragma once

#include "attention.cuh"
#include "compat.cuh"
#include "vector.cuh"

constexpr int WARP_ROWS = 16;
constexpr int CHUNK = 8;  // elements of 16 bytes

// How rows of D elements lie in shared memory: so that the same chunk of 8 consecutive rows, which ldmatrix reads at once,
// is in all 32 banks. Where a row is a multiple of 128 bytes, its chunks change places; else rows are an odd number of
// chunks apart.
template <int D>
struct Rows {
  static constexpr int CHUNKS = D / CHUNK;
  static constexpr bool IS_SWIZZLED = CHUNKS % 8 == 0;
  static constexpr int STRIDE = CHUNK * (IS_SWIZZLED ? CHUNKS : CHUNKS | 1);

  __device__ static int offset(int row, int chunk) {
    return row * STRIDE + CHUNK * (IS_SWIZZLED ? chunk ^ row % 8 : chunk);
  }
};

// KEYS keys and their values in shared memory, in `Rows`.
template <class T, int D, int KEYS>
struct KeyTile {
  static constexpr int SIZE = 2 * KEYS * Rows<D>::STRIDE;  // elements

  T* keys;
  T* values;
  __device__ KeyTile(T* keys, T* values) : keys(keys), values(values) {}
  __device__ explicit KeyTile(T* shared) : KeyTile(shared, shared + SIZE / 2) {}

  // The part that begins with key `first`.
  template <int NUM_KEYS>
  __device__ KeyTile<T, D, NUM_KEYS> part(int first) const {
    static_assert(NUM_KEYS % 8 == 0, "the chunks of a part would be looked for in other places");
    return {keys + first * Rows<D>::STRIDE, values + first * Rows<D>::STRIDE};
  }

  // A warp starts to copy NUM_ROWS rows, the first one to first_row. Lane i has row i's cache row; a negative one stands
  // for zeros, which no weight turns into NaN.
  template <int NUM_ROWS>
  __device__ void copy(const T* key_cache, const T* value_cache, int cache_row, int first_row) const {
    constexpr int CHUNKS = Rows<D>::CHUNKS;
    static_assert(NUM_ROWS * CHUNKS % WARP_SIZE == 0, "some lanes would miss a shuffle");
#pragma unroll 4
    for (int turn = 0; turn < NUM_ROWS * CHUNKS / WARP_SIZE; ++turn) {
      const int i = turn * WARP_SIZE + threadIdx.x % WARP_SIZE;
      const int row = i / CHUNKS;
      const int chunk = i % CHUNKS;
      const int source_row = __shfl_sync(ALL_LANES, cache_row, row);
      const long long source = static_cast<long long>(max(source_row, 0)) * D + chunk * CHUNK;
      const int destination = Rows<D>::offset(first_row + row, chunk);
      cp_async_16(keys + destination, key_cache + source, source_row >= 0);
      cp_async_16(values + destination, value_cache + source, source_row >= 0);
    }
  }
};

// The rows of a warp. Of all that is said for a row, a lane has it of rows lane / 4 and lane / 4 + 8.
template <class T, int D>
struct WarpRows {
  unsigned queries[D / 16][4];
  float out[D / 8][4] = {};  // sums of weight * value
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {};  // of weights, those of the lane's own columns
  float slope[2];
  int position[2];

  // Rows first_row + [0, 16) of a sequence; those from num_rows on repeat the last one.
  __device__ WarpRows(const Sequence<T>& sequence, const Sizes& sizes, const Scoring& scoring, int first_row,
                      int num_rows) {
    const T* query[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(first_row + row_of_lane(i), num_rows - 1);
      query[i] = sequence.query_of(row, sizes);
      slope[i] = scoring.slope(sequence.head(row, sizes));
      position[i] = sequence.position(row, sizes);
    }
    const bool is_even = (reinterpret_cast<size_t>(query[0]) | reinterpret_cast<size_t>(query[1])) % 4 == 0;
    if (is_even)
      load_queries<true>(query);
    else
      load_queries<false>(query);
  }

  __device__ static int row_of_lane(int i) { return threadIdx.x % WARP_SIZE / 4 + 8 * i; }
  __device__ static int column_of_lane() { return threadIdx.x % 4 * 2; }

  // The keys [first, min(first + KEYS, end)) enter, as far as the rows see them.
  template <int KEYS>
  __device__ void update(const KeyTile<T, D, KEYS>& tile, const Scoring& scoring, int first, int end) {
    float scores[KEYS / 8][4] = {};
    multiply_keys<KEYS>(tile.keys, scores);
    score_keys<KEYS>(scoring, first, end, scores);
    weigh_keys<KEYS>(scores);
    multiply_values<KEYS>(tile.values, scores);
  }

  // Makes the sums those of whole rows, once all keys are in.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], 1);
      sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], 2);
    }
  }

 private:
  // Pairs of elements; where they lie at even places, each in one access.
  template <bool IS_EVEN>
  __device__ void load_queries(const T* const (&query)[2]) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const T* pair = query[i % 2] + 16 * k + 8 * (i / 2) + column_of_lane();
        queries[k][i] = IS_EVEN ? *reinterpret_cast<const unsigned*>(pair) : pack<T>(to_float(pair[0]), to_float(pair[1]));
      }
    }
  }

  template <int KEYS>
  __device__ void multiply_keys(const T* keys, float (&scores)[KEYS / 8][4]) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        unsigned matrices[4];  // keys 0 to 7 in both halves of the 16 dimensions, then keys 8 to 15
        ldmatrix_x4(matrices, keys + Rows<D>::offset(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
        mma_m16n8k16<T>(scores[2 * n], queries[k], matrices);
        mma_m16n8k16<T>(scores[2 * n + 1], queries[k], matrices + 2);
      }
    }
  }

  // Products become scores, -infinity for a key that its row does not see.
  template <int KEYS>
  __device__ void score_keys(const Scoring& scoring, int first, int end, float (&scores)[KEYS / 8][4]) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + 8 * n + column_of_lane() + e % 2;
        scores[n][e] = scoring.score(scores[n][e], slope[e / 2], key - position[e / 2]);
      }
    }
    const int first_seen[2] = {scoring.first_seen(position[0]), scoring.first_seen(position[1])};
    const int end_seen[2] = {min(end, position[0] + 1), min(end, position[1] + 1)};
    if (first >= first_seen[1] && first + KEYS <= end_seen[0]) return;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + 8 * n + column_of_lane() + e % 2;
        if (key < first_seen[e / 2] || key >= end_seen[e / 2]) scores[n][e] = -INFINITY;
      }
    }
  }

  // Scores become weights; what was gathered before is brought to the new largest score.
  template <int KEYS>
  __device__ void weigh_keys(float (&scores)[KEYS / 8][4]) {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float new_max = max[i];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) new_max = fmaxf(new_max, fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(ALL_LANES, new_max, 2));
      // A row that has seen no key yet subtracts 0: infinity from infinity would be NaN.
      const float base = new_max == -INFINITY ? 0.0f : new_max;
      factor[i] = exp2f(max[i] - base);
      max[i] = new_max;
      sum[i] *= factor[i];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          scores[n][e] = exp2f(scores[n][e] - base);
          sum[i] += scores[n][e];
        }
      }
    }
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[d][e] *= factor[e / 2];
    }
  }

  template <int KEYS>
  __device__ void multiply_values(const T* values, const float (&weights)[KEYS / 8][4]) {
    const int lane = threadIdx.x % WARP_SIZE;
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      const float(&left)[4] = weights[2 * n];
      const float(&right)[4] = weights[2 * n + 1];
      const unsigned rounded[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
                                   pack<T>(right[2], right[3])};
#pragma unroll
      for (int d = 0; d < D / 8; d += 2) {
        unsigned matrices[4];  // 8 dimensions of keys 0 to 7 and 8 to 15, then the next 8
        ldmatrix_x4_trans(matrices, values + Rows<D>::offset(16 * n + lane % 16, d + lane / 16));
        mma_m16n8k16<T>(out[d], rounded, matrices);
        mma_m16n8k16<T>(out[d + 1], rounded, matrices + 2);
      }
    }
  }
};
