// Products with many rows on tiles of 16 rows: bytes of quantised weights, and bfloat16.
//
// What an instruction set provides: TileConfig and configure, _tile_zero, _tile_loadd, _tile_stored, _tile_dpbssd,
// _tile_dpbf16ps, _tile_release; finish_writes, after which tiles see what was stored; from_ints, 16 int32 as floats.
//
// With many rows the weights are read once for 512 rows, and what is multiplied lies in the nearer caches:
//
//   for 16 panels, for 512 rows          their sums [panel][row][16] are in the second cache level
//     for a part of k                    so are the rows' values of this part
//       for one or two panels            and the weights, which are asked for while the panels before are multiplied
//         for one or two tiles of rows
//
// With one tile of rows everything but the weights is near anyway: then panels are read from beginning to end.
#pragma once

constexpr int64_t kGroupTiles = 32, kGroupPanels = 16;
constexpr int64_t kGroupSums = kGroupPanels * kGroupTiles * kTileRows * kPanel;

// Some panels and tiles of rows of a product.
struct TileGroup {
  const PackedMatrix& m;
  const float* bias;
  float* y;
  int64_t y_stride, rows;
  int64_t first_panel, panels, first_tile, tiles;
  float* sums;

  float* at(int64_t panel, int64_t tile) const { return sums + (panel * tiles + tile) * kTileRows * kPanel; }
  float* result(int64_t panel, int64_t tile) const {
    return y + (first_tile + tile) * kTileRows * y_stride + (first_panel + panel) * kPanel;
  }
  const float* bias_of(int64_t panel) const { return bias ? bias + (first_panel + panel) * kPanel : nullptr; }

  // Whether the product has all rows and columns of a tile.
  bool is_whole(int64_t panel, int64_t tile) const {
    return (first_tile + tile + 1) * kTileRows <= rows && (first_panel + panel + 1) * kPanel <= m.n;
  }

  // Writes the part of a tile that the product has.
  void finish(int64_t panel, int64_t tile) const {
    const int64_t row = (first_tile + tile) * kTileRows;
    for (int64_t r = 0; r < kTileRows && row + r < rows; ++r)
      finish_columns(load(at(panel, tile) + r * kPanel), m, (first_panel + panel) * kPanel, bias, y + (row + r) * y_stride);
  }
};

// Calls body(group) for the groups of a product.
template <class Body>
static inline void each_group(const PackedMatrix& m, int64_t rows, const float* bias, float* y, int64_t y_stride,
                              int64_t begin, int64_t end, float* sums, Body body) {
  const int64_t tiles = round_up(rows, kTileRows) / kTileRows, most_panels = tiles == 1 ? 2 : kGroupPanels;
  for (int64_t p = begin; p < end; p += most_panels)
    for (int64_t t = 0; t < tiles; t += kGroupTiles)
      body(TileGroup{m, bias, y, y_stride, rows, p, end - p < most_panels ? end - p : most_panels, t,
                     tiles - t < kGroupTiles ? tiles - t : kGroupTiles, sums});
}

// What is multiplied after some panels of a part: the same part of the next ones, or the first ones of the next part.
struct NextPanels {
  int64_t panel, part;

  NextPanels(const TileGroup& group, const KParts& parts, int64_t p, int64_t step, int64_t part)
      : panel(group.first_panel + p + step), part(part) {
    if (p + step < group.panels) return;
    panel = part + 1 < parts.count ? group.first_panel : panel;
    this->part = (part + 1) % parts.count;
  }
};

// ---- bytes --------------------------------------------------------------------------------------------------------

static void configure_bytes() {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, kTileRows, 64);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, kTileRows, kBlock);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kBlock / 4, 64);
  configure(config);
}

