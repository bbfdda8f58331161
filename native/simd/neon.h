// Sixteen float lanes in four 128-bit registers.
#pragma once

struct V16 {
  float32x4_t v[4];
};

#define EACH for (int i = 0; i < 4; ++i)

static inline V16 broadcast(float x) { V16 r; EACH r.v[i] = vdupq_n_f32(x); return r; }
static inline V16 zero() { return broadcast(0.0f); }
static inline V16 load(const float* p) { V16 r; EACH r.v[i] = vld1q_f32(p + 4 * i); return r; }
static inline void store(float* p, V16 a) { EACH vst1q_f32(p + 4 * i, a.v[i]); }
static inline float half_to_float(uint16_t h) { __fp16 value; std::memcpy(&value, &h, 2); return float(value); }
static inline uint16_t float_to_half(float value) { __fp16 h = __fp16(value); uint16_t r; std::memcpy(&r, &h, 2); return r; }
static inline float32x4_t widen_f16(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }
static inline V16 load_f16(const uint16_t* p) {
  V16 r;
  for (int i = 0; i < 2; ++i) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p + 8 * i));
    r.v[2 * i] = vcvt_f32_f16(vget_low_f16(h));
    r.v[2 * i + 1] = vcvt_high_f32_f16(h);
  }
  return r;
}
static inline void store_f16(uint16_t* p, V16 a) {
  for (int i = 0; i < 2; ++i) {
    const float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32(a.v[2 * i]), a.v[2 * i + 1]);
    vst1q_u16(p + 8 * i, vreinterpretq_u16_f16(h));
  }
}
static inline V16 load_bf16(const uint16_t* p) {
  V16 r;
  for (int i = 0; i < 2; ++i) {
    const uint16x8_t h = vld1q_u16(p + 8 * i);
    r.v[2 * i] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16));
    r.v[2 * i + 1] = vreinterpretq_f32_u32(vshll_high_n_u16(h, 16));
  }
  return r;
}
static inline void load_bf16_pairs(const uint16_t* p, V16& first, V16& second) {
  EACH {
    const uint32x4_t pair = vreinterpretq_u32_u16(vld1q_u16(p + 8 * i));
    first.v[i] = vreinterpretq_f32_u32(vshlq_n_u32(pair, 16));
    second.v[i] = vreinterpretq_f32_u32(vandq_u32(pair, vdupq_n_u32(0xffff0000u)));
  }
}
static inline void store_bf16(uint16_t* p, V16 a) {
  EACH {
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v[i]);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd), 16);
    const uint32x4_t quiet = vorrq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(0x40));
    const uint32x4_t is_number = vceqq_f32(a.v[i], a.v[i]);
    vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(is_number, rounded, quiet)));
  }
}
static inline V16 load_i8(const int8_t* p) {
  const int8x16_t b = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_high_s8(b);
  V16 r;
  r.v[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
  r.v[1] = vcvtq_f32_s32(vmovl_high_s16(low));
  r.v[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
  r.v[3] = vcvtq_f32_s32(vmovl_high_s16(high));
  return r;
}
static inline V16 add(V16 a, V16 b) { EACH a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
static inline V16 sub(V16 a, V16 b) { EACH a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
static inline V16 mul(V16 a, V16 b) { EACH a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
static inline V16 div(V16 a, V16 b) { EACH a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
static inline V16 fma(V16 a, V16 b, V16 c) { EACH c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
static inline V16 max(V16 a, V16 b) { EACH a.v[i] = vmaxq_f32(a.v[i], b.v[i]); return a; }
static inline V16 min(V16 a, V16 b) { EACH a.v[i] = vminq_f32(a.v[i], b.v[i]); return a; }
static inline V16 abs(V16 a) { EACH a.v[i] = vabsq_f32(a.v[i]); return a; }
static inline V16 round(V16 a) { EACH a.v[i] = vrndnq_f32(a.v[i]); return a; }
static inline V16 power_of_two(V16 n) {
  EACH n.v[i] = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23));
  return n;
}
static inline V16 zero_where_below(V16 x, V16 limit, V16 a) {
  EACH a.v[i] = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.v[i]), vcltq_f32(x.v[i], limit.v[i])));
  return a;
}
static inline V16 copy_sign(V16 magnitude, V16 sign) {
  EACH magnitude.v[i] = vbslq_f32(vdupq_n_u32(0x80000000u), sign.v[i], magnitude.v[i]);
  return magnitude;
}
static inline float reduce_add(V16 a) {
  const float32x4_t s = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
  return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
static inline float reduce_max(V16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[2]), vmaxq_f32(a.v[1], a.v[3])));
}
static inline int32_t store_i8(int8_t* p, V16 a) {
  int32x4_t n[4];
  EACH n[i] = vcvtq_s32_f32(a.v[i]);
  const int16x8_t low = vcombine_s16(vmovn_s32(n[0]), vmovn_s32(n[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(n[2]), vmovn_s32(n[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  return vaddlvq_s16(vaddq_s16(low, high));
}
#undef EACH
