// Panels side by side in memory.
//
// How a weight [N, K] is packed: in panels of 16 of its rows, which are columns of the product. The panel of rows 16p to
// 16p + 15 is [K][16] floats, or [K / 2][16][2] bf16: 64 bytes for each step along K. The last panel is filled up.
#pragma once

#include <algorithm>

#include "product.h"

// Whether products with many rows take T's panels as floats.
template <class T>
constexpr bool IS_WIDENED = sizeof(Operand<T>) != sizeof(T);

// What is asked for ahead of its use while a panel is read: for each byte of it one, or a half, from `start` on, which is
// relative to the panel. So the memory always has something to do.
struct Ahead {
  static constexpr int64_t STREAM_BYTES = 2048;
  int64_t start, shift;  // the bytes of the panel >> shift

  // Each panel is read once: what comes next lies behind.
  static Ahead of_stream() { return {STREAM_BYTES, 0}; }
  // The panel is read again and again. During the first two times the next one comes, which lies behind it.
  static Ahead of_pass(int64_t pass, int64_t panel_bytes) {
    return {panel_bytes + std::min<int64_t>(pass, 1) * (panel_bytes / 2), 1};
  }
};

// Some panels as a source of `multiply_rows`. IS_STREAM: they come from memory, and are asked for ahead of their use.
template <class T, bool IS_STREAM, int PANELS = MAX_PANELS>
struct PackedPanels {
  const T* panels[PANELS];
  int64_t size;
  Ahead ahead;

  template <int N>
  PackedPanels<T, IS_STREAM, N> take(int first) const {
    PackedPanels<T, IS_STREAM, N> result{{}, size, ahead};
    UNROLL for (int p = 0; p < N; ++p) result.panels[p] = panels[first + p];
    return result;
  }
  int64_t num_segments() const { return 1; }
  int64_t segment_size() const { return size; }
  void enter(int64_t) {}
  IntVec words(int panel, int64_t k, int v) const {
    const T* step = panels[panel] + k * COLUMNS;
    if (IS_STREAM && v == 0) {
      const int64_t bytes = k * COLUMNS * static_cast<int64_t>(sizeof(T));
      const char* wanted = reinterpret_cast<const char*>(panels[panel]) + ahead.start + (bytes >> ahead.shift);
      __builtin_prefetch(wanted, 0, 0);  // to be read once a step: whatever else lies in the larger caches may stay there
    }
    return load_words(step + v * LANES * STEP<T>);
  }
};

// `count` panels of any source side by side in `memory`, as floats where products take T as floats. Worth it where many
// tiles use them; every element's sum stays the same.
template <class T, int MOST, class Panels>
PackedPanels<Operand<T>, false, MOST> gathered(Panels panels, int count, Operand<T>* memory) {
  PackedPanels<Operand<T>, false, MOST> result{{}, panels.num_segments() * panels.segment_size(), {}};
  for (int p = 0; p < count; ++p) result.panels[p] = memory + p * COLUMNS * result.size;
  int64_t start = 0;
  for (int64_t segment = 0; segment < panels.num_segments(); ++segment) {
    panels.enter(segment);
    for (int p = 0; p < count; ++p)
      for (int64_t k = 0; k < panels.segment_size(); k += STEP<T>)
        UNROLL for (int v = 0; v < VECS; ++v) {
          Operand<T>* to = memory + (p * result.size + start + k) * COLUMNS + v * LANES * STEP<Operand<T>>;
          const IntVec words = panels.words(p, k, v);
          if constexpr (!IS_WIDENED<T>) {
            store_words(to, words);
          } else {
            store(to, (Vec)(words << 16));
            store(to + COLUMNS, (Vec)(words & static_cast<int32_t>(0xffff0000)));
          }
        }
    start += panels.segment_size();
  }
  return result;
}
