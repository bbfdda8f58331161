// Products with many rows on tiles of 16 rows: bytes of quantised weights, and bfloat16.
//
// What an instruction set provides: TileConfig and configure, _tile_zero, _tile_loadd, _tile_stored, _tile_dpbssd,
// _tile_dpbf16ps, _tile_release; finish_writes, after which tiles see what was stored; from_ints, 16 int32 as floats.
//
// With many rows the weights are read once for 512 rows, and what is multiplied lies in the nearest caches:
//
//   for 16 panels, for 512 rows          their sums [panel][row][16] are in the second cache level
//     for a part of k                    so are the rows' values of this part
//       for one or two panels            their weights of this part are in the first level
//         for 16 or 32 rows              tiles
//
// With up to 32 rows everything but the weights is near anyway: then a panel is read from beginning to end.
#pragma once

constexpr int64_t kPartBlocks = 32;  // of k that are worked on at a time: a panel's bytes are 16 KB
constexpr int64_t kGroupTiles = 32, kGroupPanels = 16;
constexpr int64_t kGroupSums = kGroupPanels * kGroupTiles * kTileRows * kPanel;

struct TileGroup {
  int64_t first_panel, panels, first_tile, tiles;
  float* sums;

  float* at(int64_t panel, int64_t tile) const { return sums + (panel * tiles + tile) * kTileRows * kPanel; }
};

// Calls body(group) for the groups of a product and writes what they summed.
template <class Body>
static inline void each_group(const PackedMatrix& m, int64_t rows, const float* bias, float* y, int64_t y_stride,
                              int64_t begin, int64_t end, float* sums, Body body) {
  const int64_t tiles = round_up(rows, kTileRows) / kTileRows, most_panels = tiles <= 2 ? 2 : kGroupPanels;
  for (int64_t p = begin; p < end; p += most_panels)
    for (int64_t t = 0; t < tiles; t += kGroupTiles) {
      const TileGroup group{p, end - p < most_panels ? end - p : most_panels, t, tiles - t < kGroupTiles ? tiles - t : kGroupTiles, sums};
      body(group);
      for (int64_t row = t * kTileRows; row < rows && row < (t + group.tiles) * kTileRows; ++row)
        for (int64_t i = 0; i < group.panels; ++i) {
          const float* found = group.at(i, row / kTileRows - t) + row % kTileRows * kPanel;
          finish_columns(load(found), m, (p + i) * kPanel, bias, y + row * y_stride);
        }
    }
}

// ---- bytes: tiles 0-3 are sums of 16 rows and 16 columns, 4 and 5 rows, 6 and 7 weights ---------------------------

static void configure_bytes() {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, kTileRows, 64);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, kTileRows, kBlock);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kBlock / 4, 64);
  configure(config);
}

// The sums of up to four blocks, [block][16 rows][16 columns]. q: [block][16 rows][32]
static inline void tile_dots(const UnpackedPanel& w, int64_t b, const int8_t* q, int64_t count, int32_t* out) {
  finish_writes();
#define BLOCK(I, ROWS, WEIGHTS)                              \
  if (count > I) {                                           \
    _tile_zero(I);                                           \
    _tile_loadd(ROWS, q + I * kTileRows * kBlock, kBlock);   \
    _tile_loadd(WEIGHTS, w.quants(b + I), 64);               \
    _tile_dpbssd(I, ROWS, WEIGHTS);                          \
    _tile_stored(I, out + I * 256, 64);                      \
  }
  BLOCK(0, 4, 6)
  BLOCK(1, 5, 7)
  BLOCK(2, 4, 6)
  BLOCK(3, 5, 7)
#undef BLOCK
}

// Sixteen rows. The tiles work on the next four blocks while the sums of the last four are scaled.
// x.q: [block][16 rows][32]
template <bool Min>
static void accumulate_int_16(const UnpackedPanel& w, const IntRows& x, int64_t blocks, float* sums, bool first) {
  alignas(64) int32_t dots[2][4 * 256];
  V16 acc[16];
  for (int r = 0; r < 16; ++r) acc[r] = first ? zero() : load(sums + r * kPanel);
  const auto start = [&](int64_t b) {
    if (b < blocks) tile_dots(w, b, x.q + b * kTileRows * kBlock, blocks - b, dots[b / 4 % 2]);
  };
  start(0);
  for (int64_t b = 0; b < blocks; b += 4) {
    start(b + 4);
    for (int64_t i = 0; i < 4 && b + i < blocks; ++i) {
      const int32_t* found = dots[b / 4 % 2] + i * 256;
      const V16 scale = load(w.scales(b + i));
      const float* factors = x.scale + (b + i) * kRowGroup;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        acc[r] = fma(from_ints(found + r * kPanel), mul(scale, broadcast(factors[r / 4 * x.group + r % 4])), acc[r]);
        if constexpr (Min)
          acc[r] = fma(load(w.minima(b + i)), broadcast(x.sum[r / 4 * x.group + (b + i) * kRowGroup + r % 4]), acc[r]);
      }
    }
  }
  for (int r = 0; r < 16; ++r) store(sums + r * kPanel, acc[r]);
}

