// Few queries over caches of floats: rows are read in place.
//
// The two vector units are the bottleneck, so the instructions of the inner loops are ordered to keep both busy: numbers are
// widened while those before them are multiplied. Each instruction is one statement of inline assembly, which the compiler
// does not reorder, and whose registers it allocates. In the compiler's own order they take a quarter longer.
#pragma once

#define IN_ORDER static inline __attribute__((always_inline))

typedef float32x4_t AnyFloats __attribute__((may_alias));

IN_ORDER float32x4_t load_now(const void* from) {
  float32x4_t value;
  asm volatile("ldr %q0, %1" : "=w"(value) : "m"(*static_cast<const AnyFloats*>(from)));
  return value;
}
IN_ORDER float32x4_t zero_now() {  // free; the compiler would copy a register, which occupies a vector unit
  float32x4_t value;
  asm volatile("movi %0.4s, #0" : "=w"(value));
  return value;
}
IN_ORDER void multiply_add(float32x4_t& sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
}
template <int Lane>
IN_ORDER void multiply_add(float32x4_t& sum, float32x4_t a, float32x4_t b) {
  asm volatile("fmla %0.4s, %1.4s, %2.s[%c3]" : "+w"(sum) : "w"(a), "w"(b), "i"(Lane));
}

// Eight numbers of a row on their way to floats; the upper four of half floats in units of 2^-112, see `widen_halves`. To be
// called in this order. Shifts and masks of one half run beside the conversion of the other, which takes two cycles.
template <KvType T>
struct Eight {
  float32x4_t words, low, high;

  __attribute__((always_inline)) void load(const uint8_t* row) {
    words = load_now(row);
    if constexpr (T == KvType::F32) low = words, high = load_now(row + 16);
  }
  __attribute__((always_inline)) void widen_low() {
    if constexpr (T == KvType::F16) asm volatile("fcvtl %0.4s, %1.4h" : "=w"(low) : "w"(words));
    if constexpr (T == KvType::BF16) asm volatile("zip1 %0.8h, %2.8h, %1.8h" : "=w"(low) : "w"(words), "w"(vdupq_n_u16(0)));
  }
  __attribute__((always_inline)) void shift_high() {
    if constexpr (T == KvType::F16) asm volatile("sshll2 %0.4s, %1.8h, #13" : "=w"(high) : "w"(words));
    if constexpr (T == KvType::BF16) asm volatile("zip2 %0.8h, %2.8h, %1.8h" : "=w"(high) : "w"(words), "w"(vdupq_n_u16(0)));
  }
  __attribute__((always_inline)) void mask_high() {
    if constexpr (T == KvType::F16) asm volatile("bic %0.4s, #0x70, lsl #24" : "+w"(high));
  }
  __attribute__((always_inline)) void widen() { widen_low(), shift_high(), mask_high(); }
};

template <KvType T>
constexpr int64_t kNumberBytes = T == KvType::F32 ? 4 : 2;
template <KvType T>
constexpr float kUpperUnit = T == KvType::F16 ? kHalfUnit : 1.0f;  // the factor of the upper four

// The queries as `score_directly` takes them: those that it takes together as [head_dim / 8][rows][8], with the unit of the
// upper four in them.
template <KvType T>
static inline void prepare_direct(const AttentionRows& rows, int64_t head_dim, float* query) {
  for (int64_t r = 0; r < rows.count; r += 4) {
    const int64_t together = rows.count - r < 4 ? rows.count - r : 4;
    for (int64_t d = 0; d < head_dim; d += 8)
      for (int64_t i = r; i < r + together; ++i, query += 8) {
        vst1q_f32(query, vld1q_f32(rows.query + i * head_dim + d));
        vst1q_f32(query + 4, vmulq_n_f32(vld1q_f32(rows.query + i * head_dim + d + 4), kUpperUnit<T>));
      }
  }
}