// acc += what a block adds to sixteen rows, whose products with the weights are `found`. Row r has its numbers at
// rows[r / 4][r % 4], and those that minima are multiplied by `sums` further on.
template <bool Min>
static inline void scale_block(const int32_t* found, const float* factors, const float* minima, const float* const rows[4],
                               int64_t sums, V16 acc[kTileRows]) {
  const V16 factor = load(factors);
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) {
    const float* row = rows[r / kRowGroup] + r % kRowGroup;
    acc[r] = fma(from_ints(found + r * kPanel), mul(factor, broadcast(*row)), acc[r]);
    if constexpr (Min) acc[r] = fma(load(minima), broadcast(row[sums]), acc[r]);
  }
}

// Where the sums of a tile come from, and where they go.
struct TileSums {
  const float* begin;  // [16][16], null: zeros
  float* end;
  int64_t stride;      // from one row to the next
  const float* bias;   // may be null
};

constexpr int64_t kKept = 8;  // blocks whose products lie in memory
constexpr int64_t kLag = 3;   // blocks that are multiplied between the product of a block and its scaling

// One panel and one tile of rows, x.q being tiles. Products of bytes go through memory into registers, where they are
// scaled and added. In between come the products of other blocks, so that nothing waits for them.
template <bool Min>
static void multiply_bytes(UnpackedPanel w, IntRows x, int64_t blocks, const TileSums& sums) {
  alignas(64) int32_t dots[kKept][kTileRows * kPanel];
  const float* rows[4] = {x.scale, x.scale + x.group, x.scale + 2 * x.group, x.scale + 3 * x.group};
  int64_t kept = 0, added = 0;
  V16 acc[kTileRows];
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) acc[r] = sums.begin ? load(sums.begin + r * kPanel) : zero();
  finish_writes();
// Tiles 0 to 3 are products of block b in b % 4, 4 and 5 rows, 6 and 7 weights; the compiler takes their numbers literally.
#define MULTIPLY(I, ROWS, WEIGHTS)                                               \
  _tile_loadd(ROWS, x.q + I * kTileRows * kBlock, kBlock);                       \
  _tile_loadd(WEIGHTS, w.first + I / 2 * w.pair + I % 2 * kBlock * kPanel, 64);  \
  _tile_zero(I);                                                                 \
  _tile_dpbssd(I, ROWS, WEIGHTS);
#define KEEP(I) _tile_stored(I, dots[kept++ % kKept], 64);
#define ADD                                                                                      \
  scale_block<Min>(dots[added++ % kKept], w.scale, w.minimum, rows, x.sum - x.scale, acc);       \
  w.scale += kPanel, w.minimum += kPanel;                                                        \
  for (int i = 0; i < 4; ++i) rows[i] += kRowGroup;
#define STEP(I, ROWS, WEIGHTS, DONE)                               \
  if (b + I < blocks) { MULTIPLY(I, ROWS, WEIGHTS) }               \
  if (b + I >= 2 && b + I - 2 < blocks) { KEEP(DONE) }             \
  if (b + I >= kLag && b + I - kLag < blocks) { ADD }
  for (int64_t b = 0; b < blocks + kLag; b += 4, x.q += 4 * kTileRows * kBlock, w.first += 2 * w.pair) {
    if (b >= kLag && b + 4 <= blocks) {
      MULTIPLY(0, 4, 6) KEEP(2) ADD
      MULTIPLY(1, 5, 7) KEEP(3) ADD
      MULTIPLY(2, 4, 6) KEEP(0) ADD
      MULTIPLY(3, 5, 7) KEEP(1) ADD
    } else {
      STEP(0, 4, 6, 2)
      STEP(1, 5, 7, 3)
      STEP(2, 4, 6, 0)
      STEP(3, 5, 7, 1)
    }
  }
#undef MULTIPLY
#undef KEEP
#undef ADD
#undef STEP
  const V16 bias = sums.bias ? load(sums.bias) : zero();
#pragma GCC unroll 16
  for (int r = 0; r < kTileRows; ++r) store(sums.end + r * sums.stride, sums.bias ? add(acc[r], bias) : acc[r]);
}

