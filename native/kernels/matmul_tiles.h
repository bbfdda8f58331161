// Products with many rows on tiles of 16 rows: bytes of quantised weights, and bfloat16.
//
// What an instruction set provides: TileConfig and configure, _tile_zero, _tile_loadd, _tile_stored, _tile_dpbssd,
// _tile_dpbf16ps, _tile_release; finish_writes, after which tiles see what was stored; from_ints, 16 int32 as floats.
//
// With many rows the weights are read once for 512 rows, and what is multiplied lies in the nearest caches:
//
//   for 16 panels, for 512 rows          their sums [panel][row][16] are in the second cache level
//     for a part of k                    so are the rows' values of this part
//       for two panels                   their weights of this part are in the first level
//         for 32 rows                    2 x 2 tiles: loading tiles takes longer than multiplying them
//
// With one tile of rows everything but the weights is near anyway: then panels are read from beginning to end.
#pragma once

constexpr int64_t kGroupTiles = 32, kGroupPanels = 16;
constexpr int64_t kGroupSums = kGroupPanels * kGroupTiles * kTileRows * kPanel;

// Tiles 0-3 are 2 x 2 results, unit 2 * panel + tile of rows; 4 and 5 rows, 6 and 7 weights.
struct TileGroup {
  int64_t first_panel, panels, first_tile, tiles;
  float* sums;

  float* at(int64_t panel, int64_t tile) const { return sums + (panel * tiles + tile) * kTileRows * kPanel; }
};

// Calls body(group) for the groups of a product and writes what they summed.
template <class Body>
static inline void each_group(const PackedMatrix& m, int64_t rows, const float* bias, float* y, int64_t y_stride,
                              int64_t begin, int64_t end, float* sums, Body body) {
  const int64_t tiles = round_up(rows, kTileRows) / kTileRows, most_panels = tiles == 1 ? 2 : kGroupPanels;
  for (int64_t p = begin; p < end; p += most_panels)
    for (int64_t t = 0; t < tiles; t += kGroupTiles) {
      const TileGroup group{p, end - p < most_panels ? end - p : most_panels, t,
                            tiles - t < kGroupTiles ? tiles - t : kGroupTiles, sums};
      body(group);
      for (int64_t row = t * kTileRows; row < rows && row < (t + group.tiles) * kTileRows; ++row)
        for (int64_t i = 0; i < group.panels; ++i) {
          const float* found = group.at(i, row / kTileRows - t) + row % kTileRows * kPanel;
          finish_columns(load(found), m, (p + i) * kPanel, bias, y + row * y_stride);
        }
    }
}

// ---- bytes --------------------------------------------------------------------------------------------------------

static void configure_bytes() {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, kTileRows, 64);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, kTileRows, kBlock);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kBlock / 4, 64);
  configure(config);
}

// One or two panels and one or two tiles of rows, `blocks` blocks of k. While the tiles multiply two blocks, the sums of
// the two before are scaled and added.
template <bool Min, bool Lower, bool Right>
struct ByteTiles {
  const UnpackedPanel* w;  // [2]
  const IntRows* x;        // [2], q being tiles
  int64_t blocks;
  float* const* sums;  // [unit]
  bool first;
  alignas(64) int32_t dots[2][2][4][256];  // of two pairs of blocks: [pair][block][unit][row][column]

  inline void multiply(int64_t b) const {
    if (b >= blocks) return;
    _tile_loadd(4, x[0].q + b * kTileRows * kBlock, kBlock);
    if constexpr (Lower) _tile_loadd(5, x[1].q + b * kTileRows * kBlock, kBlock);
    _tile_loadd(6, w[0].quants(b), 64);
    if constexpr (Right) _tile_loadd(7, w[1].quants(b), 64);
    _tile_zero(0);
    if constexpr (Lower) _tile_zero(1);
    if constexpr (Right) _tile_zero(2);
    if constexpr (Lower && Right) _tile_zero(3);
    _tile_dpbssd(0, 4, 6);
    if constexpr (Lower) _tile_dpbssd(1, 5, 6);
    if constexpr (Right) _tile_dpbssd(2, 4, 7);
    if constexpr (Lower && Right) _tile_dpbssd(3, 5, 7);
  }

  inline void keep(int64_t b) {
    if (b >= blocks) return;
    auto* out = dots[b / 2 % 2][b % 2];
    _tile_stored(0, out[0], 64);
    if constexpr (Lower) _tile_stored(1, out[1], 64);
    if constexpr (Right) _tile_stored(2, out[2], 64);
    if constexpr (Lower && Right) _tile_stored(3, out[3], 64);
  }

