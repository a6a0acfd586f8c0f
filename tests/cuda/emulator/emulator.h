// CUDA C++ for a CPU: compat.cuh includes this in place of CUDA's own device functions. NVIDIA's 16-bit types compile on
// a CPU as they are; thread indices, barriers, shuffles and the wrappers of compat.cuh are given to the runtime.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "checker.h"
#include "runtime.h"

#undef __shared__
#define __shared__ the_checker_sees_DYNAMIC_SHARED_only
#undef __launch_bounds__
#define __launch_bounds__(...)

#define threadIdx (::emulator::thread_index())
#define blockIdx (::emulator::block_index())
#define blockDim (::emulator::block_size())
#define gridDim (::emulator::grid_size())

#define DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::emulator::dynamic_shared())

#define __syncthreads() ::emulator::sync_threads(__LINE__)
#define __syncwarp() ::emulator::warp_operation("__syncwarp", __LINE__, ~0u, nullptr, nullptr)
#define __shfl_xor_sync(mask, value, lanes) \
  ::emulator::shuffle("__shfl_xor_sync", __LINE__, mask, value, ::emulator::lane() ^ (lanes))
#define __shfl_sync(mask, value, source) \
  ::emulator::shuffle("__shfl_sync", __LINE__, mask, value, static_cast<unsigned>(source) % 32)
#define ldmatrix_x4(registers, row) ::emulator::load_matrices<false>(registers, row, __LINE__)
#define ldmatrix_x4_trans(registers, row) ::emulator::load_matrices<true>(registers, row, __LINE__)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdividef(float x, float y) { return x / y; }
template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }

inline void cp_async_16(void* shared, const void* global, bool is_wanted = true) {
  emulator::start_copy(shared, global, is_wanted);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int PENDING>
void cp_async_wait() { emulator::wait_for_copies(PENDING); }

namespace emulator {

template <class T>
T shuffle(const char* name, int line, unsigned mask, T value, unsigned source) {
  struct Payload {
    T value;
    unsigned source;
    T result;
  } payload{value, source, value};
  warp_operation(name, line, mask, &payload, [](void** lanes, unsigned mask) {
    for (int lane = 0; lane < 32; ++lane) {
      if ((mask >> lane & 1) == 0) continue;
      auto* own = static_cast<Payload*>(lanes[lane]);
      if ((mask >> own->source & 1) == 0)
        fail("shuffle: lane %d reads lane %u, which is not in the mask %08x", lane, own->source, mask);
      own->result = static_cast<Payload*>(lanes[own->source])->value;
    }
  });
  return payload.result;
}

template <bool IS_TRANSPOSED>
void load_matrices(unsigned (&registers)[4], const void* row, int line) {
  struct Payload {
    unsigned* registers;
    const void* row;
  } payload{registers, row};
  warp_operation("ldmatrix", line, ~0u, &payload, [](void** lanes, unsigned) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      void* rows[8];
      uint16_t elements[8][8];
      for (int i = 0; i < 8; ++i) {
        rows[i] = const_cast<void*>(static_cast<Payload*>(lanes[matrix * 8 + i])->row);
        if (reinterpret_cast<uintptr_t>(rows[i]) % 16 != 0) fail("ldmatrix: a row is not aligned to 16 bytes");
        checker::read(rows[i], 16);
        memcpy(elements[i], rows[i], 16);
      }
      checker::read_matrix_rows(rows);
      for (int lane = 0; lane < 32; ++lane) {
        const int i = lane / 4, j = lane % 4 * 2;
        const unsigned low = IS_TRANSPOSED ? elements[j][i] : elements[i][j];
        const unsigned high = IS_TRANSPOSED ? elements[j + 1][i] : elements[i][j + 1];
        static_cast<Payload*>(lanes[lane])->registers[matrix] = low | high << 16;
      }
    }
  });
}

// The float value of one of the two elements of T in a register.
template <class T>
float element(unsigned pair, int which) {
  const uint16_t bits = which == 0 ? pair & 0xffff : pair >> 16;
  T value;
  memcpy(&value, &bits, sizeof value);
  return static_cast<float>(value);
}

}  // namespace emulator

template <class T>
void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned* b) {
  struct Payload {
    float* c;
    const unsigned* a;
    const unsigned* b;
  } payload{c, a, b};
  emulator::warp_operation("mma", __LINE__, ~0u, &payload, [](void** lanes, unsigned) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const auto* own = static_cast<Payload*>(lanes[lane]);
      const int group = lane / 4, first = lane % 4 * 2;
      for (int which = 0; which < 2; ++which) {
        left[group][first + which] = emulator::element<T>(own->a[0], which);
        left[group + 8][first + which] = emulator::element<T>(own->a[1], which);
        left[group][first + 8 + which] = emulator::element<T>(own->a[2], which);
        left[group + 8][first + 8 + which] = emulator::element<T>(own->a[3], which);
        right[first + which][group] = emulator::element<T>(own->b[0], which);
        right[first + 8 + which][group] = emulator::element<T>(own->b[1], which);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      auto* own = static_cast<Payload*>(lanes[lane]);
      for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        own->c[e] += sum;
      }
    }
  });
}
