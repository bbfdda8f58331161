#include "resample.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace bifolio {
namespace {

constexpr int64_t kChannels = 3;
constexpr int32_t kHalf = 1 << (kWeightBits - 1);

inline uint8_t to_byte(int32_t sum) { return uint8_t(std::clamp(sum >> kWeightBits, 0, 255)); }

void column_bytes(const uint8_t* pixels, int64_t size, int64_t begin, int64_t taps, const int32_t* weights, uint8_t* out) {
  for (int64_t i = begin; i < size; ++i) {
    int32_t sum = kHalf;
    for (int64_t tap = 0; tap < taps; ++tap) sum += pixels[tap * size + i] * weights[tap];
    out[i] = to_byte(sum);
  }
}

#if defined(__SSE2__)

// A weight is high * 2^11 + low, so that products of bytes with both parts of two weights are one instruction.
constexpr int kLowBits = 11;

struct Pair {
  int32_t high, low;  // of two weights, the first in the lower half
};

Pair pair_of(const int32_t* weights, int64_t tap, int64_t taps) {
  const int32_t first = weights[tap], second = tap + 1 < taps ? weights[tap + 1] : 0;
  const auto joined = [](int32_t a, int32_t b) { return int32_t(uint32_t(uint16_t(a)) | uint32_t(uint16_t(b)) << 16); };
  constexpr int32_t kLow = (1 << kLowBits) - 1;
  return {joined(first >> kLowBits, second >> kLowBits), joined(first & kLow, second & kLow)};
}

struct Sums {
  __m128i high = _mm_setzero_si128(), low = _mm_setzero_si128();
  void add(__m128i bytes, const Pair& weights) {  // i16: of the first tap and of the second in turn
    high = _mm_add_epi32(high, _mm_madd_epi16(bytes, _mm_set1_epi32(weights.high)));
    low = _mm_add_epi32(low, _mm_madd_epi16(bytes, _mm_set1_epi32(weights.low)));
  }
  __m128i rounded() const {
    const __m128i sum = _mm_add_epi32(_mm_slli_epi32(high, kLowBits), _mm_add_epi32(low, _mm_set1_epi32(kHalf)));
    return _mm_srai_epi32(sum, kWeightBits);
  }
};

inline __m128i four_bytes(const uint8_t* at) {
  int32_t word;
  std::memcpy(&word, at, 4);
  return _mm_cvtsi32_si128(word);
}

void along_rows(const uint8_t* pixels, int64_t height, const Taps& taps, uint8_t* out) {
  const size_t size = size_t(taps.inputs * kChannels);
  const int64_t most = (taps.most + 1) / 2;
  std::vector<Pair> pairs(size_t(taps.outputs * most));
  for (int64_t x = 0; x < taps.outputs; ++x)
    for (int64_t i = 0; 2 * i < taps.count[x]; ++i) pairs[size_t(x * most + i)] = pair_of(taps.weights + x * taps.most, 2 * i, taps.count[x]);
  std::vector<uint8_t> row(size + 2 * kChannels);  // a pixel behind the last is read with a weight of 0
  const __m128i zero = _mm_setzero_si128();
  for (int64_t y = 0; y < height; ++y, pixels += size) {
    std::memcpy(row.data(), pixels, size);
    const Pair* weights = pairs.data();
    for (int64_t x = 0; x < taps.outputs; ++x, weights += most, out += kChannels) {
      const uint8_t* pixel = row.data() + taps.first[x] * kChannels;
      Sums sums;
      for (int64_t i = 0; 2 * i < taps.count[x]; ++i, pixel += 2 * kChannels) {
        const __m128i both = _mm_unpacklo_epi8(four_bytes(pixel), four_bytes(pixel + kChannels));
        sums.add(_mm_unpacklo_epi8(both, zero), weights[i]);
      }
      const __m128i words = _mm_packs_epi32(sums.rounded(), zero);
      const int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, zero));
      std::memcpy(out, &bytes, kChannels);
    }
  }
}

void along_columns(const uint8_t* pixels, int64_t width, const Taps& taps, uint8_t* out) {
  const int64_t size = width * kChannels;
  const __m128i zero = _mm_setzero_si128();
  std::vector<Pair> pairs(size_t((taps.most + 1) / 2));
  for (int64_t y = 0; y < taps.outputs; ++y, out += size) {
    const int64_t count = taps.count[y];
    const int32_t* weights = taps.weights + y * taps.most;
    const uint8_t* first = pixels + taps.first[y] * size;
    for (int64_t tap = 0; tap < count; tap += 2) pairs[size_t(tap / 2)] = pair_of(weights, tap, count);
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) {
      Sums sums[4];
      for (int64_t tap = 0; tap < count; tap += 2) {
        const uint8_t* row = first + tap * size + i;
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
        const __m128i b = tap + 1 < count ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + size)) : zero;
        const __m128i left = _mm_unpacklo_epi8(a, b), right = _mm_unpackhi_epi8(a, b);
        const Pair& pair = pairs[size_t(tap / 2)];
        sums[0].add(_mm_unpacklo_epi8(left, zero), pair);
        sums[1].add(_mm_unpackhi_epi8(left, zero), pair);
        sums[2].add(_mm_unpacklo_epi8(right, zero), pair);
        sums[3].add(_mm_unpackhi_epi8(right, zero), pair);
      }
      const __m128i low = _mm_packs_epi32(sums[0].rounded(), sums[1].rounded());
      const __m128i high = _mm_packs_epi32(sums[2].rounded(), sums[3].rounded());
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm_packus_epi16(low, high));
    }
    column_bytes(first, size, i, count, weights, out);
  }
}

#else

void along_rows(const uint8_t* pixels, int64_t height, const Taps& taps, uint8_t* out) {
  for (int64_t y = 0; y < height; ++y, pixels += taps.inputs * kChannels) {
    const int32_t* weights = taps.weights;
    for (int64_t x = 0; x < taps.outputs; ++x, weights += taps.most, out += kChannels) {
      const uint8_t* pixel = pixels + taps.first[x] * kChannels;
      int32_t red = kHalf, green = kHalf, blue = kHalf;
      for (int32_t tap = 0; tap < taps.count[x]; ++tap, pixel += kChannels) {
        red += pixel[0] * weights[tap];
        green += pixel[1] * weights[tap];
        blue += pixel[2] * weights[tap];
      }
      out[0] = to_byte(red), out[1] = to_byte(green), out[2] = to_byte(blue);
    }
  }
}

void along_columns(const uint8_t* pixels, int64_t width, const Taps& taps, uint8_t* out) {
  const int64_t size = width * kChannels;
  for (int64_t y = 0; y < taps.outputs; ++y, out += size)
    column_bytes(pixels + taps.first[y] * size, size, 0, taps.count[y], taps.weights + y * taps.most, out);
}

#endif

}  // namespace

void resample(const uint8_t* pixels, const Taps& rows, const Taps& columns, uint8_t* between, uint8_t* out) {
  const bool both = rows.outputs && columns.outputs;
  if (columns.outputs) along_rows(pixels, rows.inputs, columns, both ? between : out);
  if (rows.outputs) along_columns(columns.outputs ? between : pixels, columns.outputs ? columns.outputs : columns.inputs, rows, out);
}

}  // namespace bifolio
