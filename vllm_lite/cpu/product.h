// The innermost loop of linear layers and attention alike: some rows times panels of 16 columns.
//
// Every element of a product is one chain of multiply-adds in the order of the inner dimension, whatever the number of
// rows and panels: a row's bits do not depend on what else is computed.
#pragma once

#include "vector.h"

// Rows and panels of a tile: as many sums as fit the registers.
constexpr int MAX_ROWS = LANES == 16 ? 12 : 6;
constexpr int max_panels(int rows) {
  if (LANES == 16) return rows <= 2 ? 8 : rows <= 6 ? 4 : 2;
  return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}
constexpr int MAX_PANELS = 8;

// tile[r][16 p + c] = sum over k of x[r][k] * panel p's [k][c]; rows of the tile lie tile_stride apart.
//
// `panels` says where they are. Their inner dimension may lie in several places: panels.enter(segment) for each, in which
// panels.words(panel, k, vector) gives the columns' words of step k.
template <class T, int ROWS, int PANELS, class Panels>
static void multiply_tile(const Operand<T>* __restrict x, int64_t x_stride, Panels panels, float* __restrict tile,
                          int tile_stride) {
  constexpr bool IS_TIGHT = LANES == 8 && ROWS * PANELS * VECS > 8;  // of 16 registers
  // With 32 registers, a row's value is multiplied with all panels while it is in one; with 16, panels come in turn.
  constexpr int TOGETHER = LANES == 16 ? PANELS : 1;
  Vec sums[ROWS][PANELS * VECS] = {};
  TileRows<Operand<T>, ROWS> rows(x, x_stride);
  for (int64_t segment = 0; segment < panels.num_segments(); ++segment) {
    panels.enter(segment);
    const int64_t size = panels.segment_size();
    for (int64_t k = 0; k < size; k += STEP<T>) {
      repeat<PANELS / TOGETHER>([&](auto group) INLINED {
        const auto words = [&](int v) INLINED { return panels.words(group * TOGETHER + v / VECS, k, v % VECS); };
        Vec* sums_of_group = &sums[0][group * TOGETHER * VECS];
        multiply_add<T, ROWS, TOGETHER * VECS, IS_TIGHT>(sums_of_group, PANELS * VECS, words, rows);
        if (IS_TIGHT && PANELS > 1) drop_loaded_values();
      });
      rows.advance(STEP<T>);
    }
  }
  repeat<ROWS>([&](auto r) INLINED {
    repeat<PANELS * VECS>([&](auto i) INLINED { store(tile + r * tile_stride + i * LANES, sums[r][i]); });
  });
}

template <class T, int ROWS, int PANELS, class Source>
static void multiply_panels(const Operand<T>* x, int64_t x_stride, const Source& source, int first, int end, float* tile,
                            int tile_stride) {
  for (; first + PANELS <= end; first += PANELS)
    multiply_tile<T, ROWS, PANELS>(x, x_stride, source.template take<PANELS>(first), tile + first * COLUMNS, tile_stride);
  if constexpr (PANELS > 1)
    if (first < end) multiply_panels<T, ROWS, PANELS / 2>(x, x_stride, source, first, end, tile, tile_stride);
}

// The same for numbers of rows (MAX_ROWS at most) and panels known at run time, MOST of them side by side in a tile.
// source.take<N>(p) gives N panels from the p-th on.
template <class T, int MOST = MAX_PANELS, int ROWS = MAX_ROWS, class Source>
INLINE void multiply_rows(int rows, const Operand<T>* x, int64_t x_stride, const Source& source, int num_panels,
                          float* tile, int tile_stride) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS)
      multiply_panels<T, ROWS, (MOST < max_panels(ROWS) ? MOST : max_panels(ROWS))>(x, x_stride, source, 0, num_panels,
                                                                                    tile, tile_stride);
    else
      multiply_rows<T, MOST, ROWS - 1>(rows, x, x_stride, source, num_panels, tile, tile_stride);
  }
}
