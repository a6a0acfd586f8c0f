// Rows of a packed embedding table (`linear.h`): out[t] = weight[token_ids[t]].
//
//   token_ids  [num_tokens], each below the table's rows
//   out        [num_tokens, size], contiguous
#include "linear.h"
#include "task.h"

namespace {

template <class T>
void embedding(const Task& task, const int32_t* token_ids, const T* weight, T* out, int64_t size) {
  for (int64_t t = task.begin(task.step.num_tokens); t < task.begin(task.step.num_tokens, 1); ++t) {
    const int64_t id = token_ids[t];
    const T* column = weight + id / COLUMNS * COLUMNS * size + id % COLUMNS * STEP<T>;
    for (int64_t k = 0; k < size; k += STEP<T>) memcpy(out + t * size + k, column + k * COLUMNS, STEP<T> * sizeof(T));
  }
}

}  // namespace

EXPORT_TYPES(embedding, embedding)
