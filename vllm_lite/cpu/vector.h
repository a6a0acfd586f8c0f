// Vectors of floats and what kernels do with them: the only file that knows instruction sets.
//
// A `Vec` holds LANES floats: 16 with AVX-512, 8 with AVX2. Everything is laid out in units of 16 columns whatever the
// vectors' length, so that weights and caches look the same. 16-bit weights lie in pairs, one 32-bit word for each lane,
// and a dot product of pairs is one instruction where the chip has AVX512_BF16.
//
// VECTOR_LANES=16 without AVX-512 makes the compiler split each vector, and EMULATE_BF16_DOT writes the instruction out:
// slow, but the tests execute the code of larger chips on smaller ones.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(VECTOR_LANES)
constexpr int LANES = VECTOR_LANES;
#elif defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
#else
#error "these kernels need AVX2 and FMA, or AVX-512"
#endif

#if defined(__AVX512BF16__) && !defined(NO_BF16_DOT) || defined(EMULATE_BF16_DOT)
#define HAS_BF16_DOT 1
#else
#define HAS_BF16_DOT 0
#endif

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
// A lambda for `repeat`: each([&](auto i) INLINED { ... }).
#define INLINED __attribute__((always_inline))

struct bf16 {
  uint16_t bits;
};

// Calls each(i) for i = 0 to N - 1, each i a constant: arrays that are indexed by nothing else live in registers, whatever
// the compiler makes of loops.
template <class Each, int... I>
INLINE void repeat(const Each& each, std::integer_sequence<int, I...>) {
  (each(std::integral_constant<int, I>()), ...);
}
template <int N, class Each>
INLINE void repeat(const Each& each) {
  repeat(each, std::make_integer_sequence<int, N>());
}

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t ShortVec __attribute__((vector_size(2 * LANES)));
// The same in memory that is aligned to nothing in particular.
typedef Vec UnalignedVec __attribute__((aligned(4)));
typedef IntVec UnalignedIntVec __attribute__((aligned(2)));
typedef ShortVec UnalignedShortVec __attribute__((aligned(2)));

constexpr int COLUMNS = 16;
constexpr int VECS = COLUMNS / LANES;  // vectors in a unit of columns

INLINE Vec splat(float x) { return x - Vec{}; }
INLINE IntVec splat(int32_t x) { return x - IntVec{}; }
INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
INLINE void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

// a * b + c, rounded once.
INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
  Vec result;
  for (int i = 0; i < LANES; i += 8) {  // once, or for each half
    __m256 parts[3];
    memcpy(&parts[0], reinterpret_cast<float*>(&a) + i, 32);
    memcpy(&parts[1], reinterpret_cast<float*>(&b) + i, 32);
    memcpy(&parts[2], reinterpret_cast<float*>(&c) + i, 32);
    parts[0] = _mm256_fmadd_ps(parts[0], parts[1], parts[2]);
    memcpy(reinterpret_cast<float*>(&result) + i, &parts[0], 32);
  }
  return result;
}

INLINE Vec vec_max(Vec a, Vec b) { return a > b ? a : b; }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

template <class T>
INLINE T from_float(float x);
template <>
INLINE float from_float<float>(float x) {
  return x;
}
template <>
INLINE bf16 from_float<bf16>(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 64)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

INLINE Vec load(const bf16* p) {
  const ShortVec bits = *reinterpret_cast<const UnalignedShortVec*>(p);
  return (Vec)(__builtin_convertvector(bits, IntVec) << 16);
}

// x rounded to the nearest bf16: as such, and in the high half of each word.
#if HAS_BF16_DOT && !defined(EMULATE_BF16_DOT)
INLINE ShortVec to_bf16(Vec x) { return (ShortVec)_mm512_cvtneps_pbh((__m512)x); }  // 0 for what is below 2^-126
INLINE IntVec round_to_bf16(Vec x) { return __builtin_convertvector(to_bf16(x), IntVec) << 16; }
#else
INLINE IntVec round_to_bf16(Vec x) {
  const IntVec bits = (IntVec)x;
  const IntVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (x != x ? bits | 0x400000 : rounded) & static_cast<int32_t>(0xffff0000);
}
INLINE ShortVec to_bf16(Vec x) { return __builtin_convertvector((round_to_bf16(x) >> 16) & 0xffff, ShortVec); }
#endif
INLINE void store(bf16* p, Vec x) { *reinterpret_cast<UnalignedShortVec*>(p) = to_bf16(x); }