// softmax_directly leaves two values to mix_directly, behind the weights of few rows and in rows of the same size: the weights
// of the upper four of eight numbers, and the factor by which the sums of a row shrink.
constexpr int64_t kAbove = kMaxRows / 4 * kTile, kShrink = kMaxRows / 2 * kTile;

// The tiles whose rows are prefetched: the second into a farther cache level, the first into a nearer one.
struct Ahead {
  const Tile &first, &second;
  explicit Ahead(const Tile& tile) : first(tile.ahead ? *tile.ahead : tile), second(first.ahead ? *first.ahead : first) {}
};

// Prefetch `Bytes` of four rows of both, a small part in every round of the loop.
template <int Bytes>
IN_ORDER void prefetch_rows(const uint8_t* first, const uint8_t* second) {
  UNROLL for (int at = 0; at < Bytes; at += 64) __builtin_prefetch(second + at, 0, 2);
  UNROLL for (int at = 0; at < Bytes; at += 64) __builtin_prefetch(first + at);
}

// Four positions at a time; the four lanes of a sum are the four chains. S positions are multiplied while the next S are
// widened: after the last ones of a group those of the next group.
template <KvType T, int R>
static inline void score_directly(const Tile& tile, const float* query, float* scores) {
  constexpr int S = 2;  // fewer would stall on the latency of their sums, more have no registers
  const int64_t bytes = tile.kv.head_dim * kNumberBytes<T>;
  const size_t step = tile.kv.row_bytes;
  const Ahead ahead(tile);
  int64_t i = tile.begin / 4 * 4;
  Eight<T> now[S], next[S];
  UNROLL for (int s = 0; s < S; ++s) now[s].load(tile.keys[i / 4] + s * step), now[s].widen();
  for (; i < tile.end; i += 4) {
    const uint8_t *row = tile.keys[i / 4], *end = row + bytes;
    const uint8_t *first_keys = ahead.first.keys[i / 4], *second_keys = ahead.second.keys[i / 4];
    const uint8_t* after = i + 4 < tile.end ? tile.keys[i / 4 + 1] : row;
    const float* q = query;
    float32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int p = 0; p < 4; ++p) sums[r][p] = zero_now();
    do {
      float32x4_t part[R];  // four of eight numbers of each query: there are not enough registers for all
      prefetch_rows<32 * kNumberBytes<T>>(first_keys, second_keys);
      const uint8_t* then = row + 8 * kNumberBytes<T> == end ? after : row + 8 * kNumberBytes<T>;
      UNROLL for (int p = 0; p < 4; p += S) {
        UNROLL for (int s = 0; s < S; ++s) next[s].load(p + S < 4 ? row + (p + S + s) * step : then + s * step);
        UNROLL for (int j = 0; j < 2 * S; ++j) {
          if (j % S == 0) UNROLL for (int r = 0; r < R; ++r) part[r] = load_now(q + 8 * r + j / S * 4);
          if (j % 2 == 0) next[j / 2].widen_low();
          UNROLL for (int r = 0; r < R; ++r) multiply_add(sums[r][p + j % S], j < S ? now[j].low : now[j - S].high, part[r]);
          j % 2 ? next[j / 2].mask_high() : next[j / 2].shift_high();
        }
        UNROLL for (int s = 0; s < S; ++s) now[s] = next[s];
      }
      row += 8 * kNumberBytes<T>, q += 8 * R, first_keys += 32 * kNumberBytes<T>, second_keys += 32 * kNumberBytes<T>;
    } while (row != end);
    UNROLL for (int r = 0; r < R; ++r) {
      const float32x4_t left = vpaddq_f32(sums[r][0], sums[r][1]), right = vpaddq_f32(sums[r][2], sums[r][3]);
      vst1q_f32(scores + r * kTile + i, vpaddq_f32(left, right));
    }
  }
}

