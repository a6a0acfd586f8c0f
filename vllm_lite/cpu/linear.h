// How a weight [N, K] is packed: in panels of 16 of its rows, which are columns of the product. The panel of rows 16p to
// 16p + 15 is [K][16] floats, or [K / 2][16][2] bf16: 64 bytes for each step along K. The last panel is filled up.
#pragma once

#include "product.h"

// Some panels as a source of `multiply_rows`. IS_STREAM: they come from memory, and are asked for ahead of their use.
template <class T, bool IS_STREAM>
struct PackedPanels {
  static constexpr int64_t BYTES_AHEAD = 2048;
  const T* panels[MAX_PANELS];
  int64_t size;

  PackedPanels from(int first) const {
    PackedPanels result{{}, size};
    for (int p = first; p < MAX_PANELS; ++p) result.panels[p - first] = panels[p];
    return result;
  }
  int64_t num_segments() const { return 1; }
  int64_t segment_size() const { return size; }
  void enter(int64_t) {}
  IntVec words(int panel, int64_t k, int v) const {
    const T* step = panels[panel] + k * COLUMNS;
    if (IS_STREAM && v == 0) __builtin_prefetch(reinterpret_cast<const char*>(step) + BYTES_AHEAD);
    return load_words(step + v * LANES * STEP<T>);
  }
};
