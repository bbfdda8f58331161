// x86 with AVX2, FMA and F16C (since 2013).
#include <immintrin.h>

#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/avx2.h"

#define BIFOLIO_FLOAT_ROWS 6
#include "kernels/elementwise.h"
#include "kernels/recurrence.h"
#include "kernels/matmul_float.h"

// Bytes of four k values and eight columns against four bytes of a row: exact, since the pairs that are added in 16
// bits stay below 2^15 (weights at most 128 in size, activations at most 127).
static inline __m256i dot_bytes(__m256i weights, __m256i row) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(row, weights));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// The same for weights that are not negative.
static inline __m256i dot_unsigned(__m256i weights, __m256i row) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(weights, row), _mm256_set1_epi16(1));
}

static inline __m256i four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

template <int Bits, bool Signed, int R>
static inline void block_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  __m256i totals[R][2];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) totals[r][c] = _mm256_set1_epi32(Bits == 4 && Signed ? -8 * isum[r] : 0);
  for (int line = 0; line < Bits; ++line) {
    for (int c = 0; c < 2; ++c) {
      const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + line * 64 + c * 32));
      if constexpr (Bits == 8) {
        for (int r = 0; r < R; ++r)
          totals[r][c] = _mm256_add_epi32(totals[r][c], dot_bytes(packed, four_bytes(x + r * stride + line * 4)));
      } else {
        const __m256i mask = _mm256_set1_epi8(15);
        const __m256i nibbles = Signed ? _mm256_xor_si256(packed, _mm256_set1_epi8(int8_t(0x88))) : packed;
        const __m256i low = _mm256_and_si256(nibbles, mask), high = _mm256_and_si256(_mm256_srli_epi16(nibbles, 4), mask);
        for (int r = 0; r < R; ++r) {
          const __m256i first = dot_unsigned(low, four_bytes(x + r * stride + line * 4));
          const __m256i second = dot_unsigned(high, four_bytes(x + r * stride + 16 + line * 4));
          totals[r][c] = _mm256_add_epi32(totals[r][c], _mm256_add_epi32(first, second));
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) sums[r].v[c] = _mm256_cvtepi32_ps(totals[r][c]);
}

// Sixteen bytes of each row against half a block of bytes.
template <int R>
static inline void half_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t*, V16 sums[R]) {
  for (int c = 0; c < 2; ++c) {
    __m256i totals[R];
    for (int r = 0; r < R; ++r) totals[r] = _mm256_setzero_si256();
    for (int line = 0; line < 4; ++line) {
      const __m256i weights = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + line * 64 + c * 32));
      for (int r = 0; r < R; ++r)
        totals[r] = _mm256_add_epi32(totals[r], dot_bytes(weights, four_bytes(x + r * stride + line * 4)));
    }
    for (int r = 0; r < R; ++r) sums[r].v[c] = _mm256_cvtepi32_ps(totals[r]);
  }
}

#define BIFOLIO_OWN_UNPACK
constexpr float kNibbleUnit = 1.0f;

template <Coding C>
static inline void unpack_block(const uint8_t* quants, const int8_t* table, uint8_t* out) {
  const auto load = [&](int at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quants + at)); };
  const auto store = [&](int at, __m256i a) { _mm256_store_si256(reinterpret_cast<__m256i*>(out + at), a); };
  const auto mask = [](__m256i a, int bits) { return _mm256_and_si256(a, _mm256_set1_epi8(char(bits))); };
  if constexpr (C.bits == 4) {
    const __m256i values = C.table     ? _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))
                           : C.is_signed ? _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1,
                                                            0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
                                         : _mm256_setzero_si256();
    for (int i = 0; i < 256; i += 32) {
      const __m256i pairs = load(i), low = mask(pairs, 15), high = mask(_mm256_srli_epi16(pairs, 4), 15);
      store(i, C.table || C.is_signed ? _mm256_shuffle_epi8(values, low) : low);
      store(256 + i, C.table || C.is_signed ? _mm256_shuffle_epi8(values, high) : high);
    }
  } else {
    for (int half = 0; half < 2; ++half, quants += 192, out += 256)
      for (int i = 0; i < 64; i += 32) {
        const __m256i first = load(i), second = load(64 + i), third = load(128 + i);
        store(i, mask(_mm256_slli_epi16(first, 2), 0xfc));
        store(64 + i, mask(_mm256_slli_epi16(second, 2), 0xfc));
        store(128 + i, mask(_mm256_slli_epi16(third, 2), 0xfc));
        const __m256i lower = _mm256_or_si256(mask(_mm256_srli_epi16(second, 2), 0x30), mask(_mm256_srli_epi16(first, 4), 0x0c));
        store(192 + i, _mm256_or_si256(mask(third, 0xc0), lower));
      }
  }
}

#include "kernels/matmul_int.h"
#include "kernels/x86_attention.h"

int64_t peak_loop(bool bytes) {
  constexpr int64_t rounds = 1 << 19;
  __m256 sums[10] = {};
  __m256i totals[10] = {};
  const __m256 factor = _mm256_set1_ps(0.5f);
  const __m256i ones = _mm256_set1_epi8(1);
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 10
    for (int j = 0; j < 10; ++j) {
      if (bytes) {
        totals[j] = _mm256_add_epi32(totals[j], dot_unsigned(_mm256_xor_si256(ones, totals[j]), ones));
        asm volatile("" : "+x"(totals[j]));
      } else {
        sums[j] = _mm256_fmadd_ps(sums[j], factor, factor);
        asm volatile("" : "+x"(sums[j]));
      }
    }
  }
  return rounds * 10 * (bytes ? 64 : 16);
}

int score() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? 10 : 0;
}

}  // namespace

#include "kernels/table.h"
const KernelTable kAvx2Kernels = BIFOLIO_KERNEL_TABLE("avx2", false, matmul, attend_part);

}  // namespace bifolio
