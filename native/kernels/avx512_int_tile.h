// Products of bytes for many rows in tiles of four rows and up to three panels: twelve chains of dot products, each line of weights
// loaded once for four rows and four bytes of a row once for three panels. The sums of a block are exact, and are scaled and added
// in the order of `int_sums`, so that the bits of a result are those of the other tiles.
#pragma once

#define BIFOLIO_OWN_INT_PANELS

constexpr int64_t kIntPanels = 3;
constexpr int64_t kLeastRowsOfPanels = 16;  // fewer rows do not pay for weights that are copied first
constexpr int64_t kPartBlocks = 16;  // blocks of the panels that stay in the first cache level while all rows are multiplied
static_assert(kMinimaBlocks % kPartBlocks == 0);

// Some blocks of panels as bytes without a sign, with scales (and minima) as floats: the panels of a block one after the other, so that
// their lines fall into different sets of the cache.
struct BytePanels {
  uint8_t* bytes;   // [kMinimaBlocks][panels][32 * 16]
  float* scales;    // [kMinimaBlocks][panels][16]
  float* minima;    // [kMinimaBlocks][panels][16]
  int32_t* starts;  // [row groups][kMinimaBlocks][4] of the sums of each block: minus 128 times the sum of a row, which takes the shift of the weights back

  explicit BytePanels(uint8_t* scratch) : bytes(scratch) {
    scales = reinterpret_cast<float*>(bytes + kIntPanels * kMinimaBlocks * kQuantBlock * kPanel);
    minima = scales + kIntPanels * kMinimaBlocks * kPanel;
    starts = reinterpret_cast<int32_t*>(minima + kIntPanels * kMinimaBlocks * kPanel);
  }
};

template <Format F, int P>
static inline void put_panel(const PackedPanel<F>& w, int64_t begin, int64_t blocks, int64_t p, const BytePanels& out) {
  constexpr Coding code = coding(F).unpacked();
  constexpr float unit = coding(F).bits == 6 ? kSixBitUnit : 1.0f;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = b * P + p;
    const V16 scale = w.scale(begin + b, 0);
    store(out.scales + at * kPanel, unit != 1.0f ? mul(scale, broadcast(unit)) : scale);
    if constexpr (code.minima) store(out.minima + at * kPanel, w.minimum(begin + b, 0));
    uint8_t* bytes = out.bytes + at * kQuantBlock * kPanel;
    const uint8_t* source = bytes;
    if constexpr (F == Format::Q8_0) source = w.quants(begin + b);
    else w.unpack(begin + b, bytes);
    if constexpr (code.is_signed)
      for (int64_t i = 0; i < kQuantBlock * kPanel; i += 64)
        _mm512_storeu_si512(bytes + i, _mm512_xor_si512(_mm512_loadu_si512(source + i), _mm512_set1_epi8(int8_t(0x80))));
  }
}

// Four rows, or fewer at the end, of some blocks.
struct ByteTile {
  const uint8_t* bytes;  // of the first panel and block
  const float* scales;
  const int8_t* x;
  int64_t x_stride;
  const float* row_scales;  // [blocks][4]
  const int32_t* starts;    // [blocks][4]
  int64_t blocks;
  bool is_first, is_last;     // of the blocks of a row
  const float* minima;        // of the first panel, when the sums of all blocks that share them are there; else null
  const float* row_sums;      // [minima_blocks][4]
  int64_t minima_blocks;
  const float* bias;  // null: none
  float* y;
  int64_t y_stride;
};

