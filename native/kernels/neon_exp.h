// e^x of sixteen numbers at once, so that no operation waits for the one before it: the same steps as in `exp` of one register,
// and the same bits. Constants that serve as accumulators are loaded each time, since loads are cheaper than moves between vector
// registers.
#pragma once

#define BIFOLIO_OWN_EXP

alignas(16) static const float kExpTerms[6][4] = {
#define FOUR(X) {X, X, X, X}
    FOUR(12582912.0f),      FOUR(1.3981999507e-3f), FOUR(8.3334519073e-3f),
    FOUR(4.1665795894e-2f), FOUR(1.6666665459e-1f), FOUR(5.0000001201e-1f)
#undef FOUR
};

__attribute__((always_inline)) static inline float32x4_t loaded(const float* from) {
  float32x4_t value;
  asm volatile("ldr %q0, [%1]" : "=w"(value) : "r"(from));
  return value;
}

// GCC leaves it out of line in a file with many callers, which costs 2 % of a prompt.
__attribute__((always_inline)) static inline V16 exp(V16 x) {
  const float* terms = kExpTerms[0];
  asm("" : "+r"(terms));  // otherwise the constants are kept in registers and moved
  const float32x4_t lowest = vdupq_n_f32(-86.0f), highest = vdupq_n_f32(88.0f), inverse = vdupq_n_f32(1.44269504f);
  const float32x4_t one = vdupq_n_f32(1.0f), bias = vdupq_n_f32(12582912.0f), first = vdupq_n_f32(1.9875691500e-4f);
  const float32x4_t parts = {-0.693359375f, 2.12194440e-4f, 0.0f, 0.0f};
  float32x4_t r[4], t[4], p[4];
  EACH_REG r[i] = vminq_f32(highest, vmaxq_f32(lowest, x.v[i]));
  EACH_REG t[i] = vfmaq_f32(loaded(terms), r[i], inverse);
  EACH_REG {
    const float32x4_t n = vsubq_f32(t[i], bias);
    r[i] = vfmaq_laneq_f32(r[i], n, parts, 0);
    r[i] = vfmaq_laneq_f32(r[i], n, parts, 1);
  }
  EACH_REG p[i] = vfmaq_f32(loaded(terms + 4), first, r[i]);
  _Pragma("GCC unroll 4") for (int c = 2; c < 6; ++c) EACH_REG p[i] = vfmaq_f32(loaded(terms + 4 * c), p[i], r[i]);
  EACH_REG p[i] = vaddq_f32(vfmaq_f32(r[i], p[i], vmulq_f32(r[i], r[i])), one);
  EACH_REG x.v[i] = zero_where_below(x.v[i], lowest, vmulq_f32(p[i], power_of_two(t[i])));
  return x;
}
