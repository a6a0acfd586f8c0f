// The scheduler: runs the threads of a block one at a time, each until it waits or ends, in a chosen order.
#include "runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "checker.h"
#include "fiber.h"

namespace emulator {
namespace {

constexpr unsigned WARP_SIZE = 32;
constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr size_t MAX_SHARED_BYTES = 227 * 1024;
constexpr size_t COPY_BYTES = 16;

enum class Order { FORWARD, REVERSE, RANDOM };
enum class State { READY, AT_BARRIER, AT_WARP_OPERATION, ENDED };

struct Copy {
  void* destination;
  const void* source;
  bool is_wanted;
};

struct Thread {
  Index index;
  unsigned linear = 0;
  StackPointer stack = nullptr;
  State state = State::READY;
  // Where it waits.
  const char* waits_at = "";
  int line = 0;
  unsigned mask = 0;
  void* payload = nullptr;
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> copy_groups;

  unsigned warp() const { return linear / WARP_SIZE; }
  unsigned lane() const { return linear % WARP_SIZE; }
};

struct Warp {
  unsigned num_barriers = 0;
  unsigned num_waiting = 0;
};

// A whole number of pages, the one after them unreadable. The system gives a page when it is first touched.
struct Memory {
  explicit Memory(size_t size) : size(size) {
    void* pages = mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) abort();
    begin = static_cast<char*>(pages);
    mprotect(begin + size, PAGE, PROT_NONE);
  }
  bool contains(const void* address) const { return address >= begin && address < begin + size; }

