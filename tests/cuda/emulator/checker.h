// Watches every access that instrumented kernels make: bounds, alignment, races, uninitialised shared memory, bytes.
#pragma once

#include <cstddef>

namespace checker {

// A point in the execution of a block, as far as barriers order it. Serial numbers of blocks start at 1 and never repeat.
struct Moment {
  unsigned block = 0;
  int thread = 0;
  int warp = 0;
  unsigned num_barriers = 0;
  unsigned num_warp_barriers = 0;
};

void set_enabled(bool is_enabled);
void begin_launch(unsigned first_block);
void begin_block(void* shared, size_t shared_bytes);

void read(const void* address, size_t size);
void write(const void* address, size_t size);

// An asynchronous copy owns its destination from its start to its end.
void start_copy(const void* destination, const void* source, size_t size, bool reads_source);
void finish_copy(const void* destination, size_t size);

// Counts the bank conflicts of one 8x8 matrix of ldmatrix.
void read_matrix_rows(void* const rows[8]);

}  // namespace checker

// What the checker asks of the runtime.
namespace emulator {
bool is_running();
checker::Moment now();
bool is_on_stack(const void* address);
}  // namespace emulator
