// Products with F32, F16 and BF16 weights: chains of fma over k, sixteen output columns at a time.
#pragma once

// acc[r] += x[r][0..count) * w[0..count)[16], for R rows; w has `w_stride` floats from one k to the next.
#ifndef BIFOLIO_OWN_FMA_TILE
template <int R>
static inline void fma_tile(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t count,
                            V16 acc[R]) {
  for (int64_t k = 0; k < count; ++k) {
    const V16 column = load(w + k * w_stride);
    for (int r = 0; r < R; ++r) acc[r] = fma(column, broadcast(x[r * x_stride + k]), acc[r]);
  }
}
#endif

// Two panels at once, where the sums of one would stall on latency.
template <int R>
static inline void fma_two_tiles(const float* x, int64_t x_stride, const float* w, int64_t w_stride, int64_t count,
                                 V16 first[R], V16 second[R]) {
#ifdef BIFOLIO_OWN_FMA_TILE
  fma_tile<R>(x, x_stride, w, w_stride, count, first);
  fma_tile<R>(x, x_stride, w + kPanel, w_stride, count, second);
#else
  for (int64_t k = 0; k < count; ++k) {
    const V16 left = load(w + k * w_stride), right = load(w + k * w_stride + kPanel);
    for (int r = 0; r < R; ++r) {
      const V16 value = broadcast(x[r * x_stride + k]);
      first[r] = fma(left, value, first[r]);
      second[r] = fma(right, value, second[r]);
    }
  }
#endif
}

#ifndef BIFOLIO_PAIRED_ROWS
#define BIFOLIO_PAIRED_ROWS 2  // up to so many rows two panels are read side by side, to have more independent sums
#endif

#ifndef BIFOLIO_FLOAT_ROWS
#define BIFOLIO_FLOAT_ROWS 4  // rows of a tile when there are many
#endif

// The same straight from packed weights, widened in registers: for few rows, where each weight is used a few times.
#ifndef BIFOLIO_OWN_FMA_PACKED
// P panels that lie `panel_bytes` apart.
template <Format F, int R, int P>
static inline void fma_packed(const float* x, int64_t x_stride, const uint8_t* panel, size_t panel_bytes, int64_t count,
                              V16 acc[P][R]) {
  const auto add_column = [&](int p, V16 column, int64_t k) {
    for (int r = 0; r < R; ++r) acc[p][r] = fma(column, broadcast(x[r * x_stride + k]), acc[p][r]);
  };
  if constexpr (F == Format::F32) {
    for (int p = 0; p < P; ++p)
      fma_tile<R>(x, x_stride, reinterpret_cast<const float*>(panel + size_t(p) * panel_bytes), kPanel, count, acc[p]);
  } else if constexpr (F == Format::F16) {
    for (int64_t k = 0; k < count; ++k)
      for (int p = 0; p < P; ++p)
        add_column(p, load_f16(reinterpret_cast<const uint16_t*>(panel + size_t(p) * panel_bytes) + k * kPanel), k);
  } else {
    int64_t k = 0;
    V16 first, second;
    for (; k + 1 < count; k += 2)
      for (int p = 0; p < P; ++p) {
        load_bf16_pairs(reinterpret_cast<const uint16_t*>(panel + size_t(p) * panel_bytes) + k * kPanel, first, second);
        add_column(p, first, k);
        add_column(p, second, k + 1);
      }
    for (int p = 0; p < P && k < count; ++p) {
      load_bf16_pairs(reinterpret_cast<const uint16_t*>(panel + size_t(p) * panel_bytes) + k * kPanel, first, second);
      add_column(p, first, k);
    }
  }
}
#endif

// k values of a panel as floats: [count][16].
template <Format F>
static inline void widen_panel(const uint8_t* panel, int64_t k_begin, int64_t count, float* out) {
  const auto* w = reinterpret_cast<const uint16_t*>(panel) + k_begin * kPanel;
  if constexpr (F == Format::F16) {
    for (int64_t k = 0; k < count; ++k) store(out + k * kPanel, load_f16(w + k * kPanel));
  } else {
    for (int64_t k = 0; k < count; k += 2) {
      V16 first, second;
      load_bf16_pairs(w + k * kPanel, first, second);
      store(out + k * kPanel, first);
      store(out + (k + 1) * kPanel, second);
    }
  }
}

// Columns [column, column + 16) of one row of the result, less where the matrix ends.
static inline void finish_columns(V16 acc, const PackedMatrix& m, int64_t column, const float* bias, float* y) {
  const int64_t count = m.n - column < kPanel ? m.n - column : kPanel;
  if (count == kPanel) {
    store(y + column, bias ? add(acc, load(bias + column)) : acc);
  } else {
    store_part(y + column, bias ? add(acc, load_part(bias + column, count)) : acc, count);
  }
}


template <Format F, int R, int P>
static inline void multiply_panels(const PackedMatrix& m, const Activations& x, const float* bias, float* y,
                                   int64_t y_stride, int64_t panel) {
  V16 acc[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) acc[p][r] = zero();
  fma_packed<F, R, P>(x.x, x.x_stride, m.panel(panel), m.panel_bytes, m.k, acc);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) finish_columns(acc[p][r], m, (panel + p) * kPanel, bias, y + r * y_stride);
}

template <Format F, int R>
static void matmul_float_few(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                             int64_t begin, int64_t end) {
  int64_t p = begin;
  if constexpr (R <= BIFOLIO_PAIRED_ROWS)
    for (; p + 2 <= end; p += 2) multiply_panels<F, R, 2>(m, x, bias, y, y_stride, p);
  for (; p < end; ++p) multiply_panels<F, R, 1>(m, x, bias, y, y_stride, p);
}

