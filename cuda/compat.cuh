// What the kernels need beyond plain CUDA C++: 16-bit types, dynamic shared memory, and PTX instructions by name.
// The only file that knows PTX, and that the tests execute kernels on a CPU (CUDA_EMULATOR). Assumes sm_80 or newer.
#pragma once

#if defined(CUDA_EMULATOR)
#include "emulator.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

using bf16 = __nv_bfloat16;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP_SIZE = 32;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(half x) { return __half2float(x); }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

// from_float<T>(x): x rounded to the nearest T.
template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline half from_float<half>(float x) { return __float2half_rn(x); }
template <>
__device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

// Two floats rounded to T side by side in a register, the first in the low half: how the tensor cores take them.
template <class T>
__device__ inline unsigned pack(float low, float high);
template <>
__device__ inline unsigned pack<half>(float low, float high) {
  const half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ inline unsigned pack<bf16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// The emulator declares the same names in emulator.h: DYNAMIC_SHARED, cp_async_*, ldmatrix_*, mma_m16n8k16.
#if !defined(CUDA_EMULATOR)

#ifndef INFINITY  // NVRTC has none of the macros of <math.h>
#define INFINITY __int_as_float(0x7f800000)
#endif

// DYNAMIC_SHARED(T, name); declares `T* name`, the block's dynamic shared memory. Static __shared__ arrays are not used:
// the checker of the tests sees dynamic memory only.
#define DYNAMIC_SHARED(T, name)                                     \
  extern __shared__ __align__(128) unsigned char name##_bytes[];    \
  T* const name = reinterpret_cast<T*>(name##_bytes)

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Starts to copy 16 bytes from global to shared memory, both aligned to 16; writes zeros unless is_wanted.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool is_wanted = true) {
  const int num_bytes = is_wanted ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(num_bytes)
               : "memory");
}

// Makes a group of the copies that this thread started since its last group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most PENDING of this thread's groups, the latest, are still under way. Other threads see the bytes
// after a barrier.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, aligned to 16 bytes.
// registers[m] of lane l gets elements (l / 4, 2 * (l % 4)) and the one to its right of matrix m.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&registers)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a * b on tensor cores: c 16x8 float32, a 16x16 and b 16x8 of T. With row = lane / 4 and column = 2 * (lane % 4),
// a lane holds c: (row, column), (row, column + 1), then the same of row + 8; a: pairs at (row, column),
// (row + 8, column), (row, column + 8), (row + 8, column + 8); b: pairs down the rows at (column, row), (column + 8, row).
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned* b);
template <>
__device__ __forceinline__ void mma_m16n8k16<half>(float (&c)[4], const unsigned (&a)[4], const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&c)[4], const unsigned (&a)[4], const unsigned* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