// Sixteen numbers of one position, times the weights of lane L, while those of the next position are widened.
template <int L, KvType T, int R>
IN_ORDER void mix_position(const uint8_t* then, Eight<T> now[2], const float32x4_t weight[R], const float32x4_t upper[R],
                           float32x4_t sums[R][4]) {
  Eight<T> next[2];
  next[0].load(then);
  next[1].load(then + 8 * kNumberBytes<T>);
  UNROLL for (int h = 0; h < 2; ++h) {
    next[h].widen_low();
    UNROLL for (int r = 0; r < R; ++r) multiply_add<L>(sums[r][2 * h], now[h].low, weight[r]);
    next[h].shift_high();
    UNROLL for (int r = 0; r < R; ++r) multiply_add<L>(sums[r][2 * h + 1], now[h].high, upper[r]);
    next[h].mask_high();
  }
  now[0] = next[0], now[1] = next[1];
}

// Positions [begin, end), a few: one after the other.
template <KvType T, int R>
static inline void mix_single(const Tile& tile, int64_t begin, int64_t end, const float* weights, int64_t padded, float* mixed) {
  for (int64_t i = begin; i < end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; d += 16) {
      const V16 values = load_kv(T, tile.value(i), d, tile.kv.head_dim);
      for (int r = 0; r < R; ++r)
        store(mixed + r * padded + d, fma(values, broadcast(weights[r * kTile + i]), load(mixed + r * padded + d)));
    }
}

// Positions [begin, end) in fours, sixteen dimensions at a time.
template <KvType T, int R>
static inline void mix_fours(const Tile& tile, int64_t begin, int64_t end, const float* weights, int64_t padded,
                             float* mixed) {
  const size_t step = tile.kv.row_bytes;
  const Ahead ahead(tile);
  constexpr int64_t bytes = 16 * kNumberBytes<T>;
  const int64_t row_bytes = tile.kv.head_dim * kNumberBytes<T>;
  Eight<T> now[2];
  UNROLL for (int h = 0; h < 2; ++h) now[h].load(tile.values[begin / 4] + h * bytes / 2), now[h].widen();
  for (int64_t at = 0; at < row_bytes; at += bytes, mixed += 16) {
    float32x4_t sums[R][4];
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c)
        sums[r][c] = vmulq_n_f32(vld1q_f32(mixed + r * padded + 4 * c), weights[kShrink + r * kTile]);
    const uint8_t* const* group = tile.values + begin / 4;
    const uint8_t* later = *group + at + bytes;  // readable: three more rows follow
    for (int64_t i = begin; i < end; i += 4, ++group) {
      const uint8_t *row = *group + at, *after = i + 4 < end ? group[1] + at : later;
      float32x4_t weight[R], upper[R];
      UNROLL for (int r = 0; r < R; ++r) weight[r] = load_now(weights + r * kTile + i);
      UNROLL for (int r = 0; r < R; ++r) upper[r] = T == KvType::F16 ? load_now(weights + kAbove + r * kTile + i) : weight[r];
      prefetch_rows<4 * bytes>(ahead.first.values[group - tile.values] + 4 * at, ahead.second.values[group - tile.values] + 4 * at);
      mix_position<0, T, R>(row + step, now, weight, upper, sums);
      mix_position<1, T, R>(row + 2 * step, now, weight, upper, sums);
      mix_position<2, T, R>(row + 3 * step, now, weight, upper, sums);
      mix_position<3, T, R>(after, now, weight, upper, sums);
    }
    UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < 4; ++c) vst1q_f32(mixed + r * padded + 4 * c, sums[r][c]);
  }
}

template <KvType T, int R>
static inline void mix_directly(const Tile& tile, const float* weights, int64_t padded, float* mixed) {
  const int64_t first = (tile.begin + 3) / 4 * 4, last = tile.end / 4 * 4;
  if (first >= last) return mix_single<T, R>(tile, tile.begin, tile.end, weights, padded, mixed);
  mix_single<T, R>(tile, tile.begin, first, weights, padded, mixed);
  mix_fours<T, R>(tile, first, last, weights, padded, mixed);
  mix_single<T, R>(tile, last, tile.end, weights, padded, mixed);
}

#undef IN_ORDER
