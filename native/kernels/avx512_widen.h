// Blocks of quantised weights as floats, with 512-bit registers: sixteen columns of a panel at a time.
#pragma once

#define BIFOLIO_OWN_WIDEN

// Byte I of each four, times 2^24.
template <int I>
static inline __m512 byte_of_four(__m512i fours) {
  if constexpr (I == 3) return _mm512_cvtepi32_ps(_mm512_and_si512(fours, _mm512_set1_epi32(int(0xff000000u))));
  const __m512i step = _mm512_set_epi32(60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m512i order = _mm512_slli_epi32(_mm512_add_epi32(step, _mm512_set1_epi32(I)), 24);
  return _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x8888888888888888, order, fours));
}

// Nibble I of each eight; `numbers` holds the value of each nibble.
template <int I>
static inline __m512 nibble_of_eight(__m512i eights, __m512 numbers) {
  return _mm512_permutexvar_ps(I ? _mm512_srli_epi32(eights, 4 * I) : eights, numbers);
}

template <Format F, class Take>
__attribute__((always_inline)) static inline void each_weight(const PackedPanel<F>& panel, int64_t b, Take take) {
  const uint8_t* quants = panel.quants(b);
  constexpr Coding code = coding(F);
  if constexpr (F != Format::Q4_0 && F != Format::Q4_1 && F != Format::Q4_K) {
    alignas(64) uint8_t bytes[F == Format::Q8_0 ? 1 : kQuantBlock * kPanel];
    if constexpr (F != Format::Q8_0) panel.unpack(b, bytes), quants = bytes;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int s = code.scales == 2 ? half : 0;
      const V16 scale = mul(panel.scale(b, s), broadcast(kWidening * code.unit() * 0x1p-24f));
      const V16 minimum = code.minima ? mul(panel.minimum(b, s), broadcast(kWidening)) : zero();
      const auto weight = [&](__m512 number) { return code.minima ? fma(V16{{number}}, scale, minimum) : mul(V16{{number}}, scale); };
#pragma GCC unroll 4
      for (int line = 4 * half; line < 4 * half + 4; ++line) {
        const __m512i fours = _mm512_loadu_si512(quants + line * 64);
        take(line * 4, weight(byte_of_four<0>(fours)));
        take(line * 4 + 1, weight(byte_of_four<1>(fours)));
        take(line * 4 + 2, weight(byte_of_four<2>(fours)));
        take(line * 4 + 3, weight(byte_of_four<3>(fours)));
      }
    }
  } else {
    constexpr bool has_minimum = code.minima;
    const V16 scale = mul(panel.scale(b, 0), broadcast(kWidening));
    const V16 minimum = has_minimum ? mul(panel.minimum(b, 0), broadcast(kWidening)) : zero();
    const __m512 numbers = has_minimum ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                                       : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const auto weight = [&](__m512 number) { return has_minimum ? fma(V16{{number}}, scale, minimum) : mul(V16{{number}}, scale); };
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      const __m512i eights = _mm512_loadu_si512(quants + line * 64);
      take(line * 4, weight(nibble_of_eight<0>(eights, numbers)));
      take(line * 4 + 1, weight(nibble_of_eight<2>(eights, numbers)));
      take(line * 4 + 2, weight(nibble_of_eight<4>(eights, numbers)));
      take(line * 4 + 3, weight(nibble_of_eight<6>(eights, numbers)));
    }
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      const __m512i eights = _mm512_loadu_si512(quants + line * 64);
      take(16 + line * 4, weight(nibble_of_eight<1>(eights, numbers)));
      take(16 + line * 4 + 1, weight(nibble_of_eight<3>(eights, numbers)));
      take(16 + line * 4 + 2, weight(nibble_of_eight<5>(eights, numbers)));
      take(16 + line * 4 + 3, weight(nibble_of_eight<7>(eights, numbers)));
    }
  }
}

static inline V16 upper_half(V16 a) { return {{_mm512_and_ps(a.v[0], _mm512_castsi512_ps(_mm512_set1_epi32(int(0xffff0000u))))}}; }

static inline void store_upper_halves(uint8_t* p, V16 even, V16 odd) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
  const __m512i first = _mm512_castps_si512(even.v[0]), second = _mm512_castps_si512(odd.v[0]);
  _mm512_storeu_si512(p, _mm512_mask_shuffle_epi8(second, 0x3333333333333333, first, order));
}

// One or two rows without tiles: VDPBF16PS adds the product of the upper numbers of a pair, then that of the lower ones, each rounded once.
// A tile adds its even numbers one after the other, and its odd ones: so pairs are the numbers e and e + 2.
#define BIFOLIO_OWN_ROW_WORDS
using RowWord = uint32_t;  // the pair of a row: e in the upper half, e + 2 in the lower one
constexpr int64_t kRowBlockWords = kQuantBlock / 2;

static inline void put_row_block(const uint16_t* words, RowWord* out) {
  for (int64_t i = 0; i < kRowBlockWords; ++i) {
    const int64_t e = i / 2 * 4 + i % 2;
    out[i] = RowWord(words[e]) << 16 | words[e + 2];
  }
}

template <Format F, int R>
static inline void add_block(const PackedPanel<F>& panel, int64_t b, const RowWord* x, int64_t stride, V16 sums[R]) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15));
  __m512 found[2][R];
  for (int r = 0; r < R; ++r) found[0][r] = found[1][r] = _mm512_setzero_ps();
  __m512i earlier[2];
  each_weight(panel, b, [&](int e, V16 weight) __attribute__((always_inline)) {
    const __m512i bits = _mm512_castps_si512(weight.v[0]);
    if (e % 4 < 2) {
      earlier[e % 2] = bits;
      return;
    }
    const __m512i pair = _mm512_mask_shuffle_epi8(earlier[e % 2], 0x3333333333333333, bits, order);
    for (int r = 0; r < R; ++r)
      found[e % 2][r] = _mm512_dpbf16_ps(found[e % 2][r], (__m512bh)pair, (__m512bh)_mm512_set1_epi32(int(x[r * stride + e / 4 * 2 + e % 2])));
  });
  for (int r = 0; r < R; ++r) sums[r] = add(sums[r], V16{{_mm512_add_ps(found[0][r], found[1][r])}});
}
