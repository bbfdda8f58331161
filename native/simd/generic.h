// Sixteen float lanes in plain C++: the twin that every other instruction set is tested against.
#pragma once

struct Reg {
  float v[16];
};
constexpr int kRegs = 1;

#define EACH for (int i = 0; i < 16; ++i)

// a * b + c, rounded once. Without an instruction for it: the product of two floats is exact in double precision, and the sum is rounded to
// odd, so that the second rounding, to a float, is that of the exact sum. `error` is the exact difference of both.
static inline float fma1(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  const double product = double(a) * double(b), addend = double(c), sum = product + addend;
  const double part = sum - product, error = (product - (sum - part)) + (addend - part);
  const auto bits = __builtin_bit_cast(uint64_t, sum);
  const uint64_t even = std::fabs(error) > 0 ? ~bits & 1 : 0;  // error is NaN where the sum is not finite
  const uint64_t inwards = (__builtin_bit_cast(uint64_t, error) ^ bits) >> 63;
  const auto odd = __builtin_bit_cast(double, bits + even - ((even & inwards) << 1));
  return float(odd);
#endif
}

#if defined(__aarch64__) && defined(__ARM_FP16_FORMAT_IEEE)  // every machine of this architecture converts half floats
static inline float half_to_float(uint16_t h) {
  __fp16 half;
  std::memcpy(&half, &h, 2);
  return float(half);
}

static inline uint16_t float_to_half(float value) {  // round to nearest even
  const auto half = __fp16(value);
  uint16_t word;
  std::memcpy(&word, &half, 2);
  return word;
}
#else
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
#endif

static inline Reg reg_from_bits(const uint32_t* bits) { Reg r; std::memcpy(r.v, bits, 64); return r; }
static inline Reg reg_broadcast(float x) { Reg r; EACH r.v[i] = x; return r; }
static inline Reg reg_load(const float* p) { Reg r; std::memcpy(r.v, p, 64); return r; }
static inline void reg_store(float* p, Reg a) { std::memcpy(p, a.v, 64); }
static inline Reg reg_load_bf16(const uint16_t* p) { uint32_t b[16]; EACH b[i] = uint32_t(p[i]) << 16; return reg_from_bits(b); }
static inline void reg_load_bf16_pairs(const uint16_t* p, Reg& first, Reg& second) {
  uint32_t a[16], b[16];
  EACH { a[i] = uint32_t(p[2 * i]) << 16; b[i] = uint32_t(p[2 * i + 1]) << 16; }
  first = reg_from_bits(a);
  second = reg_from_bits(b);
}
static inline void reg_store_bf16(uint16_t* p, Reg a) {
  uint32_t b[16];
  std::memcpy(b, a.v, 64);
  EACH p[i] = (b[i] & 0x7fffffff) > 0x7f800000 ? uint16_t((b[i] >> 16) | 0x40)
                                               : uint16_t((b[i] + 0x7fff + ((b[i] >> 16) & 1)) >> 16);
}
static inline Reg add(Reg a, Reg b) { EACH a.v[i] += b.v[i]; return a; }
static inline Reg sub(Reg a, Reg b) { EACH a.v[i] -= b.v[i]; return a; }
static inline Reg mul(Reg a, Reg b) { EACH a.v[i] *= b.v[i]; return a; }
static inline Reg div(Reg a, Reg b) { EACH a.v[i] /= b.v[i]; return a; }
static inline Reg fma(Reg a, Reg b, Reg c) { EACH c.v[i] = fma1(a.v[i], b.v[i], c.v[i]); return c; }
static inline Reg max(Reg a, Reg b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline Reg min(Reg a, Reg b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline Reg abs(Reg a) { EACH a.v[i] = std::fabs(a.v[i]); return a; }
static inline Reg power_of_two(Reg t) {
  uint32_t b[16];
  std::memcpy(b, t.v, 64);
  EACH b[i] = (b[i] << 23) + (127u << 23);
  return reg_from_bits(b);
}
static inline Reg zero_where_below(Reg x, Reg limit, Reg a) { EACH a.v[i] = x.v[i] < limit.v[i] ? 0.0f : a.v[i]; return a; }
static inline Reg copy_sign(Reg magnitude, Reg sign) { EACH magnitude.v[i] = std::copysign(magnitude.v[i], sign.v[i]); return magnitude; }

#include "v16.h"

static inline V16 load_f16(const uint16_t* p) { V16 r; EACH r.v[0].v[i] = half_to_float(p[i]); return r; }
struct Bytes16 {
  uint8_t v[16];
};
static inline Bytes16 load_bytes(const uint8_t* p) { Bytes16 r; std::memcpy(r.v, p, 16); return r; }
static inline Bytes16 bits_of(Bytes16 a, int shift, int mask) { EACH a.v[i] = uint8_t(a.v[i] >> shift & mask); return a; }
static inline Bytes16 nibbles_of(uint64_t word) { Bytes16 r; EACH r.v[i] = uint8_t(word >> (4 * i) & 15); return r; }
static inline V16 to_floats(Bytes16 a) { V16 r; EACH r.v[0].v[i] = float(a.v[i]); return r; }
static inline V16 load_u8(const uint8_t* p) { return to_floats(load_bytes(p)); }
static inline void store_f16(uint16_t* p, V16 a) { EACH p[i] = float_to_half(a.v[0].v[i]); }
static inline float reduce_add(V16 a) {
  float* v = a.v[0].v;
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
static inline float reduce_max(V16 a) {
  float* v = a.v[0].v;
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}
static inline int32_t store_i8(int8_t* p, V16 t) {
  uint32_t b[16];
  std::memcpy(b, t.v[0].v, 64);
  int32_t sum = 0;
  EACH { p[i] = int8_t(uint8_t(b[i])); sum += p[i]; }
  return sum;
}
#undef EACH
