// Small kernels, each right with HAS_BUG false and wrong with it true: what the checker has to see.
//
// Grids of one block unless the comment says otherwise.
#include "compat.cuh"
#include "vector.cuh"

// A block of 64 turns its elements round, through shared memory.
template <bool HAS_BUG>
__global__ void missing_barrier(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  elements[threadIdx.x] = in[threadIdx.x];
  if (!HAS_BUG) __syncthreads();
  out[threadIdx.x] = elements[63 - threadIdx.x];
}

// The same with one warp of 32, for which a warp's barrier is enough.
template <bool HAS_BUG>
__global__ void missing_warp_barrier(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  elements[threadIdx.x] = in[threadIdx.x];
  if (!HAS_BUG) __syncwarp();
  out[threadIdx.x] = elements[31 - threadIdx.x];
}

// 64 threads: a warp's barrier does not order the warps of a block.
template <bool HAS_BUG>
__global__ void warp_barrier_for_a_block(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  elements[threadIdx.x] = in[threadIdx.x];
  if (HAS_BUG) __syncwarp(); else __syncthreads();
  out[threadIdx.x] = elements[63 - threadIdx.x];
}

// 16 threads copy 64 elements asynchronously and read each other's.
template <bool HAS_BUG>
__global__ void missing_copy_wait(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  cp_async_16(elements + 4 * threadIdx.x, in + 4 * threadIdx.x);
  cp_async_commit();
  if (!HAS_BUG) cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = elements[63 - threadIdx.x];
  cp_async_wait<0>();
}

// A wait is for the thread's own copies; those of others need a barrier, too. One warp of 16.
template <bool HAS_BUG>
__global__ void missing_warp_barrier_after_copy(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  cp_async_16(elements + 4 * threadIdx.x, in + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  if (!HAS_BUG) __syncwarp();
  out[threadIdx.x] = elements[63 - threadIdx.x];
}

// A ring of one slot is filled again while other lanes may still read it. One warp of 16.
template <bool HAS_BUG>
__global__ void refill_of_a_slot_in_use(const float* in, float* out) {
  DYNAMIC_SHARED(float, slot);
  for (int round = 0; round < 2; ++round) {
    cp_async_16(slot + 4 * threadIdx.x, in + 4 * threadIdx.x);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    out[threadIdx.x] = slot[63 - threadIdx.x];
    if (!HAS_BUG) __syncwarp();
  }
}

// 64 threads.
template <bool HAS_BUG>
__global__ void divergent_barrier(const float* in, float* out) {
  if (HAS_BUG && threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// 64 threads.
template <bool HAS_BUG>
__global__ void barrier_in_half_of_a_block(const float* in, float* out) {
  if (!HAS_BUG || threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

// 64 threads, two of which wait for each other in different places.
template <bool HAS_BUG>
__global__ void deadlock(const float* in, float* out) {
  if (!HAS_BUG || threadIdx.x != 0) __syncwarp();
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

// 32 threads.
template <bool HAS_BUG>
__global__ void shuffle_without_half_of_the_lanes(const float* in, float* out) {
  float value = in[threadIdx.x];
  if (!HAS_BUG || threadIdx.x < 16) value += __shfl_xor_sync(ALL_LANES, value, 1);
  out[threadIdx.x] = value;
}

// 32 threads sum the tokens of a sequence, which are spread over pages of 8; pages [3] names them, cache has 4.
template <bool HAS_BUG>
__global__ void page_table_overrun(const int* pages, const float* cache, float* out) {
  float sum = 0.0f;
  for (int page = 0; page < (HAS_BUG ? 4 : 3); ++page) sum += cache[pages[page] * 8 + threadIdx.x % 8];
  out[threadIdx.x] = sum;
}

// 32 threads. Casts the promise away that `in` is only read.
template <bool HAS_BUG>
__global__ void write_to_an_input(const float* in, float* out) {
  (HAS_BUG ? const_cast<float*>(in) : out)[threadIdx.x] = 1.0f;
}

// One thread.
template <bool HAS_BUG>
__global__ void misaligned_access(const float* in, float* out) {
  store(out, load<4>(in + (HAS_BUG ? 1 : 4)));
}

// 32 threads, 31 of which have written.
template <bool HAS_BUG>
__global__ void uninitialised_shared(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  if (!HAS_BUG || threadIdx.x != 31) elements[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = elements[31 - threadIdx.x];
}

// 64 threads, room for 64 floats.
template <bool HAS_BUG>
__global__ void shared_overrun(const float* in, float* out) {
  DYNAMIC_SHARED(float, elements);
  elements[threadIdx.x + (HAS_BUG ? 1 : 0)] = in[threadIdx.x];
  out[threadIdx.x] = in[threadIdx.x];
}

// A grid of 2, 32 threads: blocks are in no order.
template <bool HAS_BUG>
__global__ void blocks_write_the_same(const float* in, float* out) {
  out[threadIdx.x + (HAS_BUG ? 0 : 32 * blockIdx.x)] = in[threadIdx.x];
}

// c [16, 8] float = a [16, 16] * b [8, 16] transposed, on one warp. Rows of a and b in shared memory are `stride` apart.
template <class T>
__global__ void matrix_product(const T* a, const T* b, float* c, int stride) {
  DYNAMIC_SHARED(T, shared_a);
  T* shared_b = shared_a + 16 * stride;
  for (int i = threadIdx.x; i < 16 * 16; i += 32) shared_a[i / 16 * stride + i % 16] = a[i];
  for (int i = threadIdx.x; i < 16 * 16; i += 32) shared_b[i / 16 * stride + i % 16] = b[i / 16 % 8 * 16 + i % 16];
  __syncwarp();
  unsigned registers_a[4], registers_b[4];
  ldmatrix_x4(registers_a, shared_a + threadIdx.x % 16 * stride + threadIdx.x / 16 * 8);
  ldmatrix_x4(registers_b, shared_b + (threadIdx.x % 8 + threadIdx.x / 16 * 8) * stride + threadIdx.x / 8 % 2 * 8);
  float sums[4] = {};
  mma_m16n8k16<T>(sums, registers_a, registers_b);
  for (int i = 0; i < 4; ++i)
    c[(threadIdx.x / 4 + i / 2 * 8) * 8 + threadIdx.x % 4 * 2 + i % 2] = sums[i];
}

// out [16, 16] = in transposed, on one warp, each lane writing the pairs that ldmatrix gave it.
__global__ void transposed(const half* in, half* out) {
  DYNAMIC_SHARED(half, elements);
  for (int i = threadIdx.x; i < 16 * 16; i += 32) elements[i] = in[i];
  __syncwarp();
  unsigned registers[4];
  ldmatrix_x4_trans(registers, elements + threadIdx.x % 16 * 16 + threadIdx.x / 16 * 8);
  for (int i = 0; i < 4; ++i) {
    const int row = threadIdx.x / 4 + i / 2 * 8, column = threadIdx.x % 4 * 2 + i % 2 * 8;
    *reinterpret_cast<unsigned*>(out + row * 16 + column) = registers[i];
  }
}
