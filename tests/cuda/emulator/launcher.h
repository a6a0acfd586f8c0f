// Calls a kernel with arguments given as the CUDA driver takes them: an array of pointers to their bytes.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

#include "runtime.h"

namespace emulator {

// Not checked: reads the arguments, which lie in Python's memory.
template <class... Parameters, size_t... I>
__attribute__((no_sanitize("thread"))) void call(void (*kernel)(Parameters...), void** arguments,
                                                 std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
}

template <class... Parameters>
constexpr auto indices(void (*)(Parameters...)) { return std::index_sequence_for<Parameters...>{}; }

template <auto KERNEL>
void run_one_thread(void** arguments) { call(KERNEL, arguments, indices(KERNEL)); }

// sizes: grid x, y, z, block x, y, z.
template <auto KERNEL>
int launch_kernel(const unsigned* sizes, size_t shared_bytes, void** arguments) {
  const Index grid{sizes[0], sizes[1], sizes[2]}, block{sizes[3], sizes[4], sizes[5]};
  return launch(grid, block, shared_bytes, run_one_thread<KERNEL>, arguments);
}

template <class T>
std::string parameter_kind() {
  if (std::is_pointer_v<T>) return std::is_const_v<std::remove_pointer_t<T>> ? "const_pointer" : "pointer";
  return (std::is_floating_point_v<T> ? "float" : "int") + std::to_string(8 * sizeof(T));
}

template <class... Parameters>
std::string parameter_kinds(void (*)(Parameters...)) {
  std::string kinds;
  ((kinds += parameter_kind<Parameters>() + " "), ...);
  return kinds;
}

}  // namespace emulator
