// Products of quantised weights with up to sixteen rows, in the arithmetic of tiles; and the choice among all products.
//
// Panels are read once, from beginning to end. Their weights are widened block by block, two blocks before a tile of them is
// multiplied. One or two rows do without tiles: then the weights need not go through memory.
#pragma once

// Decoding reads a panel once, from beginning to end: the blocks that come sixteen later are prefetched.
template <Format F>
static inline void prefetch_block(const PackedPanel<F>& panel, int64_t b) {
  constexpr int64_t blocks = group_blocks(F), share = group_bytes(F) / blocks;
  const uint8_t* soon = panel.group(b + 16) + b % blocks * share;
  for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(soon + line);
}

// One tile of rows against one or two panels.
template <Format F, bool Right>
static void multiply_widened(const PackedPanel<F> panels[2], const uint16_t* rows, int64_t tile_words, int64_t steps, uint8_t* words,
                             float* left, float* right) {
  constexpr int64_t lag = 2, ring = 4;  // blocks that are widened before one is multiplied, and that are kept
  _tile_zero(0);
  if constexpr (Right) _tile_zero(2);
  for (int64_t step = 0; step < steps + lag; ++step) {
    for (int side = 0; side <= Right && step < steps; ++side) {
      prefetch_block(panels[side], step);
      widen_block(panels[side], step, words + (step % ring * 2 + side) * kTileBytes);
    }
    finish_writes();
    if (step < lag) continue;
    const uint8_t* tile = words + (step - lag) % ring * 2 * kTileBytes;
    _tile_loadd(4, rows + (step - lag) * tile_words, 64);
    _tile_loadd(6, tile, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Right) {
      _tile_loadd(7, tile + kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
  }
  _tile_stored(0, left, 64);
  if constexpr (Right) _tile_stored(2, right, 64);
  finish_writes();
}

template <Format F>
static void matmul_widened(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                           int64_t begin, int64_t end, uint8_t* scratch) {
  configure_tiles(x.rows);
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    const bool right = group.panels > 1;
    const PackedPanel<F> panels[2] = {{m.panel(group.first_panel), m.table}, {m.panel(group.first_panel + right), m.table}};
    const auto multiply = right ? multiply_widened<F, true> : multiply_widened<F, false>;
    multiply(panels, x.bf16, x.rows * kQuantBlock, m.k / kQuantBlock, scratch + kGroupSums * sizeof(float), group.at(0, 0), group.at(right, 0));
    for (int64_t p = 0; p < group.panels; ++p) group.finish(p, 0);
  });
}

#ifndef BIFOLIO_OWN_ROW_WORDS
// A row as one or two rows without tiles read it: bfloat16 numbers as floats.
using RowWord = float;
static inline void put_row_block(const uint16_t* words, RowWord* out) {
  for (int64_t i = 0; i < kQuantBlock; i += 16) store(out + i, load_bf16(words + i));
}

// Adds the tile product to the sums of R rows without tiles.
template <Format F, int R>
static inline void add_block(const PackedPanel<F>& panel, int64_t b, const RowWord* x, int64_t stride, V16 sums[R]) {
  V16 found[2][R];
  for (int r = 0; r < R; ++r) found[0][r] = found[1][r] = zero();
  each_weight(panel, b, [&](int e, V16 weight) __attribute__((always_inline)) {
    for (int r = 0; r < R; ++r) found[e % 2][r] = fma(upper_half(weight), broadcast(x[r * stride + e]), found[e % 2][r]);
  });
  for (int r = 0; r < R; ++r) sums[r] = add(sums[r], add(found[0][r], found[1][r]));
}
constexpr int64_t kRowBlockWords = kQuantBlock;
#endif

template <Format F, int R>
static void matmul_rows(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                        int64_t begin, int64_t end, uint8_t* scratch) {
  auto* words = reinterpret_cast<RowWord*>(scratch);
  const int64_t blocks = m.k / kQuantBlock, stride = blocks * kRowBlockWords;
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t r = 0; r < R; ++r) put_row_block(x.bf16 + (b * R + r) * kQuantBlock, words + r * stride + b * kRowBlockWords);
  for (int64_t p = begin; p < end; ++p) {
    const PackedPanel<F> panel{m.panel(p), m.table};
    V16 sums[R];
    for (int r = 0; r < R; ++r) sums[r] = zero();
    for (int64_t b = 0; b < blocks; ++b) {
      prefetch_block(panel, b);
      add_block<F, R>(panel, b, words + b * kRowBlockWords, stride, sums);
    }
    for (int r = 0; r < R; ++r) finish_columns(sums[r], m, p * kPanel, bias, y + r * y_stride);
  }
}

template <Format F>
static void matmul_blocks(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                          int64_t begin, int64_t end, uint8_t* scratch) {
  const bool fits = x.rows * m.k <= kGroupSums;  // as floats
  const auto multiply = x.rows == 1 && fits   ? matmul_rows<F, 1>
                        : x.rows == 2 && fits ? matmul_rows<F, 2>
                        : x.rows <= kTileRows ? matmul_widened<F>
                                              : matmul_words<F>;
  multiply(m, x, bias, y, y_stride, begin, end, scratch);
}

static void matmul_tiles(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  if (!x.bf16 || m.format < Format::BF16) return matmul(m, x, bias, y, y_stride, begin, end, scratch);
  static constexpr decltype(&matmul_words<Format::BF16>) multiply[] = {
      matmul_words<Format::BF16>, matmul_blocks<Format::Q8_0>, matmul_blocks<Format::Q4_0>, matmul_blocks<Format::Q4_1>,
      matmul_blocks<Format::Q4_T>, matmul_blocks<Format::Q4_T_16>, matmul_blocks<Format::Q6_0>, matmul_blocks<Format::Q6_1>,
      matmul_blocks<Format::Q6_0_16>, matmul_blocks<Format::Q4_K>, matmul_blocks<Format::Q2_K>, matmul_blocks<Format::Q3_K>,
      matmul_blocks<Format::IQ2_XXS>, matmul_blocks<Format::IQ2_XS>, matmul_blocks<Format::IQ2_S>, matmul_blocks<Format::IQ3_XXS>,
      matmul_blocks<Format::IQ3_S>, matmul_blocks<Format::IQ1_S>, matmul_blocks<Format::IQ1_M>};
  multiply[int(m.format) - int(Format::BF16)](m, x, bias, y, y_stride, begin, end, scratch);
  _tile_release();  // a context switch costs more while a thread holds tiles
}
