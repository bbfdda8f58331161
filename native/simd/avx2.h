// 256-bit registers of x86.
#pragma once

using Reg = __m256;
constexpr int kRegs = 2;

static inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
static inline __m128i load_eight_words(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline void store_eight_words(uint16_t* p, __m128i a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), a); }

static inline Reg reg_broadcast(float x) { return _mm256_set1_ps(x); }
static inline Reg reg_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void reg_store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
static inline Reg reg_load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_eight_words(p)), 16));
}
static inline void reg_load_bf16_pairs(const uint16_t* p, Reg& first, Reg& second) {
  const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  first = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
  second = _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000u))));
}
static inline void reg_store_bf16(uint16_t* p, Reg a) {
  const __m256i bits = _mm256_castps_si256(a), upper = _mm256_srli_epi32(bits, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
  store_eight_words(p, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
static inline Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
static inline Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
static inline Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
static inline Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
static inline Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
static inline Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
static inline Reg abs(Reg a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline Reg power_of_two(Reg t) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23), _mm256_set1_epi32(127 << 23)));
}
static inline Reg zero_where_below(Reg x, Reg limit, Reg a) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), a); }
static inline Reg copy_sign(Reg magnitude, Reg sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign));
}

#include "v16.h"

static inline V16 load_f16(const uint16_t* p) { V16 r; EACH_REG r.v[i] = _mm256_cvtph_ps(load_eight_words(p + 8 * i)); return r; }
using Bytes16 = __m128i;
static inline Bytes16 load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline Bytes16 bits_of(Bytes16 a, int shift, int mask) { return _mm_and_si128(_mm_srli_epi16(a, shift), _mm_set1_epi8(char(mask))); }
static inline Bytes16 nibbles_of(uint64_t word) {
  const __m128i bytes = _mm_cvtsi64_si128(int64_t(word));
  return _mm_unpacklo_epi8(bits_of(bytes, 0, 15), bits_of(bytes, 4, 15));
}
static inline V16 to_floats(Bytes16 a) {
  return {{_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(a)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(a, a)))}};
}
static inline V16 load_u8(const uint8_t* p) { return to_floats(load_bytes(p)); }
static inline void store_f16(uint16_t* p, V16 a) {
  EACH_REG store_eight_words(p + 8 * i, _mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT));
}
static inline float reduce_add(V16 a) {
  const __m256 s = _mm256_add_ps(a.v[0], a.v[1]);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 t = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float reduce_max(V16 a) {
  const __m256 s = _mm256_max_ps(a.v[0], a.v[1]);
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 t = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline int32_t store_i8(int8_t* p, V16 t) {
  const __m256i bias = _mm256_set1_epi32(0x4b400000);
  const __m256i low = _mm256_sub_epi32(_mm256_castps_si256(t.v[0]), bias);
  const __m256i high = _mm256_sub_epi32(_mm256_castps_si256(t.v[1]), bias);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m256i s = _mm256_add_epi32(low, high);
  __m128i u = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  u = _mm_add_epi32(u, _mm_shuffle_epi32(u, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(u, _mm_shuffle_epi32(u, 0xb1)));
}
