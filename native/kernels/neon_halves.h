// One row against sixteen columns of half floats, in an order of instructions that keeps both vector units busy: columns of
// one k are widened while those of the k before it are multiplied.
//
//   v0-v3     sums                               v4, v5   four numbers of the row, and the same times 2^56
//   v8-v15    columns of two k, widened          v16-v19  the same as they lie in memory
#pragma once

#define WIDEN_AND_MULTIPLY(AT, R, S, A, B, C, D, E, F, G, H, LANE)                                              \
  "ldr q" #R ", [%[w], #" #AT "]\n ldr q" #S ", [%[w], #16+" #AT "]\n"                                          \
  "fcvtl v" #E ".4s, v" #R ".4h\n sshll2 v" #F ".4s, v" #R ".8h, #13\n"                                         \
  "fmla v0.4s, v" #A ".4s, v4.s[" #LANE "]\n fmla v1.4s, v" #B ".4s, v5.s[" #LANE "]\n"                         \
  "bic v" #F ".4s, #0x70, lsl #24\n fcvtl v" #G ".4s, v" #S ".4h\n sshll2 v" #H ".4s, v" #S ".8h, #13\n"        \
  "fmla v2.4s, v" #C ".4s, v4.s[" #LANE "]\n fmla v3.4s, v" #D ".4s, v5.s[" #LANE "]\n"                         \
  "bic v" #H ".4s, #0x70, lsl #24\n"

// sums[c] += columns 4c to 4c + 3 times x, in units of 2^-56 for odd c. `count` is a multiple of 4, and at least one more k
// follows.
static inline void multiply_halves(const float* x, const uint16_t* w, int64_t count, float32x4_t sums[4]) {
  if (count == 0) return;
  const float unit = 7.205759403792794e16f;  // 2^56
  asm volatile(
      "ldp q0, q1, [%[sums]]\n ldp q2, q3, [%[sums], #32]\n"
      "ldp q16, q17, [%[w]]\n"
      "fcvtl v8.4s, v16.4h\n sshll2 v9.4s, v16.8h, #13\n bic v9.4s, #0x70, lsl #24\n"
      "fcvtl v10.4s, v17.4h\n sshll2 v11.4s, v17.8h, #13\n bic v11.4s, #0x70, lsl #24\n"
      "1:\n"
      "ldr q4, [%[x]], #16\n fmul v5.4s, v4.4s, %[unit].s[0]\n"
      WIDEN_AND_MULTIPLY(32, 18, 19, 8, 9, 10, 11, 12, 13, 14, 15, 0)
      "prfm pldl1keep, [%[w], #1024]\n"
      WIDEN_AND_MULTIPLY(64, 16, 17, 12, 13, 14, 15, 8, 9, 10, 11, 1)
      "prfm pldl1keep, [%[w], #1088]\n"
      WIDEN_AND_MULTIPLY(96, 18, 19, 8, 9, 10, 11, 12, 13, 14, 15, 2)
      WIDEN_AND_MULTIPLY(128, 16, 17, 12, 13, 14, 15, 8, 9, 10, 11, 3)
      "add %[w], %[w], #128\n"
      "subs %[count], %[count], #4\n"
      "b.ne 1b\n"
      "stp q0, q1, [%[sums]]\n stp q2, q3, [%[sums], #32]\n"
      : [x] "+&r"(x), [w] "+&r"(w), [count] "+&r"(count)
      : [sums] "r"(sums), [unit] "w"(unit)
      : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17",
        "v18", "v19");
}

#undef WIDEN_AND_MULTIPLY
