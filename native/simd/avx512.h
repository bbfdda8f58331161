// Sixteen float lanes in one 512-bit register.
#pragma once

struct V16 {
  __m512 v;
};

static inline V16 broadcast(float x) { return {_mm512_set1_ps(x)}; }
static inline V16 zero() { return {_mm512_setzero_ps()}; }
static inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
static inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
static inline __m256i load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline void store_words(uint16_t* p, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
static inline V16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(load_words(p))}; }
static inline void store_f16(uint16_t* p, V16 a) { store_words(p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)); }
static inline V16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16))};
}
static inline void load_bf16_pairs(const uint16_t* p, V16& first, V16& second) {
  const __m512i pair = _mm512_loadu_si512(p);
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(int(0xffff0000u))));
}
static inline void store_bf16(uint16_t* p, V16 a) {
  const __m512i bits = _mm512_castps_si512(a.v), upper = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  store_words(p, _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(is_nan, rounded, quiet)));
}
static inline V16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline V16 abs(V16 a) { return {_mm512_abs_ps(a.v)}; }
static inline V16 round(V16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline V16 power_of_two(V16 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
static inline V16 zero_where_below(V16 x, V16 limit, V16 a) {
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), _mm512_setzero_ps())};
}
static inline V16 copy_sign(V16 magnitude, V16 sign) {
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(mask, magnitude.v), _mm512_and_ps(mask, sign.v))};
}
static inline float reduce_add(V16 a) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 t = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float reduce_max(V16 a) {
  const __m256 s = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  const __m128 t = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline int32_t store_i8(int8_t* p, V16 a) {
  const __m512i whole = _mm512_cvtps_epi32(a.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
  return _mm512_reduce_add_epi32(whole);
}
