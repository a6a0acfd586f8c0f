// The checker: shadow memory for every watched buffer and for shared memory, fed by the calls that -fsanitize=thread
// inserts before each access. We supply these calls in place of the sanitizer's own library.
//
// Only barriers order accesses: __syncthreads all threads of a block, __syncwarp those of a warp. Nothing orders the
// blocks of a launch.
#include "checker.h"

#include <cstdint>
#include <string>
#include <vector>

#include "runtime.h"

namespace checker {
namespace {

constexpr size_t CELL_BYTES = 2;
constexpr int SEVERAL = -1;

// Accesses by one thread, or by SEVERAL threads of a warp, or of SEVERAL warps, or of SEVERAL blocks.
struct Accesses {
  Moment last;
  bool is_by_several_blocks = false;
};

struct Cell {
  Moment written;
  Accesses reads;
  bool is_being_copied_to = false;
};

struct Buffer {
  const char* begin = nullptr;
  size_t size = 0;
  std::string name;
  bool is_read_only = false;
  bool is_shared = false;
  std::vector<Cell> cells;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;

  bool contains(const char* address) const { return address >= begin && address < begin + size; }
  ptrdiff_t distance(const char* address) const {
    return address < begin ? begin - address : address - (begin + size);
  }
};

bool enabled = false;
unsigned first_block_of_launch = 1;
std::vector<Buffer> buffers;
Buffer shared;
uint64_t num_bank_conflicts = 0;

const char* verb(bool is_write) { return is_write ? "write" : "read"; }

// Constants of the kernels' own library.
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
bool is_in_own_library(const char* address) { return address >= &__ehdr_start && address < &_end; }

[[noreturn]] void fail_outside(const char* address, size_t size, bool is_write) {
  const Buffer* nearest = shared.size > 0 ? &shared : nullptr;
  for (const Buffer& buffer : buffers)
    if (nearest == nullptr || buffer.distance(address) < nearest->distance(address)) nearest = &buffer;
  if (nearest == nullptr) emulator::fail("%s of %zu bytes where no buffer is", verb(is_write), size);
  emulator::fail("%s of %zu bytes out of bounds at %s[%td], which has %zu bytes", verb(is_write), size,
                 nearest->name.c_str(), address - nearest->begin, nearest->size);
}

// The buffer that holds the whole access; null where the kernel's own stack or constants are meant.
Buffer* find(const char* address, size_t size, bool is_write) {
  if (emulator::is_on_stack(address)) return nullptr;
  Buffer* found = shared.contains(address) ? &shared : nullptr;
  for (Buffer& buffer : buffers)
    if (buffer.contains(address)) found = &buffer;
  if (found == nullptr && is_in_own_library(address)) return nullptr;
  if (found == nullptr || address + size > found->begin + found->size) fail_outside(address, size, is_write);
  return found;
}

bool is_unordered(const Accesses& before, const Moment& now, bool is_shared) {
  const Moment& last = before.last;
  const unsigned oldest = is_shared ? now.block : first_block_of_launch;
  if (last.block < oldest) return false;
  if (last.block != now.block || before.is_by_several_blocks) return true;
  if (last.num_barriers != now.num_barriers || last.thread == now.thread) return false;
  return last.warp != now.warp || last.num_warp_barriers == now.num_warp_barriers;
}

// Adds a read; those that barriers have put before all that is still to come are forgotten.
void add_read(Accesses& reads, const Moment& now, bool is_shared) {
  const Moment& last = reads.last;
  const bool is_of_launch = !is_shared && last.block >= first_block_of_launch;
  const bool is_by_several_blocks = is_of_launch && (reads.is_by_several_blocks || last.block != now.block);
  Accesses merged{now, is_by_several_blocks};
  if (last.block == now.block && last.num_barriers == now.num_barriers) {
    if (last.warp != now.warp) merged.last.warp = merged.last.thread = SEVERAL;
    if (last.num_warp_barriers == now.num_warp_barriers && last.thread != now.thread) merged.last.thread = SEVERAL;
  }
  reads = merged;
}

void check_order(const Buffer& buffer, const char* address, const Accesses& before, const Moment& now, const char* what) {
  if (!is_unordered(before, now, buffer.is_shared)) return;
  emulator::fail("race: %s of %s[%td] with no barrier between (the other thread: %d%s)", what, buffer.name.c_str(),
                 address - buffer.begin, before.last.thread,
                 before.last.block != now.block || before.is_by_several_blocks ? " of another block" : "");
}

void access_cell(Buffer& buffer, Cell& cell, const char* address, const Moment& now, bool is_write) {
  if (cell.is_being_copied_to)
    emulator::fail("%s of %s[%td] while an asynchronous copy to it has not been waited for", verb(is_write),
                   buffer.name.c_str(), address - buffer.begin);
  check_order(buffer, address, Accesses{cell.written}, now, is_write ? "write after a write" : "read after a write");
  if (is_write) {
    check_order(buffer, address, cell.reads, now, "write after a read");
    cell.written = now;
  } else {
    if (buffer.is_shared && cell.written.block != now.block)
      emulator::fail("read of uninitialised %s[%td]", buffer.name.c_str(), address - buffer.begin);
    add_read(cell.reads, now, buffer.is_shared);
  }
}

template <class Visit>
void for_each_cell(Buffer& buffer, const char* address, size_t size, Visit visit) {
  const size_t begin = address - buffer.begin;
  for (size_t cell = begin / CELL_BYTES; cell * CELL_BYTES < begin + size; ++cell) visit(buffer.cells[cell]);
}

void access(const void* pointer, size_t size, bool is_write) {
  if (!enabled || !emulator::is_running()) return;
  const char* address = static_cast<const char*>(pointer);
  Buffer* buffer = find(address, size, is_write);
  if (buffer == nullptr) return;
  if (is_write && buffer->is_read_only)
    emulator::fail("write to read-only %s[%td]", buffer->name.c_str(), address - buffer->begin);
  (is_write ? buffer->bytes_written : buffer->bytes_read) += size;
  const Moment now = emulator::now();
  for_each_cell(*buffer, address, size, [&](Cell& cell) { access_cell(*buffer, cell, address, now, is_write); });
}

void access_aligned(const void* pointer, size_t size, bool is_write) {
  if (enabled && emulator::is_running() && reinterpret_cast<uintptr_t>(pointer) % size != 0)
    emulator::fail("misaligned %s of %zu bytes", verb(is_write), size);
  access(pointer, size, is_write);
}

}  // namespace

void set_enabled(bool is_enabled) { enabled = is_enabled; }

void begin_launch(unsigned first_block) { first_block_of_launch = first_block; }

void begin_block(void* begin, size_t size) {
  shared.begin = static_cast<char*>(begin);
  shared.size = size;
  shared.name = "shared memory";
  shared.is_shared = true;
  if (enabled) shared.cells.assign(size / CELL_BYTES + 1, Cell{});
}

void read(const void* address, size_t size) { access(address, size, false); }

void write(const void* address, size_t size) { access(address, size, true); }

void start_copy(const void* destination, const void* source, size_t size, bool reads_source) {
  if (!enabled) return;
  if (reads_source) read(source, size);
  write(destination, size);
  const char* address = static_cast<const char*>(destination);
  if (!shared.contains(address)) emulator::fail("asynchronous copy to an address outside of shared memory");
  for_each_cell(shared, address, size, [](Cell& cell) { cell.is_being_copied_to = true; });
}

void finish_copy(const void* destination, size_t size) {
  if (!enabled) return;
  const Moment now = emulator::now();
  for_each_cell(shared, static_cast<const char*>(destination), size, [&](Cell& cell) {
    cell.is_being_copied_to = false;
    cell.written = now;
  });
}

void read_matrix_rows(void* const rows[8]) {
  if (!enabled) return;
  constexpr int NUM_BANK_GROUPS = 8;  // of 16 bytes
  int most = 1;
  for (int group = 0; group < NUM_BANK_GROUPS; ++group) {
    int num_rows = 0;
    for (int i = 0; i < 8; ++i) {
      bool is_new = reinterpret_cast<uintptr_t>(rows[i]) / 16 % NUM_BANK_GROUPS == static_cast<uintptr_t>(group);
      for (int j = 0; j < i; ++j) is_new = is_new && rows[j] != rows[i];
      num_rows += is_new;
    }
    most = num_rows > most ? num_rows : most;
  }
  num_bank_conflicts += most - 1;
}

}  // namespace checker

