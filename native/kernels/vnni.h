// Sums of one block with the AVX-512 VNNI dot product (unsigned weights, signed activations).
#pragma once

static inline __m512i four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// Weights are shifted to be unsigned, by 128 or by 8; the sums start at the negative of the excess.
template <int Bits, bool Signed, int R>
static inline void block_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  __m512i totals[R];
  for (int r = 0; r < R; ++r) totals[r] = _mm512_set1_epi32(Bits == 8 ? -128 * isum[r] : Signed ? -8 * isum[r] : 0);
  for (int line = 0; line < Bits; ++line) {
    const __m512i packed = _mm512_loadu_si512(w + line * 64);
    if constexpr (Bits == 8) {
      const __m512i weights = _mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(0x80)));
      for (int r = 0; r < R; ++r) totals[r] = _mm512_dpbusd_epi32(totals[r], weights, four_bytes(x + r * stride + line * 4));
    } else {
      const __m512i mask = _mm512_set1_epi8(15);
      const __m512i nibbles = Signed ? _mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(0x88))) : packed;
      const __m512i low = _mm512_and_si512(nibbles, mask), high = _mm512_and_si512(_mm512_srli_epi16(nibbles, 4), mask);
      for (int r = 0; r < R; ++r) totals[r] = _mm512_dpbusd_epi32(totals[r], low, four_bytes(x + r * stride + line * 4));
      for (int r = 0; r < R; ++r) totals[r] = _mm512_dpbusd_epi32(totals[r], high, four_bytes(x + r * stride + 16 + line * 4));
    }
  }
  for (int r = 0; r < R; ++r) sums[r].v[0] = _mm512_cvtepi32_ps(totals[r]);
}
