// What emulated kernels and their launcher ask of the runtime: CUDA threads as fibers of one OS thread, scheduled until
// they wait for each other. Knows no CUDA header.
#pragma once

#include <cstddef>

namespace emulator {

struct Index {
  unsigned x, y, z;
};

// Of the thread that is running.
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
unsigned lane();

// The block's dynamic shared memory. Every byte is 0xff when a block starts, a NaN in all float types.
void* dynamic_shared();

// Waits for all threads of the block. All must come, and come from the same line.
void sync_threads(int line);

// Waits for the lanes in `mask`, which must all call the same operation at the same line with the same mask. The last one
// to come runs `operation` with each lane's payload (null outside of the mask); then all go on.
using Operation = void (*)(void** payloads, unsigned mask);
void warp_operation(const char* name, int line, unsigned mask, void* payload, Operation operation);

// cp.async of 16 bytes: the copy is done as late as allowed, when its group is waited for.
void start_copy(void* shared, const void* global, bool is_wanted);
void commit_copies();
void wait_for_copies(unsigned num_pending_groups);

// Ends the launch with a message that says which thread it was.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Runs a grid, block after block. False if it failed.
bool launch(Index grid, Index block, size_t shared_bytes, void (*kernel)(void** arguments), void** arguments);

}  // namespace emulator
