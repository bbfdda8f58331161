// The online softmax of few rows on ARM: up to four at a time, so that rows hide each other's latency, and without branches
// that depend on the scores. Values of a row, such as its maximum, are lanes of a register.
#pragma once

template <KvType T>
static inline void store_weights(float* weights, float32x4_t p) {
  vst1q_f32(weights, p);
  if constexpr (T == KvType::F16) vst1q_f32(weights + kAbove, vmulq_n_f32(p, kUpperUnit<T>));
}

// e^(x - top) of a row's 32 scores, all of them from -86 to 0: `exp` without its checks. The results are normal
// numbers, so that a power of two can be added to their exponents. Returns their sum in four parts.
template <KvType T>
static inline float32x4_t weigh_in_range(float* scores, float32x4_t top) {
  const float* terms = kExpTerms[0];
  asm("" : "+r"(terms));  // see `exp`
  const float32x4_t inverse = vdupq_n_f32(1.44269504f), one = vdupq_n_f32(1.0f), bias = vdupq_n_f32(12582912.0f);
  const float32x4_t first = vdupq_n_f32(1.9875691500e-4f);
  const float32x4_t parts = {-0.693359375f, 2.12194440e-4f, 0.0f, 0.0f};
#define EACH UNROLL for (int i = 0; i < 8; ++i)
  float32x4_t r[8], t[8], p[8];
  EACH r[i] = vsubq_f32(vld1q_f32(scores + 4 * i), top);
  EACH t[i] = vfmaq_f32(loaded(terms), r[i], inverse);
  EACH p[i] = vsubq_f32(t[i], bias);
  EACH r[i] = vfmaq_laneq_f32(r[i], p[i], parts, 0);
  EACH r[i] = vfmaq_laneq_f32(r[i], p[i], parts, 1);
  EACH p[i] = vfmaq_f32(loaded(terms + 4), first, r[i]);
  UNROLL for (int c = 2; c < 6; ++c) EACH p[i] = vfmaq_f32(loaded(terms + 4 * c), p[i], r[i]);
  EACH p[i] = vaddq_f32(vfmaq_f32(r[i], p[i], vmulq_f32(r[i], r[i])), one);
  EACH p[i] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p[i]), vshlq_n_s32(vreinterpretq_s32_f32(t[i]), 23)));
  EACH store_weights<T>(scores + 4 * i, p[i]);
#undef EACH
  UNROLL for (int i = 0; i < 4; ++i) p[i] = vaddq_f32(p[i], p[i + 4]);
  return vaddq_f32(vaddq_f32(p[0], p[2]), vaddq_f32(p[1], p[3]));
}

// The same for any scores.
template <KvType T>
static inline float32x4_t weigh_any(float* scores, float32x4_t top) {
  V16 weights[2];
  UNROLL for (int h = 0; h < 2; ++h) {
    weights[h] = load(scores + 16 * h);
    EACH_REG weights[h].v[i] = vsubq_f32(weights[h].v[i], top);
    weights[h] = exp(weights[h]);
    EACH_REG store_weights<T>(scores + 16 * h + 4 * i, weights[h].v[i]);
  }
  const V16 sum = add(weights[0], weights[1]);
  return vaddq_f32(vaddq_f32(sum.v[0], sum.v[2]), vaddq_f32(sum.v[1], sum.v[3]));
}

// One number of each row to a lane, and back.
template <int R>
static inline float32x4_t to_lanes(const float* p) {
  float32x4_t a = vdupq_n_f32(0.0f);
  a = vld1q_lane_f32(p, a, 0);
  if constexpr (R > 1) a = vld1q_lane_f32(p + 1, a, 1);
  if constexpr (R > 2) a = vld1q_lane_f32(p + 2, a, 2);
  if constexpr (R > 3) a = vld1q_lane_f32(p + 3, a, 3);
  return a;
}
template <int R>
static inline void from_lanes(float* p, int64_t step, float32x4_t a) {
  vst1q_lane_f32(p, a, 0);
  if constexpr (R > 1) vst1q_lane_f32(p + step, a, 1);
  if constexpr (R > 2) vst1q_lane_f32(p + 2 * step, a, 2);
  if constexpr (R > 3) vst1q_lane_f32(p + 3 * step, a, 3);
}

