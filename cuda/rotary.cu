// Rotary position embedding: turns pairs of dimensions of each head by an angle that grows with the token's position.
#include "compat.cuh"

// Turns dimensions (i, i + num_pairs) in place, for i < num_pairs; the dimensions from 2 * num_pairs on stay. Computed in
// float32, rounded once.
//
//   heads      [num_tokens, num_heads, head_dim], any stride over tokens
//   positions  [num_tokens], rows of cos_sin
//   cos_sin    [max_model_len, 2 * num_pairs], the cosines of a position, then its sines
//   grid (num_tokens), any number of threads
template <class T>
__global__ void rotary(T* __restrict__ heads, const int* __restrict__ positions, const float* __restrict__ cos_sin,
                       long long token_stride, int num_heads, int head_dim, int num_pairs) {
  T* token = heads + blockIdx.x * token_stride;
  const float* cosines = cos_sin + static_cast<long long>(positions[blockIdx.x]) * 2 * num_pairs;
  const float* sines = cosines + num_pairs;
  for (int i = threadIdx.x; i < num_heads * num_pairs; i += blockDim.x) {
    const int pair = i % num_pairs;
    T* first = token + i / num_pairs * head_dim + pair;
    T* second = first + num_pairs;
    const float a = to_float(*first);
    const float b = to_float(*second);
    *first = from_float<T>(a * cosines[pair] - b * sines[pair]);
    *second = from_float<T>(b * cosines[pair] + a * sines[pair]);
  }
}
