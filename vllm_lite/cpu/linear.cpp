// Linear layers with packed weights (`linear.h`), and what is done with their products before anything is stored.
//
//   x                [num_tokens, K], any stride over tokens
//   weight           packed [N, K]
//   bias             [N], or null
#include "linear.h"

#include <algorithm>

#include "task.h"

namespace {

// Of the rows that are multiplied with one panel after the other: half of a small second-level cache.
constexpr int64_t SLAB_BYTES = 192 * 1024;
// So many tiles use a panel that it pays to turn its bf16 into floats first.
constexpr int64_t TILES_WORTH_WIDENING = 3;

int64_t num_panels_of(int64_t size) { return (size + COLUMNS - 1) / COLUMNS; }

// Goes through a product tile by tile. A unit is what one panel's worth of results needs: PARTS panels, part_stride
// elements apart. finish(row, num_rows, unit, tile, tile_stride) takes a unit's sums, part by part within a row.
template <class T, int PARTS, class Finish>
void multiply(const Task& task, const T* x, int64_t x_stride, int64_t num_rows, const T* weight, int64_t num_units,
              int64_t part_stride, int64_t size, const Finish& finish) {
  const int64_t begin = task.begin(num_units), end = task.begin(num_units, 1);
  const int64_t operand_bytes = size * static_cast<int64_t>(sizeof(Operand<T>));
  const int64_t most = std::max<int64_t>(1, SLAB_BYTES / (operand_bytes * MAX_ROWS)) * MAX_ROWS;
  // Several panels at a time, whose sums together fill the registers, from places of this thread's share that lie apart:
  // each is read from its beginning to its end, as memory likes it.
  const int rows_of_tile = static_cast<int>(std::min<int64_t>(num_rows, MAX_ROWS));
  const int num_streams = std::max(1, max_panels(rows_of_tile) / PARTS);
  const int64_t stream_size = (end - begin + num_streams - 1) / num_streams;
  constexpr int TILE_STRIDE = MAX_PANELS * COLUMNS;
  alignas(64) float tile[MAX_ROWS * TILE_STRIDE];
  // Rows as floats, a slab of them, and behind them panels as floats, which are as few as many rows leave registers for.
  float* wide_rows = static_cast<float*>(task.scratch);
  Operand<T>* gathered_panels = static_cast<Operand<T>*>(task.scratch) + std::min(most, num_rows) * size;
  if (IS_WIDENED<T>) {
    const int64_t num_panels = num_rows > MAX_ROWS ? num_streams * PARTS : 0;
    task.require_scratch((std::min(most, num_rows) + num_panels * COLUMNS) * size * static_cast<int64_t>(sizeof(float)));
  }
  for (int64_t first = 0; first < num_rows; first += most) {
    const int64_t rows_of_slab = std::min(most, num_rows - first);
    int64_t stride = x_stride;
    const Operand<T>* slab = operand_rows<T>(x + first * x_stride, stride, rows_of_slab, size, wide_rows);
    const int64_t num_tiles = (rows_of_slab + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t step = 0; step < stream_size; ++step) {
      PackedPanels<T, true> source{{}, size, Ahead::of_stream()};
      int64_t units[MAX_PANELS];
      int num_units_now = 0;
      for (int64_t unit = begin + step; unit < end; unit += stream_size) {
        for (int part = 0; part < PARTS; ++part)
          source.panels[num_units_now * PARTS + part] = weight + part * part_stride + unit * COLUMNS * size;
        units[num_units_now++] = unit;
      }
      const auto for_tiles = [&](const auto& multiply_tile) {
        for (int64_t t = 0; t < num_tiles; ++t) {
          const int64_t row = rows_of_slab * t / num_tiles, next = rows_of_slab * (t + 1) / num_tiles;
          const int rows = static_cast<int>(next - row);
          if (num_tiles > 1) source.ahead = Ahead::of_pass(t, COLUMNS * size * static_cast<int64_t>(sizeof(T)));
          multiply_tile(rows, slab + row * stride);
          for (int u = 0; u < num_units_now; ++u)
            finish(first + row, rows, units[u], tile + u * PARTS * COLUMNS, TILE_STRIDE);
        }
      };
      const int num_panels = num_units_now * PARTS;
      if constexpr (IS_WIDENED<T>) {
        if (num_tiles >= TILES_WORTH_WIDENING) {
          const auto wide = gathered<T, MAX_PANELS>(source, num_panels, gathered_panels);
          for_tiles([&](int rows, const float* x_rows) {
            multiply_rows<float>(rows, x_rows, stride, wide, num_panels, tile, TILE_STRIDE);
          });
          continue;
        }
      }
      for_tiles([&](int rows, const Operand<T>* x_rows) {
        multiply_rows<T>(rows, x_rows, stride, source, num_panels, tile, TILE_STRIDE);
      });
    }
  }
}

// Calls each(column, lanes, where in a row of the tile) for a unit's vectors of columns below `num_columns`.
template <class Each>
INLINE void for_columns(int64_t unit, int64_t num_columns, const Each& each) {
  const int64_t first = unit * COLUMNS, end = std::min(num_columns, first + COLUMNS);
  if (end - first == COLUMNS) {  // so that nothing is asked again for each vector
    UNROLL for (int v = 0; v < VECS; ++v) each(first + v * LANES, LANES, v * LANES);
    return;
  }
  for (int64_t column = first; column < end; column += LANES)
    each(column, static_cast<int>(std::min<int64_t>(LANES, end - column)), column - first);
}

template <class T>
INLINE Vec with_bias(Vec sum, const T* bias, int64_t column, int lanes) {
  return bias == nullptr ? sum : sum + load_first(bias + column, lanes);
}

// out[t] = x[t] @ weight.T + bias
template <class T>
void linear(const Task& task, const T* x, int64_t x_stride, const T* weight, const T* bias, T* out, int64_t out_stride,
            int64_t num_columns, int64_t size) {
  multiply<T, 1>(task, x, x_stride, task.step.num_tokens, weight, num_panels_of(num_columns), 0, size,
                 [&](int64_t row, int rows, int64_t unit, const float* tile, int tile_stride) {
                   for (int r = 0; r < rows; ++r)
                     for_columns(unit, num_columns, [&](int64_t column, int lanes, int64_t at) {
                       const Vec sum = with_bias(load(tile + r * tile_stride + at), bias, column, lanes);
                       store_first(out + (row + r) * out_stride + column, sum, lanes);
                     });
                 });
}

// out[t] += x[t] @ weight.T + bias, the sum rounded before it is added, as a layer of its own would do.
template <class T>
void linear_accumulate(const Task& task, const T* x, int64_t x_stride, const T* weight, const T* bias, T* out,
                       int64_t out_stride, int64_t num_columns, int64_t size) {
  multiply<T, 1>(task, x, x_stride, task.step.num_tokens, weight, num_panels_of(num_columns), 0, size,
                 [&](int64_t row, int rows, int64_t unit, const float* tile, int tile_stride) {
                   for (int r = 0; r < rows; ++r)
                     for_columns(unit, num_columns, [&](int64_t column, int lanes, int64_t at) {
                       T* place = out + (row + r) * out_stride + column;
                       const Vec sum = with_bias(load(tile + r * tile_stride + at), bias, column, lanes);
                       store_first(place, load_first(place, lanes) + round_to<T>(sum), lanes);
                     });
                 });
}

// out[t] = silu(gate) * up, both products of x[t]; weight and bias hold the gate's rows, then from a multiple of 16 on the
// up rows. Each factor is rounded as a layer of its own would do.
template <class T>
void gate_up_silu(const Task& task, const T* x, int64_t x_stride, const T* weight, const T* bias, T* out,
                  int64_t out_stride, int64_t num_columns, int64_t size) {
  const int64_t num_units = num_panels_of(num_columns), half = num_units * COLUMNS;
  multiply<T, 2>(task, x, x_stride, task.step.num_tokens, weight, num_units, half * size, size,
                 [&](int64_t row, int rows, int64_t unit, const float* tile, int tile_stride) {
                   for (int r = 0; r < rows; ++r)
                     for_columns(unit, num_columns, [&](int64_t column, int lanes, int64_t at) {
                       const float* sums = tile + r * tile_stride + at;
                       const T* up_bias = bias == nullptr ? nullptr : bias + half;
                       const Vec gate = round_to<T>(with_bias(load(sums), bias, column, lanes));
                       const Vec up = round_to<T>(with_bias(load(sums + COLUMNS), up_bias, column, lanes));
                       store_first(out + (row + r) * out_stride + column, round_to<T>(silu(gate)) * up, lanes);
                     });
                 });
}

// gathered[r] = hidden[token_indices[r]], which the two heads read.
template <class T>
void gather_rows(const Task& task, const T* hidden, int64_t hidden_stride, const int32_t* token_indices, T* gathered,
                 int64_t size) {
  for (int64_t r = task.begin(task.step.num_rows); r < task.begin(task.step.num_rows, 1); ++r)
    memcpy(gathered + r * size, hidden + token_indices[r] * hidden_stride, size * sizeof(T));
}

// out[r] = x[r] @ weight.T in float32, for the sampled rows.
template <class T>
void logits(const Task& task, const T* x, const T* weight, float* out, int64_t out_stride, int64_t num_columns,
            int64_t size) {
  multiply<T, 1>(task, x, size, task.step.num_rows, weight, num_panels_of(num_columns), 0, size,
                 [&](int64_t row, int rows, int64_t unit, const float* tile, int tile_stride) {
                   for (int r = 0; r < rows; ++r)
                     for_columns(unit, num_columns, [&](int64_t column, int lanes, int64_t at) {
                       store_first(out + (row + r) * out_stride + column, load(tile + r * tile_stride + at), lanes);
                     });
                 });
}

// Each thread's largest logit of each row and its id, the lower id in a tie; a NaN counts as largest.
//
//   best_values, best_ids  [num_threads, max_rows]
template <class T>
void greedy_parts(const Task& task, const T* x, const T* weight, float* best_values, int32_t* best_ids, int64_t max_rows,
                  int64_t num_columns, int64_t size) {
  float* values = best_values + task.thread * max_rows;
  int32_t* ids = best_ids + task.thread * max_rows;
  std::fill(values, values + task.step.num_rows, -INFINITY);
  std::fill(ids, ids + task.step.num_rows, INT32_MAX);
  multiply<T, 1>(task, x, size, task.step.num_rows, weight, num_panels_of(num_columns), 0, size,
                 [&](int64_t row, int rows, int64_t unit, const float* tile, int tile_stride) {
                   const int64_t first = unit * COLUMNS;
                   const int count = static_cast<int>(std::min<int64_t>(COLUMNS, num_columns - first));
                   for (int r = 0; r < rows; ++r) {
                     const float* sums = tile + r * tile_stride;
                     // Mostly nothing is larger than what is known, which vectors tell fast.
                     Vec most = splat(-INFINITY);
                     bool has_nan = false;
                     int c = 0;
                     for (; c + LANES <= count; c += LANES) {
                       const Vec part = load(sums + c);
                       most = vec_max(most, part);
                       has_nan |= max_of(part != part ? splat(1.0f) : Vec{}) > 0.0f;
                     }
                     float& value = values[row + r];
                     if (c == count && !has_nan && max_of(most) < value) continue;
                     for (c = 0; c < count && value == value; ++c) {
                       const int32_t id = static_cast<int32_t>(first + c);
                       // Not so for a NaN. Columns do not come in their order.
                       if (sums[c] < value || (sums[c] == value && id > ids[row + r])) continue;
                       value = sums[c];
                       ids[row + r] = id;
                     }
                   }
                 });
}

// out[r] = the id of row r's largest logit over all threads, -1 where that is not finite.
void greedy_pick(const Task& task, const float* best_values, const int32_t* best_ids, int64_t max_rows, int32_t* out) {
  if (task.thread != 0) return;
  for (int64_t r = 0; r < task.step.num_rows; ++r) {
    float value = best_values[r];
    int32_t id = best_ids[r];
    for (int t = 1; t < task.num_threads && value == value; ++t) {
      const float other = best_values[t * max_rows + r];  // of later ids
      if (other <= value) continue;
      value = other;
      id = best_ids[t * max_rows + r];
    }
    out[r] = std::isfinite(value) ? id : -1;
  }
}

// Packs a weight [num_rows, size] in its place; num_rows is a multiple of 16.
template <class T>
void pack(const Task& task, T* weight, int64_t num_rows, int64_t size) {
  const int64_t num_panels = num_rows / COLUMNS;
  T* rows = static_cast<T*>(task.scratch);
  for (int64_t p = task.begin(num_panels); p < task.begin(num_panels, 1); ++p) {
    T* panel = weight + p * COLUMNS * size;
    // A panel that does not fit the scratch memory is no weight of any model: the caller checks.
    memcpy(rows, panel, COLUMNS * size * sizeof(T));
    for (int64_t k = 0; k < size; k += STEP<T>)
      for (int c = 0; c < COLUMNS; ++c)
        memcpy(panel + k * COLUMNS + c * STEP<T>, rows + c * size + k, STEP<T> * sizeof(T));
  }
}

}  // namespace

EXPORT_TYPES(linear, linear)
EXPORT_TYPES(linear_accumulate, linear_accumulate)
EXPORT_TYPES(gate_up_silu, gate_up_silu)
EXPORT_TYPES(gather_rows, gather_rows)
EXPORT_TYPES(logits, logits)
EXPORT_TYPES(greedy_parts, greedy_parts)
EXPORT(greedy_pick, greedy_pick)
EXPORT_TYPES(pack, pack)