template <Coding C, int R, int P>
static void multiply_byte_tile(const ByteTile& t) {
  constexpr int64_t block_bytes = kQuantBlock * kPanel;
  __m512 acc[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) acc[p][r] = t.is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(t.y + r * t.y_stride + p * kPanel);
  const uint8_t* bytes = t.bytes;
  const int8_t *x = t.x, *third = t.x + 2 * t.x_stride;  // two pointers and one step reach four rows
  int64_t stride = t.x_stride;
  asm volatile("" : "+r"(stride), "+r"(x), "+r"(third));
  for (int64_t b = 0; b < t.blocks; ++b) {
    __m512i totals[P][R];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) totals[p][r] = C.is_signed ? _mm512_set1_epi32(t.starts[b * kRowGroup + r]) : _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) {
      __m512i w[P];
      for (int p = 0; p < P; ++p) w[p] = _mm512_loadu_si512(bytes + p * block_bytes + line * 64);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        __m512i four = four_bytes((r < 2 ? x : third) + (r % 2) * stride + line * 4);
        if (P > 1) asm("" : "+v"(four));  // one load for all panels
        for (int p = 0; p < P; ++p) totals[p][r] = _mm512_dpbusd_epi32(totals[p][r], w[p], four);
      }
    }
    for (int p = 0; p < P; ++p) {
      const __m512 scale = _mm512_loadu_ps(t.scales + (b * P + p) * kPanel);
      for (int r = 0; r < R; ++r)
        acc[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[p][r]), _mm512_mul_ps(scale, _mm512_set1_ps(t.row_scales[b * kRowGroup + r])), acc[p][r]);
    }
    bytes += P * block_bytes;
    x += kQuantBlock, third += kQuantBlock;
  }
  if constexpr (C.minima)
    for (int64_t b = 0; b < t.minima_blocks; ++b)
      for (int p = 0; p < P; ++p) {
        const __m512 minimum = _mm512_loadu_ps(t.minima + (b * P + p) * kPanel);
        for (int r = 0; r < R; ++r) acc[p][r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(t.row_sums[b * kRowGroup + r]), acc[p][r]);
      }
  for (int p = 0; p < P; ++p) {
    const bool adds = t.is_last && t.bias;
    const __m512 bias = adds ? _mm512_loadu_ps(t.bias + p * kPanel) : _mm512_setzero_ps();
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(t.y + r * t.y_stride + p * kPanel, adds ? _mm512_add_ps(acc[p][r], bias) : acc[p][r]);
  }
}

template <Coding C, int P>
constexpr void (*kByteTiles[kRowGroup])(const ByteTile&) = {multiply_byte_tile<C, 1, P>, multiply_byte_tile<C, 2, P>,
                                                            multiply_byte_tile<C, 3, P>, multiply_byte_tile<C, 4, P>};

// P whole panels of a block of rows, which begins at a row group.
template <Format F, int P>
static inline void multiply_byte_panels(const PackedMatrix& m, const Activations& x, int64_t row_begin, int64_t rows, const float* bias,
                                        float* y, int64_t y_stride, int64_t first_panel, uint8_t* scratch) {
  constexpr Coding code = coding(F).unpacked();
  const BytePanels panels(scratch);
  const int64_t num_blocks = m.k / kQuantBlock, group_scales = num_blocks * kRowGroup;
  for (int64_t begin = 0; begin < num_blocks; begin += kMinimaBlocks) {
    const int64_t blocks = std::min(kMinimaBlocks, num_blocks - begin);
    for (int p = 0; p < P; ++p) put_panel<F, P>({m.panel(first_panel + p), m.table}, begin, blocks, p, panels);
    const int64_t scales = row_begin / kRowGroup * group_scales + begin * kRowGroup;
    if constexpr (code.is_signed)
      for (int64_t g = 0; g < parts_of(rows, kRowGroup); ++g)
        for (int64_t i = 0; i < blocks * kRowGroup; ++i)
          panels.starts[g * kMinimaBlocks * kRowGroup + i] = -128 * x.isum[scales + g * group_scales + i];
    for (int64_t part = 0; part < blocks; part += kPartBlocks) {
      const int64_t count = std::min(kPartBlocks, blocks - part);
      const bool ends = part + count == blocks;
      for (int64_t r = 0; r < rows; r += kRowGroup) {
        const int64_t group = r / kRowGroup, at = scales + group * group_scales;
        const ByteTile tile{panels.bytes + part * P * kQuantBlock * kPanel, panels.scales + part * P * kPanel,
                            x.q + (row_begin + r) * x.k + (begin + part) * kQuantBlock, x.k, x.scale + at + part * kRowGroup,
                            panels.starts + (group * kMinimaBlocks + part) * kRowGroup, count, begin + part == 0,
                            ends && begin + blocks == num_blocks, panels.minima, x.sum + at, ends ? blocks : 0,
                            bias ? bias + first_panel * kPanel : nullptr, y + r * y_stride + first_panel * kPanel, y_stride};
        kByteTiles<code, P>[std::min(kRowGroup, rows - r) - 1](tile);
      }
    }
  }
}