// The halves of two registers added.
static inline float32x4_t add_halves(float32x4_t a, float32x4_t b) {
  const float64x2_t left = vreinterpretq_f64_f32(a), right = vreinterpretq_f64_f32(b);
  return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(left, right)), vreinterpretq_f32_f64(vzip2q_f64(left, right)));
}

// softmax_row for R rows that see the whole tile; mix_directly shrinks their sums.
template <KvType T, int R>
static inline void softmax_whole(float* scores, float* maximum, float* total) {
  float32x4_t most[4] = {}, least[4] = {}, sums[4] = {};
  UNROLL for (int r = 0; r < R; ++r) {
    const V16 left = load(scores + r * kTile), right = load(scores + r * kTile + 16);
    float32x4_t high[4], low[4];
    EACH_REG high[i] = vmaxq_f32(left.v[i], right.v[i]), low[i] = vminq_f32(left.v[i], right.v[i]);
    most[r] = vmaxq_f32(vmaxq_f32(high[0], high[2]), vmaxq_f32(high[1], high[3]));
    least[r] = vminq_f32(vminq_f32(low[0], low[2]), vminq_f32(low[1], low[3]));
  }
  const float32x4_t largest = vpmaxq_f32(vpmaxq_f32(most[0], most[1]), vpmaxq_f32(most[2], most[3]));
  const float32x4_t smallest = vpminq_f32(vpminq_f32(least[0], least[1]), vpminq_f32(least[2], least[3]));
  const float32x4_t before = to_lanes<R>(maximum);
  const uint32x4_t stays = vcleq_f32(largest, before);
  const float32x4_t top = vbslq_f32(stays, before, largest);
  const float32x4_t tops[4] = {vdupq_laneq_f32(top, 0), vdupq_laneq_f32(top, 1), vdupq_laneq_f32(top, 2), vdupq_laneq_f32(top, 3)};
  from_lanes<R>(maximum, 1, top);
  const float32x4_t shrink = vbslq_f32(stays, vdupq_n_f32(1.0f), exp(vsubq_f32(before, top)));
  from_lanes<R>(scores + kShrink, kTile, shrink);
  if (vminvq_f32(vsubq_f32(smallest, top)) >= -86.0f) {
    UNROLL for (int r = 0; r < R; ++r) sums[r] = weigh_in_range<T>(scores + r * kTile, tops[r]);
  } else {
    UNROLL for (int r = 0; r < R; ++r) sums[r] = weigh_any<T>(scores + r * kTile, tops[r]);
  }
  const float32x4_t sum = vpaddq_f32(add_halves(sums[0], sums[1]), add_halves(sums[2], sums[3]));
  from_lanes<R>(total, 1, vaddq_f32(vmulq_f32(to_lanes<R>(total), shrink), sum));
}

template <KvType T>
static inline void softmax_directly(const AttentionRows& rows, int64_t first_row, int64_t start, int64_t padded, float* scores) {
  bool whole = true;
  for (int64_t r = first_row; r < rows.count; ++r) whole &= rows.begin[r] <= start && rows.end[r] >= start + kTile;
  if (whole) {
#define CALL(R) softmax_whole<T, R>(scores + r * kTile, rows.maximum + r, rows.total + r)
    BIFOLIO_BY_ROWS(first_row, rows.count, CALL)
#undef CALL
    return;
  }
  softmax_rows(rows, first_row, start, padded, scores);
  for (int64_t r = first_row; r < rows.count; ++r) {
    scores[kShrink + r * kTile] = 1.0f;
    for (int64_t j = 0; j < kTile; j += 4) store_weights<T>(scores + r * kTile + j, vld1q_f32(scores + r * kTile + j));
  }
}
