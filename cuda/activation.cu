// What follows the first product of an MLP: an activation; in a gated one, biases, the activation of the gate, and its
// product with the rest.
#include "compat.cuh"
#include "vector.cuh"

// x as the next operation finds it in a tensor of T.
template <class T>
__device__ inline float rounded(float x) {
  return to_float(from_float<T>(x));
}

// out[t][i] = silu(gate_up[t][i] + bias[i]) * (gate_up[t][size + i] + bias[size + i]); each operation is rounded to T, as
// if it stood alone.
//
//   gate_up  [num_tokens, 2 * size] contiguous: the gate's columns before the others
//   bias     [2 * size], or null
//   out      [num_tokens, size], any stride over tokens
//   grid (num_tokens, ceil(size / (WIDTH * threads)))
//   WIDTH divides size; the rows of all tensors begin at multiples of WIDTH elements' bytes
template <class T, int WIDTH>
__global__ void silu_and_mul(const T* __restrict__ gate_up, const T* __restrict__ bias, T* __restrict__ out,
                             long long out_stride, int size) {
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (i >= size) return;
  const T* row = gate_up + static_cast<long long>(blockIdx.x) * 2 * size;
  auto gates = load<WIDTH>(row + i);
  const auto ups = load<WIDTH>(row + size + i);
  Vector<T, WIDTH> gate_biases = {};
  Vector<T, WIDTH> up_biases = {};
  if (bias != nullptr) {
    gate_biases = load<WIDTH>(bias + i);
    up_biases = load<WIDTH>(bias + size + i);
  }
  for (int j = 0; j < WIDTH; ++j) {
    const float gate = rounded<T>(to_float(gates.at[j]) + to_float(gate_biases.at[j]));
    const float up = rounded<T>(to_float(ups.at[j]) + to_float(up_biases.at[j]));
    const float activated = rounded<T>(gate / (1.0f + expf(-gate)));
    gates.at[j] = from_float<T>(activated * up);
  }
  store(out + blockIdx.x * out_stride + i, gates);
}

// As in ops/activation.py.
enum Activation { RELU, GELU, GELU_TANH, QUICK_GELU };

// 0.5 * (1 + tanh(y)) is the sigmoid of 2 * y.
__device__ inline float activated(float x, int kind) {
  if (kind == RELU) return x < 0.0f ? 0.0f : x;  // NaN stays NaN
  if (kind == GELU) return 0.5f * x * (1.0f + erff(0.707106781f * x));
  const float y = kind == GELU_TANH ? 2.0f * 0.797884561f * (x + 0.044715f * x * x * x) : 1.702f * x;
  return x / (1.0f + expf(-y));
}

// out[t][i] = the activation of x[t][i], rounded once. out may be x.
//
//   x, out  [num_tokens, size], any stride over tokens
//   kind    an Activation
//   grid (num_tokens, ceil(size / (WIDTH * threads)))
//   WIDTH divides size; the rows of both begin at multiples of WIDTH elements' bytes
template <class T, int WIDTH>
__global__ void activate(const T* x, T* out, long long x_stride, long long out_stride, int size, int kind) {
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * WIDTH;
  if (i >= size) return;
  auto elements = load<WIDTH>(x + blockIdx.x * x_stride + i);
  for (int j = 0; j < WIDTH; ++j) elements.at[j] = from_float<T>(activated(to_float(elements.at[j]), kind));
  store(out + blockIdx.x * out_stride + i, elements);
}