template <Format F>
static void matmul_bytes(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  uint8_t* unpacked = scratch + kGroupSums * sizeof(float);
  const KParts parts(m.k / kBlock);
  const int64_t num_tiles = round_up(x.rows, kTileRows) / kTileRows;
  configure_bytes();
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    for (int64_t part = 0; part < parts.count; ++part)
      for (int64_t p = 0; p < group.panels; ++p) {
        const int64_t b = parts.begin(part), blocks = parts.size(part);
        const UnpackedPanel w = unpack_panel(PackedPanel<F>{m.panel(group.first_panel + p)}, b, blocks, unpacked);
        const NextPanels next(group, parts, p, 1, part);
        const bool more = num_tiles > 1 && next.panel < end;  // a single tile takes less time than asking at once
        const uint8_t* ahead = more ? PackedPanel<F>{m.panel(next.panel)}.pair(parts.begin(next.part)) : nullptr;
        const size_t ahead_bytes = more ? size_t(round_up(parts.size(next.part), 2) / 2 * pair_bytes(F)) : 0;
        for (int64_t t = 0; t < group.tiles; ++t) {
          const int64_t tile = group.first_tile + t;
          prefetch_part<2>(ahead, ahead_bytes, t, group.tiles);
          IntRows rows = int_rows(x, tile * kTileRows, b);
          rows.q = x.tiles + parts.place(part, tile, num_tiles) * kTileRows * kBlock;
          const bool last = part + 1 == parts.count, direct = last && group.is_whole(p, t);
          float* near = group.at(p, t);
          const TileSums sums{part > 0 ? near : nullptr, direct ? group.result(p, t) : near, direct ? y_stride : kPanel,
                              direct ? group.bias_of(p) : nullptr};
          multiply_bytes<F == Format::Q4_1>(w, rows, blocks, sums);
          if (last && !direct) group.finish(p, t);
        }
      }
  });
}

// ---- bfloat16 -----------------------------------------------------------------------------------------------------

static void configure_words(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);
  configure(config);
}

// What two panels and two tiles of rows have in memory.
struct WordTiles {
  const uint16_t *upper, *lower;  // rows
  int64_t tile_words;
  const uint8_t *left, *right;    // weights
  const uint8_t* ahead[2];        // weights to ask for
  int64_t ahead_lines;            // at each step
  int64_t steps;
  float* sums[4];                 // unit 2 * panel + tile of rows
  float* results[4];              // where they go
  int64_t result_bytes;           // from one row of a result to the next
};

// One or two tiles of rows against one or two panels: the sums go on, or begin. Tiles 0-3 are 2 x 2 results; 4 and 5
// rows, 6 and 7 weights.
template <bool Lower, bool Right>
static void multiply_words(const WordTiles& x, bool first) {
  finish_writes();
  if (first) {
    _tile_zero(0);
    if constexpr (Lower) _tile_zero(1);
    if constexpr (Right) _tile_zero(2);
    if constexpr (Lower && Right) _tile_zero(3);
  } else {
    _tile_loadd(0, x.sums[0], 64);
    if constexpr (Lower) _tile_loadd(1, x.sums[1], 64);
    if constexpr (Right) _tile_loadd(2, x.sums[2], 64);
    if constexpr (Lower && Right) _tile_loadd(3, x.sums[3], 64);
  }
  const uint8_t *ahead = x.ahead[0], *ahead_right = x.ahead[1];
  for (int64_t step = 0; step < x.steps; ++step) {
    _tile_loadd(4, x.upper + step * x.tile_words, 64);
    _tile_loadd(6, x.left + step * 1024, 64);
    if constexpr (Lower) _tile_loadd(5, x.lower + step * x.tile_words, 64);
    if constexpr (Right) _tile_loadd(7, x.right + step * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Lower) _tile_dpbf16ps(1, 5, 6);
    if constexpr (Right) _tile_dpbf16ps(2, 4, 7);
    if constexpr (Lower && Right) _tile_dpbf16ps(3, 5, 7);
    for (int64_t line = 0; line < x.ahead_lines; ++line, ahead += 64, ahead_right += 64) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead_right, 0, 2);
    }
  }
  _tile_stored(0, x.results[0], x.result_bytes);
  if constexpr (Lower) _tile_stored(1, x.results[1], x.result_bytes);
  if constexpr (Right) _tile_stored(2, x.results[2], x.result_bytes);
  if constexpr (Lower && Right) _tile_stored(3, x.results[3], x.result_bytes);
  finish_writes();
}

