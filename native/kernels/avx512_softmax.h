// The online softmax with 512-bit registers: four rows at a time, whose reductions take as many instructions as one's.
#pragma once

// Two registers of each row become one register with a quarter for each row, halves of rows added in the order of a tree:
// 8 + 8, 4 + 4; `join` adds.
template <class Join>
static inline Reg quarters_of_rows(const Reg a[4], Join join) {
  const Reg left = join(_mm512_shuffle_f32x4(a[0], a[1], 0x44), _mm512_shuffle_f32x4(a[0], a[1], 0xee));
  const Reg right = join(_mm512_shuffle_f32x4(a[2], a[3], 0x44), _mm512_shuffle_f32x4(a[2], a[3], 0xee));
  return join(_mm512_shuffle_f32x4(left, right, 0x88), _mm512_shuffle_f32x4(left, right, 0xdd));
}

// One number for each row, in the whole quarter of the row.
template <class Join>
static inline Reg reduce_rows(const Reg a[4], Join join) {
  const Reg quarters = quarters_of_rows(a, join);
  const Reg halves = join(quarters, _mm512_permute_ps(quarters, 0x4e));
  return join(halves, _mm512_permute_ps(halves, 0xb1));
}

// Four numbers side by side to a quarter each, and back.
static inline Reg to_quarters(const float* p) {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), _mm512_castps128_ps512(_mm_loadu_ps(p)));
}
static inline void from_quarters(float* p, Reg a) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(p, _mm512_castps512_ps128(_mm512_permutexvar_ps(order, a)));
}
static inline Reg quarter_to_all(Reg a, int row) {
  return row == 0   ? _mm512_shuffle_f32x4(a, a, 0x00)
         : row == 1 ? _mm512_shuffle_f32x4(a, a, 0x55)
         : row == 2 ? _mm512_shuffle_f32x4(a, a, 0xaa)
                    : _mm512_shuffle_f32x4(a, a, 0xff);
}

// softmax_row for four rows that see the whole tile.
static inline void softmax_four(float* scores, float* maximum, float* total, float* mixed, int64_t padded) {
  Reg x[8], pairs[4];
  UNROLL for (int i = 0; i < 8; ++i) x[i] = reg_load(scores + 16 * i);
  UNROLL for (int r = 0; r < 4; ++r) pairs[r] = max(x[2 * r], x[2 * r + 1]);
  const Reg largest = reduce_rows(pairs, [](Reg a, Reg b) { return max(a, b); });
  const Reg before = to_quarters(maximum);
  const __mmask16 grows = _mm512_cmp_ps_mask(largest, before, _CMP_NLE_UQ);
  const Reg top = _mm512_mask_mov_ps(before, grows, largest);
  Reg sums = to_quarters(total);
  if (grows) {
    const Reg shrink = _mm512_mask_mov_ps(reg_broadcast(1.0f), grows, exp(sub(before, top)));
    UNROLL for (int r = 0; r < 4; ++r) {
      const Reg factor = quarter_to_all(shrink, r);
      for (int64_t d = 0; d < padded; d += 16) reg_store(mixed + r * padded + d, mul(reg_load(mixed + r * padded + d), factor));
    }
    sums = mul(sums, shrink);
    from_quarters(maximum, top);
  }
  UNROLL for (int r = 0; r < 4; ++r) {
    const Reg own = quarter_to_all(top, r);
    UNROLL for (int i = 2 * r; i < 2 * r + 2; ++i) x[i] = exp(sub(x[i], own));
    pairs[r] = add(x[2 * r], x[2 * r + 1]);
  }
  UNROLL for (int i = 0; i < 8; ++i) reg_store(scores + 16 * i, x[i]);
  from_quarters(total, add(sums, reduce_rows(pairs, [](Reg a, Reg b) { return add(a, b); })));
}
