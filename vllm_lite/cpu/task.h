// How kernels are called: a list of commands, each run by every thread of the team, one after the other.
//
// A kernel is a plain function `void f(const Task&, arguments...)` whose arguments are pointers, int64_t or double.
// EXPORT gives it a C name and a signature that the caller checks its arguments against: a letter for each,
// 'f' float*, 'r' double*, 'h' bf16*, 'w' int32_t*, 'i' int64_t, 'd' double.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

struct bf16;

// The step's sizes, read when a command runs: one list serves every step. As `COUNTERS` in kernels/cpu.py.
struct StepCounters {
  int32_t num_tokens, num_seqs, num_decodes, num_rows;
};

// What a kernel with arrays of fixed size may take; others say what they need where they are called.
constexpr int64_t MIN_SCRATCH_BYTES = 1 << 20;

struct Task {
  const StepCounters& step;
  int thread, num_threads;
  std::atomic<int64_t>& next;  // 0 when a command begins
  // Of this thread alone, MIN_SCRATCH_BYTES at least; holds nothing from one command to the next.
  void* scratch;
  int64_t scratch_bytes;

  // Whoever captures a call sees to it that it needs no more; to write beyond it would be worse than to end.
  void require_scratch(int64_t bytes) const {
    if (bytes > scratch_bytes) std::abort();
  }

  // The next piece of work that no thread has taken yet.
  int64_t take() const { return next.fetch_add(1, std::memory_order_relaxed); }
  // This thread's share of `count` pieces: [begin(count), begin(count, 1)).
  int64_t begin(int64_t count, int after = 0) const { return count * (thread + after) / num_threads; }
};

union Slot {
  const void* pointer;
  int64_t integer;
  double real;
};

using Entry = void (*)(const Slot* arguments, const Task& task);

template <class A>
struct Parameter;
template <>
struct Parameter<int64_t> {
  static constexpr char letter = 'i';
  static int64_t of(Slot slot) { return slot.integer; }
};
template <>
struct Parameter<double> {
  static constexpr char letter = 'd';
  static double of(Slot slot) { return slot.real; }
};
template <class E>
struct Parameter<E*> {
  static constexpr char letter = std::is_same_v<std::remove_const_t<E>, float>     ? 'f'
                                 : std::is_same_v<std::remove_const_t<E>, double>  ? 'r'
                                 : std::is_same_v<std::remove_const_t<E>, bf16>    ? 'h'
                                 : std::is_same_v<std::remove_const_t<E>, int32_t> ? 'w'
                                                                                   : '?';
  static_assert(letter != '?', "no letter for this type of pointer");
  static E* of(Slot slot) { return static_cast<E*>(const_cast<void*>(slot.pointer)); }
};

template <class... A, size_t... I>
void call(void (*kernel)(const Task&, A...), const Slot* arguments, const Task& task, std::index_sequence<I...>) {
  kernel(task, Parameter<A>::of(arguments[I])...);
}
template <class... A>
void call(void (*kernel)(const Task&, A...), const Slot* arguments, const Task& task) {
  call(kernel, arguments, task, std::index_sequence_for<A...>());
}
template <class... A>
const char* signature_of(void (*)(const Task&, A...)) {
  static const char letters[] = {Parameter<A>::letter..., '\0'};
  return letters;
}

#define EXPORT(name, ...)                                                                               \
  extern "C" void name(const Slot* arguments, const Task& task) { call(&__VA_ARGS__, arguments, task); } \
  extern "C" const char* name##_signature() { return signature_of(&__VA_ARGS__); }

// The same kernel for both dtypes that weights and caches come in.
#define EXPORT_TYPES(name, kernel)    \
  EXPORT(name##_float32, kernel<float>) \
  EXPORT(name##_bfloat16, kernel<bf16>)