extern "C" {

// For Python: buffers to watch, and what was counted since.
void emulator_watch(const void* begin, size_t size, const char* name, int is_read_only) {
  checker::Buffer buffer;
  buffer.begin = static_cast<const char*>(begin);
  buffer.size = size;
  buffer.name = name;
  buffer.is_read_only = is_read_only != 0;
  buffer.cells.resize(size / checker::CELL_BYTES + 1);
  checker::buffers.push_back(buffer);
}

void emulator_unwatch_all() {
  checker::buffers.clear();
  checker::num_bank_conflicts = 0;
}

void emulator_bytes(const char* name, uint64_t* read_and_written) {
  for (const checker::Buffer& buffer : checker::buffers) {
    if (buffer.name != name) continue;
    read_and_written[0] = buffer.bytes_read;
    read_and_written[1] = buffer.bytes_written;
  }
}

uint64_t emulator_bank_conflicts() { return checker::num_bank_conflicts; }

// What -fsanitize=thread calls.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define ACCESSES(SIZE)                                                                                \
  void __tsan_read##SIZE(void* address) { checker::access_aligned(address, SIZE, false); }            \
  void __tsan_write##SIZE(void* address) { checker::access_aligned(address, SIZE, true); }            \
  void __tsan_volatile_read##SIZE(void* address) { checker::access_aligned(address, SIZE, false); }   \
  void __tsan_volatile_write##SIZE(void* address) { checker::access_aligned(address, SIZE, true); }   \
  void __tsan_unaligned_read##SIZE(void* address) { checker::access(address, SIZE, false); }          \
  void __tsan_unaligned_write##SIZE(void* address) { checker::access(address, SIZE, true); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
#undef ACCESSES
void __tsan_read_range(void* address, size_t size) { checker::access(address, size, false); }
void __tsan_write_range(void* address, size_t size) { checker::access(address, size, true); }
}
