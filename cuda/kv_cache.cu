// Writes new keys and values into the paged cache, and copies its blocks.
//
// A layer's keys and its values are [num_blocks, num_kv_heads, block_size, head_dim] each, contiguous. These kernels only
// move bytes, so they know no dtype: sizes and strides count Units, which are uint4 (16 bytes) or unsigned short (2 bytes)
// and divide a head of a token.
#include "compat.cuh"

// Puts token t's key and value into slot slots[t] = block id * block_size + offset; a negative slot writes nothing.
//
//   key, value              [num_tokens, num_kv_heads, head_size], any stride over tokens
//   slots                   [num_tokens], no slot twice
//   key_cache, value_cache  as above, with head_size Units for head_dim
//   grid (num_tokens), any number of threads
template <class Unit>
__global__ void write_kv(const Unit* __restrict__ key, const Unit* __restrict__ value, const int* __restrict__ slots,
                         Unit* __restrict__ key_cache, Unit* __restrict__ value_cache, long long key_stride,
                         long long value_stride, int num_kv_heads, int block_size, int head_size) {
  const int slot = slots[blockIdx.x];
  if (slot < 0) return;
  const Unit* token_key = key + blockIdx.x * key_stride;
  const Unit* token_value = value + blockIdx.x * value_stride;
  const long long block = slot / block_size;
  const int offset = slot % block_size;
  for (int i = threadIdx.x; i < num_kv_heads * head_size; i += blockDim.x) {
    const int head = i / head_size;
    const long long row = (block * num_kv_heads + head) * block_size + offset;
    const long long destination = row * head_size + i % head_size;
    key_cache[destination] = token_key[i];
    value_cache[destination] = token_value[i];
  }
}

// Copies block sources[i] over block destinations[i]; no block is both a source and a destination.
//
//   cache                  [num_blocks, units_per_block], of keys or of values
//   sources, destinations  [num_copies]
//   grid (num_copies), any number of threads
__global__ void copy_blocks(uint4* cache, const long long* __restrict__ sources,
                            const long long* __restrict__ destinations, long long units_per_block) {
  const uint4* source = cache + sources[blockIdx.x] * units_per_block;
  uint4* destination = cache + destinations[blockIdx.x] * units_per_block;
  for (long long i = threadIdx.x; i < units_per_block; i += blockDim.x) destination[i] = source[i];
}
