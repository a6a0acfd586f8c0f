// Normalises rows: root mean square norm and layer norm. Computed in float32 and rounded once, at the end.
//
//   x, out        [num_tokens, num_heads, size], any strides over tokens and heads; hidden states have one head; out may
//                 be x
//   weight, bias  [size]; bias may be null
//   grid (num_tokens, num_heads): one block for a row; whole warps of threads
//   dynamic shared memory: a float for each warp
//   WIDTH divides size; the rows of all tensors begin at multiples of WIDTH elements' bytes
#include "compat.cuh"
#include "vector.cuh"

// The sum of all threads' values, given to each of them, the same bits to all.
__device__ inline float block_sum(float value, float* warp_sums) {
  for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
  __syncthreads();  // nobody reads an earlier call's sums any more
  if (threadIdx.x % WARP_SIZE == 0) warp_sums[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < blockDim.x / WARP_SIZE; ++warp) sum += warp_sums[warp];
  return sum;
}

// out = x / sqrt(mean(x^2) + eps) * weight
template <class T, int WIDTH>
__global__ void rms_norm(const T* x, const T* __restrict__ weight, T* out, float eps, int size, long long x_token_stride,
                         long long x_head_stride, long long out_token_stride, long long out_head_stride) {
  DYNAMIC_SHARED(float, warp_sums);
  const T* row = x + blockIdx.x * x_token_stride + blockIdx.y * x_head_stride;
  T* out_row = out + blockIdx.x * out_token_stride + blockIdx.y * out_head_stride;

  float squares = 0.0f;
  for (int i = threadIdx.x * WIDTH; i < size; i += blockDim.x * WIDTH) {
    const auto values = load<WIDTH>(row + i);
    for (int j = 0; j < WIDTH; ++j) squares += to_float(values.at[j]) * to_float(values.at[j]);
  }
  const float factor = rsqrtf(block_sum(squares, warp_sums) / size + eps);

  for (int i = threadIdx.x * WIDTH; i < size; i += blockDim.x * WIDTH) {
    auto values = load<WIDTH>(row + i);
    const auto weights = load<WIDTH>(weight + i);
    for (int j = 0; j < WIDTH; ++j)
      values.at[j] = from_float<T>(to_float(values.at[j]) * factor * to_float(weights.at[j]));
    store(out_row + i, values);
  }
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias
template <class T, int WIDTH>
__global__ void layer_norm(const T* x, const T* __restrict__ weight, const T* __restrict__ bias, T* out, float eps,
                           int size, long long x_token_stride, long long x_head_stride, long long out_token_stride,
                           long long out_head_stride) {
  DYNAMIC_SHARED(float, warp_sums);
  const T* row = x + blockIdx.x * x_token_stride + blockIdx.y * x_head_stride;
  T* out_row = out + blockIdx.x * out_token_stride + blockIdx.y * out_head_stride;

  float sum = 0.0f;
  for (int i = threadIdx.x * WIDTH; i < size; i += blockDim.x * WIDTH) {
    const auto values = load<WIDTH>(row + i);
    for (int j = 0; j < WIDTH; ++j) sum += to_float(values.at[j]);
  }
  const float mean = block_sum(sum, warp_sums) / size;

  // A second pass over the deviations: the mean of squares minus the squared mean cancels where the mean is large.
  float squares = 0.0f;
  for (int i = threadIdx.x * WIDTH; i < size; i += blockDim.x * WIDTH) {
    const auto values = load<WIDTH>(row + i);
    for (int j = 0; j < WIDTH; ++j) squares += (to_float(values.at[j]) - mean) * (to_float(values.at[j]) - mean);
  }
  const float factor = rsqrtf(block_sum(squares, warp_sums) / size + eps);

  for (int i = threadIdx.x * WIDTH; i < size; i += blockDim.x * WIDTH) {
    auto values = load<WIDTH>(row + i);
    const auto weights = load<WIDTH>(weight + i);
    Vector<T, WIDTH> biases = {};
    if (bias != nullptr) biases = load<WIDTH>(bias + i);
    for (int j = 0; j < WIDTH; ++j) {
      const float normed = (to_float(values.at[j]) - mean) * factor;
      values.at[j] = from_float<T>(normed * to_float(weights.at[j]) + to_float(biases.at[j]));
    }
    store(out_row + i, values);
  }
}