static void matmul_words(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t num_steps = round_up(m.k, kBlock) / kBlock, num_tiles = round_up(x.rows, kTileRows) / kTileRows;
  const KParts parts = num_tiles == 1 ? KParts(num_steps, 1) : KParts(num_steps);
  const int64_t height = x.rows < kTileRows ? x.rows : kTileRows, tile_words = height * kBlock;
  configure_words(height);
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    for (int64_t part = 0; part < parts.count; ++part)
      for (int64_t p = 0; p < group.panels; p += 2) {
        const bool right = p + 1 < group.panels;
        const uint8_t* weights[2] = {m.panel(group.first_panel + p) + parts.begin(part) * 1024,
                                     m.panel(group.first_panel + p + right) + parts.begin(part) * 1024};
        const NextPanels next(group, parts, p, 2, part);
        const bool more = num_tiles > 1 && next.panel < end;
        const int64_t pairs = (group.tiles + 1) / 2, lines = more ? (16 + pairs - 1) / pairs : 0;
        for (int64_t t = 0; t < group.tiles; t += 2) {
          const bool lower = t + 1 < group.tiles;
          const int64_t steps = parts.size(part), at = parts.begin(next.part) * 1024 + t / 2 * lines * steps * 64;
          const uint16_t* rows = x.bf16 + parts.place(part, group.first_tile + t, num_tiles) * tile_words;
          const bool last = part + 1 == parts.count, direct = last && !bias && group.is_whole(p + right, t + lower);
          WordTiles tiles{rows, rows + steps * tile_words, tile_words, weights[0], weights[1],
                          {more ? m.panel(next.panel) + at : nullptr, more ? m.panel(next.panel + (next.panel + 1 < end)) + at : nullptr},
                          lines, steps, {}, {}, direct ? y_stride * int64_t(sizeof(float)) : 64};
          for (int unit = 0; unit < 4; ++unit) {
            const int64_t panel = p + (unit / 2 && right), tile = t + (unit % 2 && lower);
            tiles.sums[unit] = group.at(panel, tile);
            tiles.results[unit] = direct ? group.result(panel, tile) : tiles.sums[unit];
          }
          const auto multiply = lower ? (right ? multiply_words<true, true> : multiply_words<true, false>)
                                      : (right ? multiply_words<false, true> : multiply_words<false, false>);
          multiply(tiles, part == 0);
          for (int64_t i = 0; last && !direct && i <= right; ++i)
            for (int64_t j = 0; j <= lower; ++j) group.finish(p + i, t + j);
        }
      }
  });
}

static void matmul_tiles(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  if (m.format == Format::BF16) {
    matmul_words(m, x, bias, y, y_stride, begin, end, scratch);
  } else if (!x.tiles || m.format < Format::Q8_0) {
    return matmul(m, x, bias, y, y_stride, begin, end, scratch);
  } else {
    const auto multiply = m.format == Format::Q8_0   ? matmul_bytes<Format::Q8_0>
                          : m.format == Format::Q4_0 ? matmul_bytes<Format::Q4_0>
                                                     : matmul_bytes<Format::Q4_1>;
    multiply(m, x, bias, y, y_stride, begin, end, scratch);
  }
  _tile_release();  // a thread that holds tiles costs more to switch
}
