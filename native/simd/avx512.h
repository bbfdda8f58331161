// 512-bit registers of x86.
#pragma once

using Reg = __m512;
constexpr int kRegs = 1;

static inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
static inline __m256i load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline void store_words(uint16_t* p, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }

static inline Reg reg_broadcast(float x) { return _mm512_set1_ps(x); }
static inline Reg reg_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void reg_store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
static inline Reg reg_load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16));
}
static inline void reg_load_bf16_pairs(const uint16_t* p, Reg& first, Reg& second) {
  const __m512i pair = _mm512_loadu_si512(p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000u))));
}
static inline void reg_store_bf16(uint16_t* p, Reg a) {
  const __m512i bits = _mm512_castps_si512(a), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  store_words(p, _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet)));
}
static inline Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
static inline Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
static inline Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
static inline Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
static inline Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
static inline Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
static inline Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
static inline Reg abs(Reg a) { return _mm512_abs_ps(a); }
static inline Reg power_of_two(Reg t) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23), _mm512_set1_epi32(127 << 23)));
}
static inline Reg zero_where_below(Reg x, Reg limit, Reg a) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
static inline Reg copy_sign(Reg magnitude, Reg sign) {
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
}

#include "v16.h"

static inline V16 load_f16(const uint16_t* p) { return {{_mm512_cvtph_ps(load_words(p))}}; }
using Bytes16 = __m128i;
static inline Bytes16 load_bytes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline Bytes16 bits_of(Bytes16 a, int shift, int mask) { return _mm_and_si128(_mm_srli_epi16(a, shift), _mm_set1_epi8(char(mask))); }
static inline Bytes16 nibbles_of(uint64_t word) {
  const __m128i bytes = _mm_cvtsi64_si128(int64_t(word));
  return _mm_unpacklo_epi8(bits_of(bytes, 0, 15), bits_of(bytes, 4, 15));
}
static inline V16 to_floats(Bytes16 a) { return {{_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(a))}}; }
static inline V16 load_u8(const uint8_t* p) { return to_floats(load_bytes(p)); }
static inline void store_f16(uint16_t* p, V16 a) { store_words(p, _mm512_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT)); }
static inline float reduce_add(V16 a) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v[0]), _mm512_extractf32x8_ps(a.v[0], 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 t = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float reduce_max(V16 a) {
  const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(a.v[0]), _mm512_extractf32x8_ps(a.v[0], 1));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 t = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline int32_t store_i8(int8_t* p, V16 t) {
  const __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(t.v[0]), _mm512_set1_epi32(0x4b400000));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}