constexpr int64_t kWidenedK = 512;  // k values of a panel that are floats in the scratch at a time (32 KB)

// Where the columns of a tile go.
struct FloatResult {
  float* y;  // of the first row of the block
  int64_t stride;
  const float* bias;  // null: none
};

#ifdef BIFOLIO_OWN_FLOAT_TILE
#include "avx512_float_tile.h"
#else
constexpr int64_t kFloatPanels = 1;  // panels of a tile
constexpr int64_t kFloatK = kWidenedK;  // k values of a panel that all rows are multiplied with before the next ones
constexpr decltype(KernelTable::pack_rows) kPackRows = nullptr;

// sums[r] += x[r][0..count) * w[0..count)[16]; a first part begins at 0.
template <int R, int P>
static inline void accumulate_rows(const float* x, int64_t x_stride, const float* const w[P], int64_t count, float* sums, bool first) {
  static_assert(P == 1);
  V16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = first ? zero() : load(sums + r * kPanel);
  fma_tile<R>(x, x_stride, w[0], kPanel, count, acc);
  for (int r = 0; r < R; ++r) store(sums + r * kPanel, acc[r]);
}

template <int P>
static inline void accumulate_block(const Activations& x, int64_t row_begin, int64_t rows, int64_t begin, int64_t count,
                                    const float* const w[P], const float* const[P], float* sums, const FloatResult*) {
  const float* source = x.x + row_begin * x.x_stride + begin;
  const bool first = begin == 0;
  int64_t r = 0;
  for (; r + BIFOLIO_FLOAT_ROWS <= rows; r += BIFOLIO_FLOAT_ROWS)
    accumulate_rows<BIFOLIO_FLOAT_ROWS, P>(source + r * x.x_stride, x.x_stride, w, count, sums + r * kPanel, first);
  for (; r + 4 <= rows; r += 4) accumulate_rows<4, P>(source + r * x.x_stride, x.x_stride, w, count, sums + r * kPanel, first);
  for (; r < rows; ++r) accumulate_rows<1, P>(source + r * x.x_stride, x.x_stride, w, count, sums + r * kPanel, first);
}
#endif

constexpr bool kWritesResults = kFloatPanels > 1;  // tiles write whole panels of the result themselves

// P panels of a block of rows.
template <Format F, int P>
static inline void multiply_block(const PackedMatrix& m, const Activations& x, int64_t row_begin, int64_t rows, const float* bias,
                                  float* y, int64_t y_stride, int64_t panel, float* scratch) {
  const int64_t most = F == Format::F32 && rows <= kFloatTileRows ? m.k : kFloatK;  // a single tile reads weights once
  float* sums = scratch + P * kFloatK * kPanel;  // [rows][P][16]
  const float *w[P], *ahead[P];
  const bool writes = kWritesResults && (panel + P) * kPanel <= m.n;
  const FloatResult result{y + row_begin * y_stride + panel * kPanel, y_stride, bias ? bias + panel * kPanel : nullptr};
  for (int64_t k = 0; k < m.k; k += most) {
    const int64_t count = m.k - k < most ? m.k - k : most;
    for (int p = 0; p < P; ++p) {
      const auto* own = reinterpret_cast<const float*>(m.panel(panel + p));
      w[p] = F == Format::F32 ? own + k * kPanel : scratch + p * kFloatK * kPanel;
      if constexpr (F != Format::F32) widen_panel<F>(m.panel(panel + p), k, count, scratch + p * kFloatK * kPanel);
      const bool at_end = k + count == m.k, ends = panel + P + p >= m.num_panels;
      ahead[p] = F != Format::F32 ? w[p] : !at_end ? w[p] + count * kPanel : ends ? own : reinterpret_cast<const float*>(m.panel(panel + P + p));
    }
    accumulate_block<P>(x, row_begin, rows, k, count, w, ahead, sums, writes && k + count == m.k ? &result : nullptr);
  }
  if (writes) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int p = 0; p < P; ++p)
      finish_columns(load(sums + (r * P + p) * kPanel), m, (panel + p) * kPanel, bias, y + (row_begin + r) * y_stride);
}

template <Format F>
static void matmul_float_many(const PackedMatrix& m, const Activations& x, int64_t row_begin, int64_t rows,
                              const float* bias, float* y, int64_t y_stride, int64_t begin, int64_t end,
                              uint8_t* scratch) {
  auto* floats = reinterpret_cast<float*>(scratch);
  int64_t p = begin;
  for (; p + kFloatPanels <= end; p += kFloatPanels)
    multiply_block<F, kFloatPanels>(m, x, row_begin, rows, bias, y, y_stride, p, floats);
  for (; p < end; ++p) multiply_block<F, 1>(m, x, row_begin, rows, bias, y, y_stride, p, floats);
}

template <Format F>
static void matmul_float(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  if (x.rows <= 4) {
    switch (x.rows) {
      case 1: return matmul_float_few<F, 1>(m, x, bias, y, y_stride, begin, end);
      case 2: return matmul_float_few<F, 2>(m, x, bias, y, y_stride, begin, end);
      case 3: return matmul_float_few<F, 3>(m, x, bias, y, y_stride, begin, end);
      default: return matmul_float_few<F, 4>(m, x, bias, y, y_stride, begin, end);
    }
  }
  for (int64_t block = 0; block < parts_of(x.rows, kFloatBlock); ++block) {
    const int64_t row = part_begin(x.rows, kFloatBlock, block), rows = part_begin(x.rows, kFloatBlock, block + 1) - row;
    matmul_float_many<F>(m, x, row, rows, bias, y, y_stride, begin, end, scratch);
  }
}
