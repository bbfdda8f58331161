// Sixteen float lanes in two 256-bit registers.
#pragma once

struct V16 {
  __m256 v[2];
};

#define EACH for (int i = 0; i < 2; ++i)

static inline V16 broadcast(float x) { V16 r; EACH r.v[i] = _mm256_set1_ps(x); return r; }
static inline V16 zero() { V16 r; EACH r.v[i] = _mm256_setzero_ps(); return r; }
static inline V16 load(const float* p) { V16 r; EACH r.v[i] = _mm256_loadu_ps(p + 8 * i); return r; }
static inline void store(float* p, V16 a) { EACH _mm256_storeu_ps(p + 8 * i, a.v[i]); }
static inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
static inline uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
static inline __m128i load_half_line(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
static inline V16 load_f16(const uint16_t* p) { V16 r; EACH r.v[i] = _mm256_cvtph_ps(load_half_line(p + 8 * i)); return r; }
static inline void store_f16(uint16_t* p, V16 a) {
  EACH _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i), _mm256_cvtps_ph(a.v[i], _MM_FROUND_TO_NEAREST_INT));
}
static inline V16 load_bf16(const uint16_t* p) {
  V16 r;
  EACH r.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half_line(p + 8 * i)), 16));
  return r;
}
static inline void load_bf16_pairs(const uint16_t* p, V16& first, V16& second) {
  EACH {
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16 * i));
    first.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
    second.v[i] = _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000u))));
  }
}
static inline void store_bf16(uint16_t* p, V16 a) {
  EACH {
    const __m256i bits = _mm256_castps_si256(a.v[i]), upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.v[i], a.v[i], _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8 * i),
                     _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
}
static inline V16 load_i8(const int8_t* p) {
  V16 r;
  EACH r.v[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i))));
  return r;
}
static inline V16 add(V16 a, V16 b) { EACH a.v[i] = _mm256_add_ps(a.v[i], b.v[i]); return a; }
static inline V16 sub(V16 a, V16 b) { EACH a.v[i] = _mm256_sub_ps(a.v[i], b.v[i]); return a; }
static inline V16 mul(V16 a, V16 b) { EACH a.v[i] = _mm256_mul_ps(a.v[i], b.v[i]); return a; }
static inline V16 div(V16 a, V16 b) { EACH a.v[i] = _mm256_div_ps(a.v[i], b.v[i]); return a; }
static inline V16 fma(V16 a, V16 b, V16 c) { EACH c.v[i] = _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i]); return c; }
static inline V16 max(V16 a, V16 b) { EACH a.v[i] = _mm256_max_ps(a.v[i], b.v[i]); return a; }
static inline V16 min(V16 a, V16 b) { EACH a.v[i] = _mm256_min_ps(a.v[i], b.v[i]); return a; }
static inline V16 abs(V16 a) { EACH a.v[i] = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v[i]); return a; }
static inline V16 round(V16 a) {
  EACH a.v[i] = _mm256_round_ps(a.v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return a;
}
static inline V16 power_of_two(V16 n) {
  EACH n.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v[i]), _mm256_set1_epi32(127)), 23));
  return n;
}
static inline V16 zero_where_below(V16 x, V16 limit, V16 a) {
  EACH a.v[i] = _mm256_andnot_ps(_mm256_cmp_ps(x.v[i], limit.v[i], _CMP_LT_OQ), a.v[i]);
  return a;
}
static inline V16 copy_sign(V16 magnitude, V16 sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  EACH magnitude.v[i] = _mm256_or_ps(_mm256_andnot_ps(mask, magnitude.v[i]), _mm256_and_ps(mask, sign.v[i]));
  return magnitude;
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
static inline int32_t store_i8(int8_t* p, V16 a) {
  const __m256i low = _mm256_cvtps_epi32(a.v[0]), high = _mm256_cvtps_epi32(a.v[1]);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  const __m256i s = _mm256_add_epi32(low, high);
  __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
}
#undef EACH
