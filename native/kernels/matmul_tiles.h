// Products on tiles of 16 rows of bfloat16, for any number of rows. Quantised weights become bfloat16 on the way.
//
// An instruction set provides TileConfig and configure, _tile_zero, _tile_loadd, _tile_stored, _tile_dpbf16ps,
// _tile_release; finish_writes, which makes stores visible to tiles; and, faster than the plain C++ here, the conversion of quantised
// weights to floats.
//
// With many rows the weights are read once for 512 rows, and the factors lie in the nearer caches:
//
//   for 16 panels, for 512 rows          their sums [panel][row][16] are in the second cache level
//     for a part of k                    so are the rows' values of this part
//       for one or two panels            and the weights, prefetched while the panels before are multiplied
//         for one or two tiles of rows
//
// With one tile of rows everything but the weights is near anyway: then panels are read from beginning to end. Quantised ones
// have a way of their own for that: see matmul_few_on_tiles.h.
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

// The panels that are multiplied next: the same part of the next panels, or the first panels of the next part.
struct NextPanels {
  int64_t panel, part;

  NextPanels(const TileGroup& group, const KParts& parts, int64_t p, int64_t part)
      : panel(group.first_panel + p + 2), part(part) {
    if (p + 2 < group.panels) return;
    panel = part + 1 < parts.count ? group.first_panel : panel;
    this->part = (part + 1) % parts.count;
  }
};

// ---- weights ------------------------------------------------------------------------------------------------------

constexpr int64_t kTileBytes = 1024;  // a tile of weights: [k / 2][16][2] bfloat16

// Bytes that `steps` of a packed panel take, from the first one of a group on.
template <Format F>
constexpr int64_t step_bytes(int64_t steps) {
  return F == Format::BF16 ? steps * kTileBytes : blocks_bytes(F, steps);
}

#ifndef BIFOLIO_OWN_WIDEN
// Calls take(e, element e of all columns) for a block of a panel, e ascending.
template <Format F, class Take>
static inline void each_weight(const PackedPanel<F>& panel, int64_t b, Take take) {
  constexpr Coding code = coding(F);
  uint8_t bytes[kQuantBlock * kPanel];
  if constexpr (F == Format::Q8_0) std::memcpy(bytes, panel.quants(b), sizeof bytes);
  else panel.unpack(b, bytes);
  V16 scale = zero(), minimum = zero();
  for (int e = 0; e < kQuantBlock; ++e) {
    if (e % (kQuantBlock / code.scales) == 0) {
      const int s = code.scales == 2 ? e / 16 : 0;
      scale = mul(panel.scale(b, s), broadcast(kWidening * code.unit()));
      if constexpr (code.minima) minimum = mul(panel.minimum(b, s), broadcast(kWidening));
    }
    float numbers[kPanel];
    for (int64_t column = 0; column < kPanel; ++column) numbers[column] = float(int8_t(bytes[e / 4 * 64 + column * 4 + e % 4]));
    take(e, code.minima ? fma(load(numbers), scale, minimum) : mul(load(numbers), scale));
  }
}

static inline void store_upper_halves(uint8_t* p, V16 even, V16 odd) {
  float numbers[2][kPanel];
  store(numbers[0], even);
  store(numbers[1], odd);
  for (int i = 0; i < 2 * kPanel; ++i) std::memcpy(p + 2 * i, reinterpret_cast<uint8_t*>(numbers[i % 2] + i / 2) + 2, 2);
}

static inline V16 upper_half(V16 a) {
  uint32_t bits[kPanel];
  store(reinterpret_cast<float*>(bits), a);
  for (uint32_t& number : bits) number &= 0xffff0000u;
  return load(reinterpret_cast<float*>(bits));
}
#endif

// A block of a panel as a tile.
template <Format F>
static inline void widen_block(const PackedPanel<F>& panel, int64_t b, uint8_t* tile) {
  V16 even = zero();
  each_weight(panel, b, [&](int e, V16 weight) __attribute__((always_inline)) {
    if (e % 2 == 0) even = weight;
    else store_upper_halves(tile + e / 2 * 64, even, weight);
  });
}

// Steps of a panel as tiles, one after the other.
template <Format F>
static const uint8_t* tiles_of_panel(const uint8_t* panel, const int8_t* table, int64_t begin, int64_t steps, uint8_t* words) {
  if constexpr (F == Format::BF16) return panel + begin * kTileBytes;
  else {
    for (int64_t step = 0; step < steps; ++step) widen_block(PackedPanel<F>{panel, table}, begin + step, words + step * kTileBytes);
    return words;
  }
}

// ---- products -----------------------------------------------------------------------------------------------------

static void configure_tiles(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);
  configure(config);
}

// The memory of two panels and two tiles of rows.
struct TileOperands {
  const uint16_t *upper, *lower;  // rows
  int64_t tile_words;
  const uint8_t *left, *right;    // weights
  const uint8_t* ahead[2];        // weights to prefetch
  int64_t ahead_lines;            // at each step
  int64_t steps;
  float* sums[4];                 // unit 2 * panel + tile of rows
  float* results[4];              // destinations of the sums
  int64_t result_bytes;           // from one row of a result to the next

