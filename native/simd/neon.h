// 128-bit registers of ARM.
#pragma once

using Reg = float32x4_t;
constexpr int kRegs = 4;

static inline float half_to_float(uint16_t h) { __fp16 value; std::memcpy(&value, &h, 2); return float(value); }
static inline uint16_t float_to_half(float value) { __fp16 h = __fp16(value); uint16_t r; std::memcpy(&r, &h, 2); return r; }

static inline Reg reg_broadcast(float x) { return vdupq_n_f32(x); }
static inline Reg reg_load(const float* p) { return vld1q_f32(p); }
static inline void reg_store(float* p, Reg a) { vst1q_f32(p, a); }
static inline Reg reg_load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static inline void reg_load_bf16_pairs(const uint16_t* p, Reg& first, Reg& second) {
  const uint16x8_t pair = vld1q_u16(p);
  first = vreinterpretq_f32_u16(vtrn1q_u16(vdupq_n_u16(0), pair));
  second = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u16(pair), vdupq_n_u32(0xffff0000u)));
}
static inline void reg_store_bf16(uint16_t* p, Reg a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
  const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
  vst1_u16(p, vmovn_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet)));
}
static inline Reg add(Reg a, Reg b) { return vaddq_f32(a, b); }
static inline Reg sub(Reg a, Reg b) { return vsubq_f32(a, b); }
static inline Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
static inline Reg div(Reg a, Reg b) { return vdivq_f32(a, b); }
static inline Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
static inline Reg max(Reg a, Reg b) { return vmaxq_f32(a, b); }
static inline Reg min(Reg a, Reg b) { return vminq_f32(a, b); }
static inline Reg abs(Reg a) { return vabsq_f32(a); }
static inline Reg power_of_two(Reg t) {
  return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(t), 23), vdupq_n_s32(127 << 23)));
}
static inline Reg zero_where_below(Reg x, Reg limit, Reg a) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, limit)));
}
static inline Reg copy_sign(Reg magnitude, Reg sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }

#include "v16.h"

static inline V16 load_f16(const uint16_t* p) {
  V16 r;
  for (int i = 0; i < 2; ++i) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p + 8 * i));
    r.v[2 * i] = vcvt_f32_f16(vget_low_f16(h));
    r.v[2 * i + 1] = vcvt_high_f32_f16(h);
  }
  return r;
}
using Bytes16 = uint8x16_t;
static inline Bytes16 load_bytes(const uint8_t* p) { return vld1q_u8(p); }
static inline Bytes16 bits_of(Bytes16 a, int shift, int mask) {
  return vandq_u8(vshlq_u8(a, vdupq_n_s8(int8_t(-shift))), vdupq_n_u8(uint8_t(mask)));
}
static inline Bytes16 nibbles_of(uint64_t word) {
  const uint8x16_t bytes = vreinterpretq_u8_u64(vdupq_n_u64(word));
  return vzip1q_u8(vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4));
}
static inline V16 to_floats(Bytes16 bytes) {
  const uint16x8_t words[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)};
  V16 r;
  for (int i = 0; i < 2; ++i) {
    r.v[2 * i] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(words[i])));
    r.v[2 * i + 1] = vcvtq_f32_u32(vmovl_high_u16(words[i]));
  }
  return r;
}
static inline V16 load_u8(const uint8_t* p) { return to_floats(load_bytes(p)); }
static inline void store_f16(uint16_t* p, V16 a) {
  for (int i = 0; i < 2; ++i) {
    const float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32(a.v[2 * i]), a.v[2 * i + 1]);
    vst1q_u16(p + 8 * i, vreinterpretq_u16_f16(h));
  }
}
static inline float reduce_add(V16 a) {
  const float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
static inline float reduce_max(V16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[2]), vmaxq_f32(a.v[1], a.v[3])));
}
static inline int32_t store_i8(int8_t* p, V16 t) {
  int16x8_t words[2];
  for (int i = 0; i < 2; ++i)
    words[i] = vuzp1q_s16(vreinterpretq_s16_f32(t.v[2 * i]), vreinterpretq_s16_f32(t.v[2 * i + 1]));
  const int8x16_t bytes = vuzp1q_s8(vreinterpretq_s8_s16(words[0]), vreinterpretq_s8_s16(words[1]));
  vst1q_s8(p, bytes);
  return vaddlvq_s8(bytes);
}