  static constexpr size_t PAGE = 4096;
  char* begin;
  size_t size;
};

Order order = Order::FORWARD;
unsigned seed = 0;

struct Machine {
  Index grid, block_size, block;
  unsigned block_serial = 0;
  std::vector<Thread> threads;
  std::deque<Thread*> ready;
  std::vector<Warp> warps;
  unsigned num_barriers = 0;
  unsigned num_alive = 0;
  unsigned num_at_barrier = 0;
  Thread* running = nullptr;
  StackPointer scheduler = nullptr;
  Memory stacks{MAX_THREADS * STACK_BYTES};
  Memory shared_memory{MAX_SHARED_BYTES};
  char* shared = nullptr;
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  std::mt19937 random;
  std::string error;
};
Machine machine;

void make_ready(std::vector<Thread*> threads) {
  if (order == Order::REVERSE) std::reverse(threads.begin(), threads.end());
  if (order == Order::RANDOM) std::shuffle(threads.begin(), threads.end(), machine.random);
  for (Thread* thread : threads) {
    thread->state = State::READY;
    machine.ready.push_back(thread);
  }
}

// Back to the scheduler, until somebody makes this thread ready again.
void yield() { emulator_switch_stack(&machine.running->stack, machine.scheduler); }

void open_barrier() {
  std::vector<Thread*> waiting;
  for (Thread& thread : machine.threads)
    if (thread.state == State::AT_BARRIER) waiting.push_back(&thread);
  if (waiting.size() < machine.threads.size())
    fail("__syncthreads at line %d, but %zu threads of the block have ended", waiting.front()->line,
         machine.threads.size() - waiting.size());
  for (Thread* thread : waiting)
    if (thread->line != waiting.front()->line)
      fail("divergent barrier: threads of one block wait in __syncthreads at line %d and at line %d",
           waiting.front()->line, thread->line);
  machine.num_at_barrier = 0;
  ++machine.num_barriers;
  make_ready(waiting);
}

void open_barrier_if_all_came() {
  if (machine.num_alive > 0 && machine.num_at_barrier == machine.num_alive) open_barrier();
}

void run_thread() {
  machine.kernel(machine.arguments);
  Thread& thread = *machine.running;
  const bool has_copies = std::any_of(thread.copy_groups.begin(), thread.copy_groups.end(),
                                      [](const std::vector<Copy>& group) { return !group.empty(); });
  if (has_copies || !thread.open_copies.empty()) fail("the thread ended before its asynchronous copies were waited for");
  thread.state = State::ENDED;
  --machine.num_alive;
  open_barrier_if_all_came();
  yield();
}

void start_threads() {
  const Index& size = machine.block_size;
  machine.threads.assign(size.x * size.y * size.z, Thread{});
  machine.num_alive = machine.threads.size();
  machine.num_at_barrier = machine.num_barriers = 0;
  machine.warps.assign((machine.threads.size() + WARP_SIZE - 1) / WARP_SIZE, Warp{});
  machine.ready.clear();
  std::vector<Thread*> all;
  for (unsigned i = 0; i < machine.threads.size(); ++i) {
    Thread& thread = machine.threads[i];
    thread.linear = i;
    thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
    // Stacks that begin at the same offset of a page would compete for the same cache lines.
    const size_t colour = i % WARP_SIZE * 64;
    thread.stack = new_stack(machine.stacks.begin + (i + 1) * STACK_BYTES - colour, run_thread);
    all.push_back(&thread);
  }
  make_ready(all);
}

void report_deadlock() {
  std::set<std::string> places;
  for (const Thread& thread : machine.threads)
    if (thread.state != State::ENDED) places.insert(thread.waits_at + (" at line " + std::to_string(thread.line)));
  machine.error = "deadlock: threads of one block wait in";
  for (const std::string& place : places) machine.error += " " + place + ",";
  machine.error += " and " + std::to_string(machine.threads.size() - machine.num_alive) + " have ended";
}

bool run_block(size_t shared_bytes) {
  memset(machine.shared, 0xff, shared_bytes);
  checker::begin_block(machine.shared, shared_bytes);
  start_threads();
  while (!machine.ready.empty() && machine.error.empty()) {
    machine.running = machine.ready.front();
    machine.ready.pop_front();
    emulator_switch_stack(&machine.scheduler, machine.running->stack);
    machine.running = nullptr;
  }
  if (machine.error.empty() && machine.num_alive > 0) report_deadlock();
  return machine.error.empty();
}

bool is_valid(const Index& grid, const Index& block, size_t shared_bytes) {
  const unsigned num_threads = block.x * block.y * block.z;
  return num_threads >= 1 && num_threads <= MAX_THREADS && block.z <= 64 && grid.x >= 1 && grid.x <= 0x7fffffffu &&
         grid.y >= 1 && grid.y <= 65535 && grid.z >= 1 && grid.z <= 65535 && shared_bytes <= MAX_SHARED_BYTES;
}

// The threads in the running thread's mask if all of them wait, which must be in the same operation; else none.
std::vector<Thread*> lanes_that_all_came() {
  const Thread& self = *machine.running;
  if (machine.warps[self.warp()].num_waiting < static_cast<unsigned>(__builtin_popcount(self.mask))) return {};
  std::vector<Thread*> lanes;
  for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
    if ((self.mask >> lane & 1) == 0) continue;
    Thread& other = machine.threads[self.warp() * WARP_SIZE + lane];
    if (other.state != State::AT_WARP_OPERATION) return {};
    if (other.waits_at != self.waits_at || other.line != self.line || other.mask != self.mask)
      fail("divergent warp: lane %u is in %s at line %d with mask %08x, lane %u in %s at line %d with mask %08x",
           self.lane(), self.waits_at, self.line, self.mask, lane, other.waits_at, other.line, other.mask);
    lanes.push_back(&other);
  }
  return lanes;
}

}  // namespace

Index thread_index() { return machine.running->index; }
Index block_index() { return machine.block; }
Index block_size() { return machine.block_size; }
Index grid_size() { return machine.grid; }
unsigned lane() { return machine.running->lane(); }
void* dynamic_shared() { return machine.shared; }

void sync_threads(int line) {
  Thread& thread = *machine.running;
  thread.state = State::AT_BARRIER;
  thread.waits_at = "__syncthreads";
  thread.line = line;
  ++machine.num_at_barrier;
  open_barrier_if_all_came();
  yield();
}