  inline void scale(int unit, int64_t begin) const {
    if (begin < 0 || (!Lower && unit % 2) || (!Right && unit / 2)) return;
    const UnpackedPanel& panel = w[unit / 2];
    const IntRows& rows = x[unit % 2];
    V16 acc[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) acc[r] = first && begin == 0 ? zero() : load(sums[unit] + r * kPanel);
    for (int64_t b = begin; b < begin + 2 && b < blocks; ++b) {
      const int32_t* found = dots[b / 2 % 2][b % 2][unit];
      const V16 factor = load(panel.scales(b));
      const int64_t at = b * kRowGroup;
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; ++r) {
        const int64_t place = at + r / kRowGroup * rows.group + r % kRowGroup;
        acc[r] = fma(from_ints(found + r * kPanel), mul(factor, broadcast(rows.scale[place])), acc[r]);
        if constexpr (Min) acc[r] = fma(load(panel.minima(b)), broadcast(rows.sum[place]), acc[r]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) store(sums[unit] + r * kPanel, acc[r]);
  }

  void run() {
    finish_writes();
    for (int64_t b = 0; b < blocks + 2; b += 2) {
      multiply(b);
      scale(0, b - 2);
      keep(b);
      scale(1, b - 2);
      multiply(b + 1);
      scale(2, b - 2);
      keep(b + 1);
      scale(3, b - 2);
    }
  }
};

template <bool Min, bool Lower, bool Right>
static void multiply_bytes(const UnpackedPanel* w, const IntRows* x, int64_t blocks, float* const* sums, bool first) {
  ByteTiles<Min, Lower, Right> tiles;
  tiles.w = w, tiles.x = x, tiles.blocks = blocks, tiles.sums = sums, tiles.first = first;
  tiles.run();
}

template <Format F>
static void matmul_bytes(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  constexpr bool min = F == Format::Q4_1;
  constexpr int64_t unpacked_bytes = kUnpackedBlocks * (kBlock * kPanel + 2 * kPanel * int64_t(sizeof(float)));
  uint8_t* unpacked = scratch + kGroupSums * sizeof(float);
  const int64_t num_blocks = m.k / kBlock, num_tiles = round_up(x.rows, kTileRows) / kTileRows;
  configure_bytes();
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    for (int64_t b = 0; b < num_blocks; b += kPartSteps)
      for (int64_t p = 0; p < group.panels; p += 2) {
        const int64_t blocks = num_blocks - b < kPartSteps ? num_blocks - b : kPartSteps;
        const bool right = p + 1 < group.panels;
        UnpackedPanel w[2];
        for (int64_t i = 0; i < (right ? 2 : 1); ++i)
          w[i] = unpack_panel(PackedPanel<F>{m.panel(group.first_panel + p + i)}, b, blocks, unpacked + i * unpacked_bytes);
        for (int64_t t = 0; t < group.tiles; t += 2) {
          const bool lower = t + 1 < group.tiles;
          IntRows rows[2];
          for (int64_t i = 0; i < (lower ? 2 : 1); ++i) {
            const int64_t tile = group.first_tile + t + i;
            rows[i] = int_rows(x, tile * kTileRows, b);
            rows[i].q = x.tiles + tile_place(tile, b, num_tiles, num_blocks) * kTileRows * kBlock;
          }
          float* const sums[4] = {group.at(p, t), group.at(p, t + lower), group.at(p + right, t), group.at(p + right, t + lower)};
          const auto multiply = lower ? (right ? multiply_bytes<min, true, true> : multiply_bytes<min, true, false>)
                                      : (right ? multiply_bytes<min, false, true> : multiply_bytes<min, false, false>);
          multiply(w, rows, blocks, sums, b == 0);
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

// One or two tiles of rows against one or two panels, `steps` tiles of k: the sums go on, or begin.
template <bool Lower, bool Right>
static inline void multiply_words(const uint16_t* upper, const uint16_t* lower, int64_t tile_words, const uint8_t* left,
                                  const uint8_t* right, int64_t steps, float* const* sums, bool first) {
  finish_writes();
  if (first) {
    _tile_zero(0);
    if constexpr (Lower) _tile_zero(1);
    if constexpr (Right) _tile_zero(2);
    if constexpr (Lower && Right) _tile_zero(3);
  } else {
    _tile_loadd(0, sums[0], 64);
    if constexpr (Lower) _tile_loadd(1, sums[1], 64);
    if constexpr (Right) _tile_loadd(2, sums[2], 64);
    if constexpr (Lower && Right) _tile_loadd(3, sums[3], 64);
  }
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(4, upper + step * tile_words, 64);
    if constexpr (Lower) _tile_loadd(5, lower + step * tile_words, 64);
    _tile_loadd(6, left + step * 1024, 64);
    if constexpr (Right) _tile_loadd(7, right + step * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Lower) _tile_dpbf16ps(1, 5, 6);
    if constexpr (Right) _tile_dpbf16ps(2, 4, 7);
    if constexpr (Lower && Right) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0], 64);
  if constexpr (Lower) _tile_stored(1, sums[1], 64);
  if constexpr (Right) _tile_stored(2, sums[2], 64);
  if constexpr (Lower && Right) _tile_stored(3, sums[3], 64);
  finish_writes();
}

static void matmul_words(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t num_steps = round_up(m.k, kBlock) / kBlock, num_tiles = round_up(x.rows, kTileRows) / kTileRows;
  const int64_t height = x.rows < kTileRows ? x.rows : kTileRows, tile_words = height * kBlock;
  const int64_t part = num_tiles == 1 ? num_steps : kPartSteps;
  configure_words(height);
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    for (int64_t s = 0; s < num_steps; s += part)
      for (int64_t p = 0; p < group.panels; p += 2)
        for (int64_t t = 0; t < group.tiles; t += 2) {
          const bool right = p + 1 < group.panels, lower = t + 1 < group.tiles;
          const int64_t steps = num_steps - s < part ? num_steps - s : part;
          const uint16_t* rows = x.bf16 + tile_place(group.first_tile + t, s, num_tiles, num_steps) * tile_words;
          const uint8_t* left = m.panel(group.first_panel + p) + s * 1024;
          float* const sums[4] = {group.at(p, t), group.at(p, t + lower), group.at(p + right, t), group.at(p + right, t + lower)};
          const auto multiply = lower ? (right ? multiply_words<true, true> : multiply_words<true, false>)
                                      : (right ? multiply_words<false, true> : multiply_words<false, false>);
          multiply(rows, rows + steps * tile_words, tile_words, left, left + m.panel_bytes, steps, sums, s == 0);
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
