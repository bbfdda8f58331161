// Blocks as bytes, and their sums with the AVX-512 VNNI dot product (unsigned weights, signed activations).
#pragma once

static inline __m512i four_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

// factor * number, where both have sixteen bits.
template <int Factor>
static inline __m512i broadcast_times(const int32_t& number) {
  return _mm512_dpwssd_epi32(_mm512_setzero_si512(), _mm512_set1_epi32(number), _mm512_set1_epi32(Factor & 0xffff));
}

// Signed weights are shifted to be unsigned, by 128 or by 8; the sums start at the negative of the excess.
template <int Bits, bool Signed, int R>
static inline void block_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  __m512i totals[R];
  for (int r = 0; r < R; ++r) totals[r] = Signed ? broadcast_times<(Bits == 8 ? -128 : -8)>(isum[r]) : _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int line = 0; line < Bits; ++line) {
    const __m512i packed = _mm512_loadu_si512(w + line * 64);
    if constexpr (Bits == 8) {
      const __m512i weights = Signed ? _mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(0x80))) : packed;
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

// Sixteen bytes of each row against half a block of bytes.
template <bool Signed, int R>
static inline void half_dots(const uint8_t* w, const int8_t* x, int64_t stride, const int32_t* isum, V16 sums[R]) {
  __m512i totals[R];
  for (int r = 0; r < R; ++r) totals[r] = Signed ? broadcast_times<-128>(isum[r]) : _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int line = 0; line < 4; ++line) {
    const __m512i packed = _mm512_loadu_si512(w + line * 64);
    const __m512i weights = Signed ? _mm512_xor_si512(packed, _mm512_set1_epi8(int8_t(0x80))) : packed;
    for (int r = 0; r < R; ++r) totals[r] = _mm512_dpbusd_epi32(totals[r], weights, four_bytes(x + r * stride + line * 4));
  }
  for (int r = 0; r < R; ++r) sums[r].v[0] = _mm512_cvtepi32_ps(totals[r]);
}

#define BIFOLIO_OWN_UNPACK
constexpr float kNibbleUnit = 1.0f, kSixBitUnit = 0.25f;
constexpr Coding unpacked_coding(Coding packed) { return packed.unpacked(); }

template <Coding C>
static inline void unpack_block(const uint8_t* quants, const int8_t* table, uint8_t* out) {
  const auto mask = [](__m512i a, int bits) { return _mm512_and_si512(a, _mm512_set1_epi8(char(bits))); };
  if constexpr (C.bits == 4) {
    const __m512i values =
        C.table       ? _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)))
        : C.is_signed ? _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1))
                      : _mm512_setzero_si512();
    for (int i = 0; i < 256; i += 64) {
      const __m512i pairs = _mm512_loadu_si512(quants + i), low = mask(pairs, 15), high = mask(_mm512_srli_epi16(pairs, 4), 15);
      _mm512_storeu_si512(out + i, C.table || C.is_signed ? _mm512_shuffle_epi8(values, low) : low);
      _mm512_storeu_si512(out + 256 + i, C.table || C.is_signed ? _mm512_shuffle_epi8(values, high) : high);
    }
  } else {
    for (int half = 0; half < 2; ++half, quants += 192, out += 256) {
      const __m512i first = _mm512_loadu_si512(quants), second = _mm512_loadu_si512(quants + 64), third = _mm512_loadu_si512(quants + 128);
      _mm512_storeu_si512(out, mask(_mm512_slli_epi16(first, 2), 0xfc));
      _mm512_storeu_si512(out + 64, mask(_mm512_slli_epi16(second, 2), 0xfc));
      _mm512_storeu_si512(out + 128, mask(_mm512_slli_epi16(third, 2), 0xfc));
      const __m512i lower = _mm512_or_si512(mask(_mm512_srli_epi16(second, 2), 0x30), mask(_mm512_srli_epi16(first, 4), 0x0c));
      _mm512_storeu_si512(out + 192, _mm512_or_si512(mask(third, 0xc0), lower));
    }
  }
}