// What x becomes when it is stored as a T and read again.
template <class T>
INLINE Vec round_to(Vec x);
template <>
INLINE Vec round_to<float>(Vec x) {
  return x;
}
template <>
INLINE Vec round_to<bf16>(Vec x) {
  return (Vec)round_to_bf16(x);
}

// The first n <= LANES elements; the others are 0.
template <class T>
INLINE Vec load_first(const T* p, int n) {
  if (n == LANES) return load(p);
  Vec result{};
  for (int i = 0; i < n; ++i) result[i] = to_float(p[i]);
  return result;
}
template <class T>
INLINE void store_first(T* p, Vec x, int n) {
  if (n == LANES) return store(p, x);
  for (int i = 0; i < n; ++i) p[i] = from_float<T>(x[i]);
}

// Sums and maxima over the lanes, halving by halving: the same order wherever it is used.
INLINE float sum_of(Vec x) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return _mm512_reduce_add_ps((__m512)x);
#endif
  alignas(64) float lanes[LANES];
  store(lanes, x);
  UNROLL for (int half = LANES / 2; half > 0; half /= 2)
    UNROLL for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
INLINE float max_of(Vec x) {
#if defined(__AVX512F__)
  if constexpr (LANES == 16) return _mm512_reduce_max_ps((__m512)x);
#endif
  float result = x[0];
  UNROLL for (int i = 1; i < LANES; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// e^x to 2e-7 of its value for x <= 88; 0 below -87, and for -infinity.
INLINE Vec exp_of(Vec x) {
  const Vec clamped = vec_max(splat(-87.33f), x);  // in this order a NaN stays one
  const Vec shifted = fma(clamped, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: rounds to a whole number
  const Vec whole = shifted - 12582912.0f;
  Vec rest = fma(whole, splat(-0.693359375f), clamped);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, rest, splat(1.3981999507e-3f));
  p = fma(p, rest, splat(8.3334519073e-3f));
  p = fma(p, rest, splat(4.1665795894e-2f));
  p = fma(p, rest, splat(1.6666665459e-1f));
  p = fma(p, rest, splat(5.0000001201e-1f));
  p = fma(p, rest * rest, rest + 1.0f);
  const IntVec exponent = (__builtin_convertvector(whole, IntVec) + 127) << 23;
  const Vec result = p * (Vec)exponent;
  return x < -87.33f ? Vec{} : result;
}
INLINE float exp_of(float x) { return exp_of(splat(x))[0]; }

INLINE Vec tanh_of(Vec x) {
  const Vec magnitude = x < 0.0f ? -x : x;
  const Vec small = exp_of(magnitude * -2.0f);
  const Vec result = (1.0f - small) / (1.0f + small);
  return x < 0.0f ? -result : result;
}

INLINE Vec silu(Vec x) {
  const Vec small = exp_of(x < 0.0f ? x : -x);
  return x * ((x < 0.0f ? small : splat(1.0f)) / (1.0f + small));
}

// How the left side of a product is read: floats one by one, or 16-bit values in pairs where the chip multiplies those.
template <class T>
struct OperandOf {
  using type = float;
};
#if HAS_BF16_DOT
template <>
struct OperandOf<bf16> {
  using type = bf16;
};
#endif
template <class T>
using Operand = typename OperandOf<T>::type;

// One step along the inner dimension of a product: a pair of 16-bit values, or one float.
template <class T>
constexpr int STEP = 1;
template <>
constexpr int STEP<bf16> = 2;

// A word for each lane holds one step of a column: a float, or a pair of bf16.
INLINE IntVec load_words(const void* p) { return *static_cast<const UnalignedIntVec*>(p); }
INLINE IntVec load_words(const void* p, int n) {
  IntVec result{};
  memcpy(&result, p, 4 * n);
  return result;
}
INLINE void store_words(void* p, IntVec words) { *static_cast<UnalignedIntVec*>(p) = words; }
// Eight words from each of two places.
INLINE IntVec join_words(const void* low, const void* high) {
  IntVec result;
  memcpy(&result, low, 32);
  memcpy(reinterpret_cast<char*>(&result) + 32, high, 4 * LANES - 32);
  return result;
}

// Keeps the compiler from holding values in registers over this point which the sums of a tile need: it reads them from
// the first-level cache again.
INLINE void drop_loaded_values() { __asm__ volatile("" ::: "memory"); }

// Where the rows of a tile have their next elements. Only every third row has a pointer of its own, from which an address
// reaches the two after it; with an offset for each row, as the compiler would have it, addresses run out of registers.
template <class E, int ROWS>
struct TileRows {
  static constexpr int NUM_POINTERS = (ROWS + 2) / 3;
  const E* pointers[NUM_POINTERS];
  int64_t stride;

  TileRows(const E* x, int64_t x_stride) : stride(x_stride) {
    repeat<NUM_POINTERS>([&](auto i) INLINED { pointers[i] = x + 3 * i * x_stride; });
  }
  const E* operator[](int row) const { return pointers[row / 3] + row % 3 * stride; }
  void advance(int count) {
    repeat<NUM_POINTERS>([&](auto i) INLINED {
      pointers[i] += count;
      __asm__ volatile("" : "+r"(pointers[i]));  // the compiler must not know that they keep their distance
    });
  }
};

// sums[r][v] += words(v) * x[r] for this step of a tile's rows, whose sums lie `stride` vectors apart.
// IS_TIGHT says that the sums leave few registers.
template <class T, int ROWS, int NUM_WORDS, bool IS_TIGHT, class Words>
INLINE void multiply_add(Vec* sums, int stride, const Words& words, const TileRows<float, ROWS>& x) {
  Vec columns[NUM_WORDS];
  const auto add = [&](auto element) INLINED {
    repeat<ROWS>([&](auto r) INLINED {
      const Vec value = splat(x[r][element]);
      repeat<NUM_WORDS>([&](auto v) INLINED { sums[r * stride + v] = fma(value, columns[v], sums[r * stride + v]); });
    });
  };
  if constexpr (STEP<T> == 2) {
    repeat<NUM_WORDS>([&](auto v) INLINED { columns[v] = (Vec)(words(v) << 16); });
    add(std::integral_constant<int, 0>());
    if (IS_TIGHT) drop_loaded_values();
  }
  repeat<NUM_WORDS>([&](auto v) INLINED {
    columns[v] = (Vec)(STEP<T> == 2 ? words(v) & static_cast<int32_t>(0xffff0000) : words(v));
  });
  add(std::integral_constant<int, STEP<T> - 1>());
}
#if HAS_BF16_DOT
INLINE Vec dot_pairs(Vec sum, IntVec a, IntVec b) {
#if defined(EMULATE_BF16_DOT)
  const Vec even = fma((Vec)(a << 16), (Vec)(b << 16), sum);
  return fma((Vec)(a & static_cast<int32_t>(0xffff0000)), (Vec)(b & static_cast<int32_t>(0xffff0000)), even);
#else
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
}
template <class T, int ROWS, int NUM_WORDS, bool IS_TIGHT, class Words>
INLINE void multiply_add(Vec* sums, int stride, const Words& words, const TileRows<bf16, ROWS>& x) {
  IntVec columns[NUM_WORDS];
  repeat<NUM_WORDS>([&](auto v) INLINED { columns[v] = words(v); });
  repeat<ROWS>([&](auto r) INLINED {
    int32_t pair;
    memcpy(&pair, x[r], 4);
    repeat<NUM_WORDS>([&](auto v) INLINED {
      sums[r * stride + v] = dot_pairs(sums[r * stride + v], columns[v], splat(pair));
    });
  });
}
#endif

// Rows of T as operands: themselves, or widened into `scratch` [num_rows, size]. Sets the stride between rows.
template <class T>
INLINE const Operand<T>* operand_rows(const T* x, int64_t& stride, int64_t num_rows, int64_t size, float* scratch) {
  if constexpr (sizeof(Operand<T>) == sizeof(T)) {
    return x;
  } else {
    for (int64_t r = 0; r < num_rows; ++r) {
      int64_t i = 0;
      for (; i + LANES <= size; i += LANES) store(scratch + r * size + i, load(x + r * stride + i));
      for (; i < size; ++i) scratch[r * size + i] = to_float(x[r * stride + i]);
    }
    stride = size;
    return scratch;
  }
}