template <Format F>
static void matmul_bytes(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  auto* sums = reinterpret_cast<float*>(scratch);
  uint8_t* unpacked = scratch + kGroupSums * sizeof(float);
  const int64_t num_blocks = m.k / kBlock;
  configure_bytes();
  each_group(m, x.rows, bias, y, y_stride, begin, end, sums, [&](const TileGroup& group) {
    const bool in_parts = group.panels > 2;  // else a panel is read to its end
    const auto add = [&](int64_t p, int64_t b) {
      const int64_t blocks = num_blocks - b < kPartBlocks ? num_blocks - b : kPartBlocks;
      const UnpackedPanel w = unpack_panel(PackedPanel<F>{m.panel(group.first_panel + p)}, b, blocks, unpacked);
      for (int64_t t = 0; t < group.tiles; ++t) {
        IntRows rows = int_rows(x, (group.first_tile + t) * kTileRows, b);
        rows.q = x.tiles + ((group.first_tile + t) * num_blocks + b) * kTileRows * kBlock;
        accumulate_int_16<F == Format::Q4_1>(w, rows, blocks, group.at(p, t), b == 0);
      }
    };
    if (in_parts) {
      for (int64_t b = 0; b < num_blocks; b += kPartBlocks)
        for (int64_t p = 0; p < group.panels; ++p) add(p, b);
    } else {
      for (int64_t p = 0; p < group.panels; ++p)
        for (int64_t b = 0; b < num_blocks; b += kPartBlocks) add(p, b);
    }
  });
}

// ---- bfloat16: tiles 0-3 are 2 x 2 results, 4 and 5 rows, 6 and 7 weights -----------------------------------------

constexpr int64_t kStep = 32;        // k values of a tile
constexpr int64_t kPartSteps = 16;   // tiles of k in a part: two panels' weights are 32 KB

static void configure_words(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
  for (int tile : {6, 7}) config.set(tile, 16, 64);
  configure(config);
}

// One or two tiles of rows against one or two panels, `steps` tiles of k: sums[panel][tile] go on, or begin.
template <bool Lower, bool Right>
static inline void multiply_words(const uint16_t* upper, const uint16_t* lower, int64_t tile_words, const uint8_t* left,
                                  const uint8_t* right, int64_t steps, float* const sums[2][2], bool first) {
  finish_writes();
  if (first) {
    _tile_zero(0);
    if constexpr (Lower) _tile_zero(1);
    if constexpr (Right) _tile_zero(2);
    if constexpr (Lower && Right) _tile_zero(3);
  } else {
    _tile_loadd(0, sums[0][0], 64);
    if constexpr (Lower) _tile_loadd(1, sums[0][1], 64);
    if constexpr (Right) _tile_loadd(2, sums[1][0], 64);
    if constexpr (Lower && Right) _tile_loadd(3, sums[1][1], 64);
  }
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, left + step * 1024, 64);
    _tile_loadd(4, upper + step * tile_words, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Lower) {
      _tile_loadd(5, lower + step * tile_words, 64);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (Right) {
      _tile_loadd(7, right + step * 1024, 64);
      _tile_dpbf16ps(2, 4, 7);
      if constexpr (Lower) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  if constexpr (Lower) _tile_stored(1, sums[0][1], 64);
  if constexpr (Right) _tile_stored(2, sums[1][0], 64);
  if constexpr (Lower && Right) _tile_stored(3, sums[1][1], 64);
  finish_writes();
}

static void matmul_words(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t num_steps = round_up(m.k, kStep) / kStep;
  const int64_t height = x.rows < kTileRows ? x.rows : kTileRows, tile_words = height * kStep;
  configure_words(height);
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    const int64_t part = group.tiles <= 2 ? num_steps : kPartSteps;
    for (int64_t s = 0; s < num_steps; s += part)
      for (int64_t p = 0; p < group.panels; p += 2)
        for (int64_t t = 0; t < group.tiles; t += 2) {
          const bool has_right = p + 1 < group.panels, has_lower = t + 1 < group.tiles;
          const int64_t steps = num_steps - s < part ? num_steps - s : part;
          const uint16_t* upper = x.bf16 + ((group.first_tile + t) * num_steps + s) * tile_words;
          const uint16_t* lower = upper + num_steps * tile_words;
          const uint8_t* left = m.panel(group.first_panel + p) + s * 1024;
          const uint8_t* right = left + m.panel_bytes;
          float* const sums[2][2] = {{group.at(p, t), group.at(p, t + has_lower)},
                                     {group.at(p + has_right, t), group.at(p + has_right, t + has_lower)}};
          const auto multiply = has_lower ? (has_right ? multiply_words<true, true> : multiply_words<true, false>)
                                          : (has_right ? multiply_words<false, true> : multiply_words<false, false>);
          multiply(upper, lower, tile_words, left, right, steps, sums, s == 0);
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
