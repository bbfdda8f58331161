// Rows to bytes with 512-bit registers, four blocks at a time: reductions take as many instructions for four blocks as for
// one.
#pragma once

static inline __m128i lower_quarter(__m512i a) { return _mm512_castsi512_si128(a); }

// The largest of each of four registers of numbers that are not negative, in every quarter of the result.
static inline __m512i reduce_four_max(const __m512i a[4]) {
  const __m512i left = _mm512_max_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i right = _mm512_max_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  const __m512i quarters = _mm512_max_epi32(_mm512_unpacklo_epi64(left, right), _mm512_unpackhi_epi64(left, right));
  const __m512i halves = _mm512_max_epi32(quarters, _mm512_shuffle_i32x4(quarters, quarters, 0x4e));
  return _mm512_max_epi32(halves, _mm512_shuffle_i32x4(halves, halves, 0xb1));
}

// x * factor for two blocks, as bytes: the first block in the lower half.
static inline __m512i two_blocks_to_bytes(const __m512 x[4], __m512 first, __m512 second) {
  const __m512i magic = _mm512_set1_epi32(0x4b400000);
  __m512i n[4];
  for (int i = 0; i < 4; ++i)
    n[i] = _mm512_sub_epi32(_mm512_castps_si512(whole(x[i], i < 2 ? first : second)), magic);
  const __m512i mixed = _mm512_packs_epi16(_mm512_packs_epi32(n[0], n[1]), _mm512_packs_epi32(n[2], n[3]));
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed);
}

// The sums of the bytes of four blocks.
static inline __m128i sum_four_blocks(__m512i first, __m512i second) {
  const __m512i ones = _mm512_set1_epi8(1);
  const __m512i a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, first);
  const __m512i b = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, second);
  __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, _MM_PERM_BADC));
  sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4(sums, sums, 0xb1));
  return _mm_unpacklo_epi32(lower_quarter(sums), _mm512_extracti32x4_epi32(sums, 2));
}

// Four blocks, each with the result of quantize_block.
static inline void quantize_four(const float* x, int8_t* q, float d[4], int32_t totals[4]) {
  __m512 values[8];
  __m512i largest[4];
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);  // the bits of numbers without a sign are ordered like them
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = _mm512_loadu_ps(x + i * kQuantBlock);
    values[2 * i + 1] = _mm512_loadu_ps(x + i * kQuantBlock + 16);
    largest[i] = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(values[2 * i]), magnitude),
                                  _mm512_and_si512(_mm512_castps_si512(values[2 * i + 1]), magnitude));
  }
  const __m128i bits = lower_quarter(reduce_four_max(largest));
  if (_mm_cmpgt_epi32_mask(bits, _mm_set1_epi32(0x7f7fffff))) {  // infinite or NaN
    for (int i = 0; i < 4; ++i) totals[i] = quantize_block(x + i * kQuantBlock, q + i * kQuantBlock, d[i]);
    return;
  }
  const __m128 tops = _mm_castsi128_ps(bits);
  _mm_storeu_ps(d, _mm_mul_ps(tops, _mm_set1_ps(1.0f / 127.0f)));
  const __m128 inverse = _mm_maskz_div_ps(_mm_cmpneq_epi32_mask(bits, _mm_setzero_si128()), _mm_set1_ps(127.0f), tops);
  const __m512 factors = _mm512_broadcast_f32x4(inverse);
  const __m512i left = two_blocks_to_bytes(values, _mm512_permute_ps(factors, 0x00), _mm512_permute_ps(factors, 0x55));
  const __m512i right = two_blocks_to_bytes(values + 4, _mm512_permute_ps(factors, 0xaa), _mm512_permute_ps(factors, 0xff));
  _mm512_storeu_si512(q, left);
  _mm512_storeu_si512(q + 2 * kQuantBlock, right);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(totals), sum_four_blocks(left, right));
}

static void quantize_row(const float* x, int64_t k, int8_t* q, float* scale, float* sum, int32_t* isum) {
  for (int64_t left = k / kQuantBlock; left > 0; left -= 4, x += 4 * kQuantBlock, q += 4 * kQuantBlock) {
    float d[4];
    int32_t totals[4];
    if (left >= 4) {
      quantize_four(x, q, d, totals);
    } else {
      float rest[4 * kQuantBlock] = {};
      int8_t bytes[4 * kQuantBlock];
      std::memcpy(rest, x, size_t(left * kQuantBlock) * sizeof(float));
      quantize_four(rest, bytes, d, totals);
      std::memcpy(q, bytes, size_t(left * kQuantBlock));
    }
    for (int64_t i = 0; i < 4 && i < left; ++i, scale += kRowGroup, sum += kRowGroup, isum += kRowGroup)
      *scale = d[i], *sum = d[i] * float(totals[i]), *isum = totals[i];
  }
}