  // Row `line` of all results, with or without those of the lower tile of rows.
  template <bool Lower>
  const uint8_t* result_row(int64_t line) const {
    const int64_t unit = line / kTileRows * (Lower ? 1 : 2);
    return reinterpret_cast<const uint8_t*>(results[unit]) + line % kTileRows * result_bytes;
  }
};

// One or two tiles of rows against one or two panels: the sums go on, or begin. Tiles 0-3 are 2 x 2 results; 4 and 5
// rows, 6 and 7 weights.
template <bool Lower, bool Right>
static void multiply_tiles(const TileOperands& x, bool first) {
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
  constexpr int64_t num_lines = (1 + Lower) * (1 + Right) * kTileRows;  // of results: prefetched for write
  const int64_t lines_at_once = (num_lines + x.steps - 1) / x.steps;
  const uint8_t *ahead = x.ahead[0], *ahead_right = x.ahead[1];
  for (int64_t step = 0, line = 0; step < x.steps; ++step) {
    for (int64_t until = line + lines_at_once; line < until && line < num_lines; ++line)
      __builtin_prefetch(x.result_row<Lower>(line), 1);
    _tile_loadd(4, x.upper + step * x.tile_words, 64);
    _tile_loadd(6, x.left + step * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Lower) {
      _tile_loadd(5, x.lower + step * x.tile_words, 64);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (Right) {
      _tile_loadd(7, x.right + step * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (Lower && Right) _tile_dpbf16ps(3, 5, 7);
    for (int64_t i = 0; i < x.ahead_lines; ++i, ahead += 64, ahead_right += 64) {
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

template <Format F>
static void matmul_words(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  const int64_t num_steps = round_up(m.k, kQuantBlock) / kQuantBlock, num_tiles = round_up(x.rows, kTileRows) / kTileRows;
  const KParts parts = num_tiles == 1 ? KParts(num_steps, 1) : KParts(num_steps);
  const int64_t height = x.rows < kTileRows ? x.rows : kTileRows, tile_words = height * kQuantBlock;
  uint8_t* widened[2] = {scratch + kGroupSums * sizeof(float), scratch + kGroupSums * sizeof(float) + KParts::kMost * kTileBytes};
  configure_tiles(height);
  each_group(m, x.rows, bias, y, y_stride, begin, end, reinterpret_cast<float*>(scratch), [&](const TileGroup& group) {
    for (int64_t part = 0; part < parts.count; ++part)
      for (int64_t p = 0; p < group.panels; p += 2) {
        const bool right = p + 1 < group.panels;
        const int64_t steps = parts.size(part);
        const uint8_t* weights[2];
        for (int side = 0; side <= right; ++side)
          weights[side] = tiles_of_panel<F>(m.panel(group.first_panel + p + side), m.table, parts.begin(part), steps, widened[side]);
        const NextPanels next(group, parts, p, part);
        const bool more = num_tiles > 1 && next.panel < end;
        const int64_t next_bytes = more ? step_bytes<F>(parts.size(next.part)) : 0, pairs = (group.tiles + 1) / 2;
        const int64_t lines = (next_bytes / 64 + pairs * steps - 1) / (pairs * steps);  // to prefetch at each step
        for (int64_t t = 0; t < group.tiles; t += 2) {
          const bool lower = t + 1 < group.tiles;
          const int64_t at = t / 2 * lines * steps * 64, next_at = step_bytes<F>(parts.begin(next.part)) + at;
          const uint16_t* rows = x.bf16 + parts.place(part, group.first_tile + t, num_tiles) * tile_words;
          const bool last = part + 1 == parts.count, direct = last && !bias && group.is_whole(p + right, t + lower);
          TileOperands tiles{rows, rows + steps * tile_words, tile_words, weights[0], weights[right],
                             {more ? m.panel(next.panel) + next_at : nullptr, more ? m.panel(next.panel + (next.panel + 1 < end)) + next_at : nullptr},
                             at < next_bytes ? lines : 0, steps, {}, {}, direct ? y_stride * int64_t(sizeof(float)) : 64};
          for (int unit = 0; unit < 4; ++unit) {
            const int64_t panel = p + (unit / 2 && right), tile = t + (unit % 2 && lower);
            tiles.sums[unit] = group.at(panel, tile);
            tiles.results[unit] = direct ? group.result(panel, tile) : tiles.sums[unit];
          }
          const auto multiply = lower ? (right ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                                      : (right ? multiply_tiles<false, true> : multiply_tiles<false, false>);
          multiply(tiles, part == 0);
          for (int64_t i = 0; last && !direct && i <= right; ++i)
            for (int64_t j = 0; j <= lower; ++j) group.finish(p + i, t + j);
        }
      }
  });
}
