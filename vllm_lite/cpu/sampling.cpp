// Picks a token for each row of logits, as ops/sample.py says. A row is one thread's work, so its token depends on
// nothing else.
//
// Nothing sorts the vocabulary. A token's mass is exp((logit - max) / temperature) in double precision. With top_k, the
// k-th largest of the maxima of many small groups is a bound that few more than k tokens reach. With top_p alone, masses
// are summed in narrow bins of logits, which are in order; only the bin in which the kept tokens end and the one that
// holds the picked token are sorted.
//
//   logits                                   [num_rows, vocab_size], stride apart
//   temperatures, top_ks, top_ps, min_ps     [num_rows]; top_k 0 is off, 1 takes the largest logit
//   uniforms                                 [num_rows], in [0, 1)
//   out                                      [num_rows]; -1 where the largest logit is not finite, or one is NaN
#include <algorithm>
#include <functional>

#include "task.h"
#include "vector.h"

namespace {

constexpr int WIDE_LANES = LANES / 2;
typedef double WideVec __attribute__((vector_size(4 * LANES)));
typedef int64_t WideIntVec __attribute__((vector_size(4 * LANES)));
typedef float HalfVec __attribute__((vector_size(2 * LANES)));
typedef WideVec UnalignedWideVec __attribute__((aligned(8)));
typedef HalfVec UnalignedHalfVec __attribute__((aligned(4)));

constexpr int64_t CHUNK = 512;
constexpr int64_t GROUP_VECS = 16;  // a group is one lane of so many vectors
constexpr int64_t NUM_BINS = 4096;
constexpr float BINS_PER_UNIT = 64.0f;

constexpr double INVERSE_FACTORIALS[] = {  // of 13 down to 0
    1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
    1.0 / 720,        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};

// e^x for x <= 0, to a few units in the last place; 0 below -700, and for -infinity.
INLINE WideVec exp_of(WideVec x) {
  constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: rounds to a whole number, found in the lowest bits
  const WideVec clamped = x < -700.0 ? WideVec{} - 700.0 : x;
  const WideVec shifted = clamped * 1.4426950408889634 + ROUNDER;
  const WideVec whole = shifted - ROUNDER;
  const WideVec rest = (clamped - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
  WideVec p{};
  UNROLL for (int n = 0; n < 14; ++n) p = p * rest + INVERSE_FACTORIALS[n];
  const WideVec result = (WideVec)((WideIntVec)p + ((WideIntVec)shifted << 52));
  return x < -700.0 ? WideVec{} : result;
}

INLINE bool is_any(IntVec conditions) {
  uint64_t words[LANES / 2], any = 0;
  memcpy(words, &conditions, sizeof words);
  for (const uint64_t word : words) any |= word;
  return any != 0;
}

// A token's distance from the best one, which is its rank's order: |scaled logit|, and its id where two are equal.
using Key = uint64_t;

struct Row {
  const float* logits;
  int64_t vocab_size;
  float max, temperature;
  double top_p, min_p, uniform;

  Vec distances(Vec x) const { return 0.0f - (x - max) / temperature; }
  float distance(float x) const { return 0.0f - (x - max) / temperature; }
  // Of the `count` tokens from `first` on.
  void store_distances(int64_t first, int64_t count, float* out) const {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, distances(load(logits + first + i)));
    for (; i < count; ++i) out[i] = distance(logits[first + i]);
  }
};

Key key_of(float distance, int64_t id) {
  uint32_t bits;
  memcpy(&bits, &distance, 4);
  return static_cast<Key>(bits) << 32 | static_cast<uint32_t>(id);
}
int32_t id_of(Key key) { return static_cast<int32_t>(key & 0xffffffffu); }
double mass_of(Key key) {
  const uint32_t bits = static_cast<uint32_t>(key >> 32);
  float d;
  memcpy(&d, &bits, 4);
  return exp_of(WideVec{} - static_cast<double>(d))[0];
}

// A share of a sum of masses, below the sum: what has a mass of 0 is never picked.
double threshold(const Row& row, double total) { return std::min(row.uniform * total, std::nextafter(total, 0.0)); }

struct Sums {
  double all = 0.0, kept = 0.0;
};

// Distances and masses of the `count` <= CHUNK tokens from `first` on, and their sums; 0 is kept of what is less likely
// than min_p times the best token.
INLINE Sums weigh(const Row& row, int64_t first, int64_t count, float* distances, double* masses) {
  row.store_distances(first, count, distances);
  // What fills up the last vector has no mass.
  for (int64_t i = count; i % WIDE_LANES != 0; ++i) distances[i] = INFINITY;
  WideVec all{}, kept{};
  for (int64_t i = 0; i < count; i += WIDE_LANES) {
    const HalfVec half = *reinterpret_cast<const UnalignedHalfVec*>(distances + i);
    const WideVec mass = exp_of(-__builtin_convertvector(half, WideVec));
    const WideVec part = mass < row.min_p ? WideVec{} : mass;
    *reinterpret_cast<UnalignedWideVec*>(masses + i) = part;
    all += mass;
    kept += part;
  }
  Sums sums;
  for (int lane = 0; lane < WIDE_LANES; ++lane) sums.all += all[lane], sums.kept += kept[lane];
  return sums;
}

// The largest logit, NaN where there is one, and the maxima of groups: vectors of GROUP_VECS vectors' maxima, then the
// tokens of an unfinished group one by one.
float find_maxima(const float* logits, int64_t vocab_size, float* maxima) {
  constexpr int64_t STEP_SIZE = GROUP_VECS * LANES;
  Vec most = splat(-INFINITY);
  IntVec is_nan{};
  int64_t id = 0;
  for (; id + STEP_SIZE <= vocab_size; id += STEP_SIZE, maxima += LANES) {
    Vec group = splat(-INFINITY);
    for (int64_t v = 0; v < GROUP_VECS; ++v) {
      const Vec x = load(logits + id + v * LANES);
      is_nan |= x != x;
      group = vec_max(x, group);
    }
    store(maxima, group);
    most = vec_max(group, most);
  }
  float max = max_of(most);
  if (is_any(is_nan)) max = NAN;
  for (; id < vocab_size && max == max; ++id) {
    *maxima++ = logits[id];
    if (!(logits[id] <= max)) max = logits[id];
  }
  return max;
}

int32_t pick_best(const Row& row) {
  int64_t id = 0;
  while (row.logits[id] != row.max) ++id;
  return static_cast<int32_t>(id);
}

// In the order of ids.
int32_t pick_by_id(const Row& row, double* chunk_sums) {
  alignas(64) float distances[CHUNK];
  alignas(64) double masses[CHUNK];
  const auto enter = [&](int64_t first) {
    return weigh(row, first, std::min(CHUNK, row.vocab_size - first), distances, masses).kept;
  };
  double total = 0.0;
  for (int64_t first = 0; first < row.vocab_size; first += CHUNK) {
    chunk_sums[first / CHUNK] = enter(first);
    total += chunk_sums[first / CHUNK];
  }
  const double wanted = threshold(row, total);
  double sum = 0.0;
  int64_t first = 0, last_seen = 0;
  for (; first + CHUNK < row.vocab_size && sum + chunk_sums[first / CHUNK] <= wanted; first += CHUNK)
    sum += chunk_sums[first / CHUNK];
  // Mostly one chunk; two where the sums of chunks and of tokens are rounded to different sides.
  for (; first < row.vocab_size; first += CHUNK) {
    enter(first);
    for (int64_t i = 0; i < std::min(CHUNK, row.vocab_size - first); ++i) {
      sum += masses[i];
      if (masses[i] > 0.0) last_seen = first + i;
      if (masses[i] > 0.0 && sum > wanted) return static_cast<int32_t>(first + i);
    }
  }
  return static_cast<int32_t>(last_seen);
}

// The best tokens, in order: `num_kept` keys at most, in `keys`, which has room for the vocabulary. Returns the number.
int64_t find_best(const Row& row, int64_t num_kept, const float* maxima, float* ordered, Key* keys) {
  constexpr int64_t STEP_SIZE = GROUP_VECS * LANES;
  const int64_t num_steps = row.vocab_size / STEP_SIZE, num_grouped = num_steps * STEP_SIZE;
  const int64_t count = num_steps * LANES + row.vocab_size - num_grouped;
  float most = INFINITY;  // of the distances
  if (num_kept <= count) {
    std::copy(maxima, maxima + count, ordered);
    std::nth_element(ordered, ordered + num_kept - 1, ordered + count, std::greater<float>());
    most = row.distance(ordered[num_kept - 1]);
  }
  alignas(64) float distances[STEP_SIZE];
  int64_t found = 0;
  const auto look_at = [&](int64_t first, int64_t end) {
    row.store_distances(first, end - first, distances);
    for (int64_t id = first; id < end; ++id)
      if (distances[id - first] <= most) keys[found++] = key_of(distances[id - first], id);
  };
  for (int64_t step = 0; step < num_steps; ++step)
    if (is_any(row.distances(load(maxima + step * LANES)) <= most)) look_at(step * STEP_SIZE, (step + 1) * STEP_SIZE);
  look_at(num_grouped, row.vocab_size);
  const int64_t result = std::min(num_kept, found);
  if (result < found) std::nth_element(keys, keys + result, keys + found);
  std::sort(keys, keys + result);
  return result;
}

// The first of the ordered keys at which the sum of the masses, which begins with `sum`, passes `wanted`; else the last.
int32_t pick_key(const Key* keys, int64_t count, double sum, double wanted) {
  for (int64_t rank = 0; rank < count; ++rank) {
    sum += mass_of(keys[rank]);
    if (sum > wanted) return id_of(keys[rank]);
  }
  return id_of(keys[count - 1]);
}

// How many of the ordered keys are kept, the first of which come after tokens of the mass `sum`. Adds what is kept.
int64_t count_kept(const Row& row, const Key* keys, int64_t count, double limit, double& sum) {
  for (int64_t rank = 0; rank < count; ++rank) {
    const double mass = mass_of(keys[rank]), after = sum + mass;
    // The best token of all, before which the sum is 0, is always kept.
    if (sum > 0.0 && (after - mass >= limit || mass < row.min_p)) return rank;
    sum = after;
  }
  return count;
}

// Among the best top_k, the best first.
int32_t pick_of_top_k(const Row& row, int64_t top_k, const float* maxima, float* ordered, Key* keys) {
  const int64_t count = find_best(row, top_k, maxima, ordered, keys);
  double total = 0.0;
  for (int64_t rank = 0; rank < count; ++rank) total += mass_of(keys[rank]);
  double kept = 0.0;
  const int64_t num_kept = count_kept(row, keys, count, row.top_p * total, kept);
  return pick_key(keys, num_kept, 0.0, threshold(row, kept));
}

// Bins of distances are 1 / BINS_PER_UNIT wide; the last one holds all that lie beyond.
int64_t bin_of(float distance) {
  return static_cast<int64_t>(std::min(distance * BINS_PER_UNIT, static_cast<float>(NUM_BINS - 1)));
}
IntVec bins_of(Vec distances) {
  const Vec scaled = distances * BINS_PER_UNIT, last = splat(static_cast<float>(NUM_BINS - 1));
  return __builtin_convertvector(scaled < last ? scaled : last, IntVec);
}

// The keys of a bin in order. Returns their number.
int64_t sort_bin(const Row& row, int64_t bin, Key* keys) {
  alignas(64) float distances[CHUNK] = {};
  int64_t found = 0;
  for (int64_t first = 0; first < row.vocab_size; first += CHUNK) {
    const int64_t count = std::min(CHUNK, row.vocab_size - first);
    row.store_distances(first, count, distances);
    for (int64_t i = 0; i < count; i += LANES) {
      const IntVec numbers = bins_of(load(distances + i));
      if (!is_any(numbers == static_cast<int32_t>(bin))) continue;
      for (int64_t lane = 0; lane < std::min<int64_t>(LANES, count - i); ++lane) {
        keys[found] = key_of(distances[i + lane], first + i + lane);  // stays if it is one of them
        found += numbers[lane] == bin;
      }
    }
  }
  std::sort(keys, keys + found);
  return found;
}

// Among the best that together have top_p of all masses, the best first.
int32_t pick_of_top_p(const Row& row, double* bins, Key* keys) {
  alignas(64) float distances[CHUNK] = {};
  alignas(64) double masses[CHUNK];
  alignas(64) int32_t numbers[CHUNK];
  std::fill(bins, bins + 2 * NUM_BINS, 0.0);
  double total = 0.0;
  for (int64_t first = 0; first < row.vocab_size; first += CHUNK) {
    const int64_t count = std::min(CHUNK, row.vocab_size - first);
    total += weigh(row, first, count, distances, masses).all;
    for (int64_t i = 0; i < CHUNK; i += LANES)
      *reinterpret_cast<UnalignedIntVec*>(numbers + i) = bins_of(load(distances + i));
    // Neighbours are often in the same bin, and would wait for each other's sum.
    for (int64_t i = 0; i < count; ++i) bins[i % 2 * NUM_BINS + numbers[i]] += masses[i];
  }
  for (int64_t bin = 0; bin < NUM_BINS; ++bin) bins[bin] += bins[NUM_BINS + bin];
  const double limit = row.top_p * total;
  // Nothing that is kept lies further away than this.
  const int64_t end_bin = row.min_p > 0.0 ? bin_of(static_cast<float>(0.05 - std::log(row.min_p))) : NUM_BINS - 1;
  double kept = 0.0;
  int64_t last_bin = 0;
  while (last_bin < end_bin && kept + bins[last_bin] < limit) kept += bins[last_bin++];
  int64_t count = sort_bin(row, last_bin, keys);
  count = count_kept(row, keys, count, limit, kept);

  const double wanted = threshold(row, kept);
  double sum = 0.0, before_filled = 0.0;
  int64_t bin = 0, filled = 0;
  for (; bin < last_bin && sum + bins[bin] <= wanted; ++bin) {
    if (bins[bin] > 0.0) filled = bin, before_filled = sum;
    sum += bins[bin];
  }
  if (bin == last_bin && count > 0) return pick_key(keys, count, sum, wanted);
  if (bin == last_bin) bin = filled, sum = before_filled;  // nothing is kept of the last bin
  count = sort_bin(row, bin, keys);
  while (count > 1 && mass_of(keys[count - 1]) < row.min_p) --count;
  return pick_key(keys, count, sum, wanted);
}

void sample(const Task& task, const float* logits, int64_t stride, int64_t vocab_size, const float* temperatures,
            const int32_t* top_ks, const float* top_ps, const float* min_ps, const double* uniforms, int32_t* out) {
  // Room for as many keys as there are tokens comes first; the caller sees to it that all of it fits.
  Key* keys = static_cast<Key*>(task.scratch);
  double* sums = reinterpret_cast<double*>(keys + vocab_size);
  float* maxima = reinterpret_cast<float*>(sums + std::max(2 * NUM_BINS, vocab_size / CHUNK + 1));
  float* ordered = maxima + vocab_size / GROUP_VECS + GROUP_VECS * LANES;
  for (int64_t r = task.take(); r < task.step.num_rows; r = task.take()) {
    const float max = find_maxima(logits + r * stride, vocab_size, maxima);
    const Row row{logits + r * stride, vocab_size, max, temperatures[r], top_ps[r], min_ps[r], uniforms[r]};
    if (!std::isfinite(max))
      out[r] = -1;
    else if (top_ks[r] == 1)
      out[r] = pick_best(row);
    else if (top_ks[r] > 0)
      out[r] = pick_of_top_k(row, top_ks[r], maxima, ordered, keys);
    else if (row.top_p < 1.0)
      out[r] = pick_of_top_p(row, sums, keys);
    else
      out[r] = pick_by_id(row, sums);
  }
}

}  // namespace

EXPORT(sample, sample)
