// Sixteen float lanes in plain C++: the twin that every other instruction set is tested against.
#pragma once

struct V16 {
  float v[16];
};

#define EACH for (int i = 0; i < 16; ++i)

static inline float fma1(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  uint32_t bits;
  float value;
  if (magnitude >= 0x7c00) {
    bits = sign | 0x7f800000 | ((magnitude & 0x3ff) << 13);
  } else if (magnitude >= 0x0400) {
    bits = sign | ((magnitude << 13) + 0x38000000);
  } else {  // subnormal: an integer times 2^-24
    value = float(magnitude) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t float_to_half(float value) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves round(value * 2^24) in the low bits
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return uint16_t(sign | ((bits - 0x38000000) >> 13));
}

static inline V16 zero() { return V16{}; }
static inline V16 broadcast(float x) { V16 r; EACH r.v[i] = x; return r; }
static inline V16 load(const float* p) { V16 r; std::memcpy(r.v, p, 64); return r; }
static inline void store(float* p, V16 a) { std::memcpy(p, a.v, 64); }
static inline V16 load_f16(const uint16_t* p) { V16 r; EACH r.v[i] = half_to_float(p[i]); return r; }
static inline void store_f16(uint16_t* p, V16 a) { EACH p[i] = float_to_half(a.v[i]); }
static inline V16 from_bits(const uint32_t* bits) { V16 r; std::memcpy(r.v, bits, 64); return r; }
static inline V16 load_bf16(const uint16_t* p) { uint32_t b[16]; EACH b[i] = uint32_t(p[i]) << 16; return from_bits(b); }
// Pairs of bfloat16 side by side: the first and the second of each.
static inline void load_bf16_pairs(const uint16_t* p, V16& first, V16& second) {
  uint32_t a[16], b[16];
  EACH { a[i] = uint32_t(p[2 * i]) << 16; b[i] = uint32_t(p[2 * i + 1]) << 16; }
  first = from_bits(a);
  second = from_bits(b);
}
static inline void store_bf16(uint16_t* p, V16 a) {
  uint32_t b[16];
  std::memcpy(b, a.v, 64);
  EACH p[i] = (b[i] & 0x7fffffff) > 0x7f800000 ? uint16_t((b[i] >> 16) | 0x40)
                                               : uint16_t((b[i] + 0x7fff + ((b[i] >> 16) & 1)) >> 16);
}
static inline V16 load_i8(const int8_t* p) { V16 r; EACH r.v[i] = float(p[i]); return r; }
static inline V16 add(V16 a, V16 b) { EACH a.v[i] += b.v[i]; return a; }
static inline V16 sub(V16 a, V16 b) { EACH a.v[i] -= b.v[i]; return a; }
static inline V16 mul(V16 a, V16 b) { EACH a.v[i] *= b.v[i]; return a; }
static inline V16 div(V16 a, V16 b) { EACH a.v[i] /= b.v[i]; return a; }
static inline V16 fma(V16 a, V16 b, V16 c) { EACH c.v[i] = fma1(a.v[i], b.v[i], c.v[i]); return c; }
// The second of the two where one is NaN.
static inline V16 max(V16 a, V16 b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V16 min(V16 a, V16 b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline V16 abs(V16 a) { EACH a.v[i] = std::fabs(a.v[i]); return a; }
static inline V16 round(V16 a) { EACH a.v[i] = std::nearbyintf(a.v[i]); return a; }
// 2^n for whole n in [-126, 127].
static inline V16 power_of_two(V16 n) {
  uint32_t b[16];
  EACH b[i] = n.v[i] == n.v[i] ? uint32_t(int32_t(n.v[i]) + 127) << 23 : 0;
  return from_bits(b);
}
// a, but 0 where x < limit
static inline V16 zero_where_below(V16 x, V16 limit, V16 a) { EACH a.v[i] = x.v[i] < limit.v[i] ? 0.0f : a.v[i]; return a; }
static inline V16 copy_sign(V16 magnitude, V16 sign) { EACH magnitude.v[i] = std::copysign(magnitude.v[i], sign.v[i]); return magnitude; }
static inline float reduce_add(V16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}
static inline float reduce_max(V16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
// Whole numbers in [-127, 127] to bytes; returns their sum.
static inline int32_t store_i8(int8_t* p, V16 a) {
  int32_t sum = 0;
  EACH { p[i] = int8_t(a.v[i]); sum += p[i]; }
  return sum;
}
#undef EACH
