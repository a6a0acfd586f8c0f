// Rows of embedding tables.
#include "linear.h"
#include "task.h"
#include "vector.h"

namespace {

// Of a packed table (`linear.h`): out[t] = weight[token_ids[t]].
//
//   token_ids  [num_tokens], each below the table's rows
//   out        [num_tokens, size], contiguous
template <class T>
void embedding(const Task& task, const int32_t* token_ids, const T* weight, T* out, int64_t size) {
  for (int64_t t = task.begin(task.step.num_tokens); t < task.begin(task.step.num_tokens, 1); ++t) {
    const int64_t id = token_ids[t];
    const T* column = weight + id / COLUMNS * COLUMNS * size + id % COLUMNS * STEP<T>;
    for (int64_t k = 0; k < size; k += STEP<T>) memcpy(out + t * size + k, column + k * COLUMNS, STEP<T> * sizeof(T));
  }
}

// Of a plain table [num_positions, size]: hidden[t] += table[positions[t]].
//
//   positions  [num_tokens], each below the table's rows
//   hidden     [num_tokens, size], contiguous
template <class T>
void position_embedding(const Task& task, const int32_t* positions, const T* table, T* hidden, int64_t size) {
  for (int64_t t = task.begin(task.step.num_tokens); t < task.begin(task.step.num_tokens, 1); ++t) {
    const T* row = table + positions[t] * size;
    T* to = hidden + t * size;
    for (int64_t i = 0; i < size; i += LANES) {
      const int lanes = size - i < LANES ? static_cast<int>(size - i) : LANES;
      store_first(to + i, load_first(to + i, lanes) + load_first(row + i, lanes), lanes);
    }
  }
}

}  // namespace

EXPORT_TYPES(embedding, embedding)
EXPORT_TYPES(position_embedding, position_embedding)