void warp_operation(const char* name, int line, unsigned mask, void* payload, Operation operation) {
  Thread& thread = *machine.running;
  Warp& warp = machine.warps[thread.warp()];
  const unsigned num_lanes = machine.threads.size() - thread.warp() * WARP_SIZE;
  if (num_lanes < WARP_SIZE) mask &= (1u << num_lanes) - 1;
  if ((mask >> thread.lane() & 1) == 0) fail("%s at line %d: mask %08x leaves its own lane out", name, line, mask);
  thread.state = State::AT_WARP_OPERATION;
  thread.waits_at = name;
  thread.line = line;
  thread.mask = mask;
  thread.payload = payload;
  ++warp.num_waiting;
  const std::vector<Thread*> lanes = lanes_that_all_came();
  if (!lanes.empty()) {
    void* payloads[WARP_SIZE] = {};
    for (Thread* other : lanes) payloads[other->lane()] = other->payload;
    if (operation == nullptr)
      ++warp.num_barriers;  // __syncwarp: all that it does is to order
    else
      operation(payloads, mask);
    warp.num_waiting -= lanes.size();
    make_ready(lanes);
  }
  yield();
}

void start_copy(void* shared, const void* global, bool is_wanted) {
  if (reinterpret_cast<uintptr_t>(shared) % COPY_BYTES != 0 || reinterpret_cast<uintptr_t>(global) % COPY_BYTES != 0)
    fail("asynchronous copy between addresses that are not aligned to %zu bytes", COPY_BYTES);
  checker::start_copy(shared, global, COPY_BYTES, is_wanted);
  machine.running->open_copies.push_back({shared, global, is_wanted});
}

void commit_copies() {
  Thread& thread = *machine.running;
  thread.copy_groups.push_back(thread.open_copies);
  thread.open_copies.clear();
}

void wait_for_copies(unsigned num_pending_groups) {
  Thread& thread = *machine.running;
  while (thread.copy_groups.size() > num_pending_groups) {
    for (const Copy& copy : thread.copy_groups.front()) {
      if (copy.is_wanted)
        memcpy(copy.destination, copy.source, COPY_BYTES);
      else
        memset(copy.destination, 0, COPY_BYTES);
      checker::finish_copy(copy.destination, COPY_BYTES);
    }
    thread.copy_groups.erase(thread.copy_groups.begin());
  }
}

void fail(const char* format, ...) {
  char message[512];
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  const Index block = machine.block;
  const Index thread = machine.running->index;
  char place[128];
  snprintf(place, sizeof place, "block (%u, %u, %u) thread (%u, %u, %u): ", block.x, block.y, block.z, thread.x,
           thread.y, thread.z);
  machine.error = std::string(place) + message;
  machine.running->state = State::ENDED;
  yield();
  abort();  // the scheduler gives up the launch
}

bool launch(Index grid, Index block, size_t shared_bytes, void (*kernel)(void**), void** arguments) {
  machine.error.clear();
  if (!is_valid(grid, block, shared_bytes)) {
    machine.error = "invalid launch configuration";
    return false;
  }
  machine.grid = grid;
  machine.block_size = block;
  machine.kernel = kernel;
  machine.arguments = arguments;
  // At the end, so that what runs over it soon meets the unreadable page.
  machine.shared = machine.shared_memory.begin + (MAX_SHARED_BYTES - shared_bytes) / 128 * 128;
  machine.random.seed(seed);
  checker::begin_launch(machine.block_serial + 1);
  const unsigned num_blocks = grid.x * grid.y * grid.z;
  for (unsigned i = 0; i < num_blocks; ++i) {
    const unsigned linear = order == Order::REVERSE ? num_blocks - 1 - i : i;
    machine.block = {linear % grid.x, linear / grid.x % grid.y, linear / grid.x / grid.y};
    ++machine.block_serial;
    if (!run_block(shared_bytes)) return false;
  }
  return true;
}

bool is_running() { return machine.running != nullptr; }

checker::Moment now() {
  const Thread& thread = *machine.running;
  return {machine.block_serial, static_cast<int>(thread.linear), static_cast<int>(thread.warp()), machine.num_barriers,
          machine.warps[thread.warp()].num_barriers};
}

bool is_on_stack(const void* address) { return machine.stacks.contains(address); }

}  // namespace emulator

extern "C" {

void emulator_configure(int order, unsigned seed, int is_checked) {
  emulator::order = static_cast<emulator::Order>(order);
  emulator::seed = seed;
  checker::set_enabled(is_checked != 0);
}

const char* emulator_error() { return emulator::machine.error.c_str(); }
}
