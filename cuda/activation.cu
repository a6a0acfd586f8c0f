// What follows the product of a gated MLP's first half: biases, the activation of the gate, its product with the rest.
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
