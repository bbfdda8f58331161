// Attention of few rows over a bf16 cache on tiles. Positions and rows change places: keys are the rows of a product and the
// queries its columns. The same products are added in the same order as with many rows (attention_tiles.h), and keys
// are read in place.
#pragma once

// A half of a tile must lie in one block.
static bool few_rows(const KvLayer& kv, int64_t count) {
  return count <= kFewRows && kv.head_dim % 32 == 0 && kv.block_size % 16 == 0;
}

constexpr int64_t kFewPiece = 16 * kFewRows * 2;  // words: 16 pairs of dimensions, each of all rows

static void round_few_queries(const AttentionRows& rows, int64_t head_dim, const TileScratch& s) {
  std::memset(s.query, 0, size_t(s.steps * kFewPiece) * 2);
  for (int64_t r = 0; r < rows.count; ++r)
    for (int64_t step = 0; step < s.steps; ++step) {
      uint16_t words[32];
      round_row(rows.query + r * head_dim + step * 32, 32, words, 32);
      for (int64_t i = 0; i < 32; ++i) s.query[step * kFewPiece + i / 2 * 2 * kFewRows + r * 2 + i % 2] = words[i];
    }
}

// Results of 0 and 1 and weights in 4 have as many rows as there are; 2 is a half tile's scores, 3 queries, 6 and 7 keys or
// values.
static void configure_few(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 6; ++tile) config.set(tile, rows, 64);
  for (int tile = 2; tile < 4; ++tile) config.set(tile, 16, kFewRows * 4);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, 16, 64);
  configure(config);
}

static void score_few(const Tile& tile, const TileScratch& s) {
  const auto stride = int64_t(tile.kv.row_bytes);
  finish_writes();
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t begin = tile.begin > half * 16 ? tile.begin : half * 16, end = tile.end < half * 16 + 16 ? tile.end : half * 16 + 16;
    if (begin >= end) continue;  // no row sees these positions
    const uint8_t* keys = tile.key(begin) - (begin - half * 16) * stride;
    const uint16_t* query = s.query;
    _tile_zero(2);
    for (int64_t step = 0; step < s.steps; ++step, query += kFewPiece) {
      _tile_loadd(6, keys + step * 64, stride);
      _tile_loadd(3, query, kFewRows * 4);
      _tile_dpbf16ps(2, 6, 3);
    }
    _tile_stored(2, s.few_scores + half * 16 * kFewRows, kFewRows * 4);
  }
  finish_writes();
}

static void mix_few(const TileScratch& s, float* state) {
  const int64_t stride = s.padded * 4;
  finish_writes();
  _tile_loadd(4, s.scores, kTile * 4);
  for (int64_t column = 0; column < s.columns; column += 2, state += 32) {
    _tile_loadd(0, state, stride);
    _tile_loadd(6, s.values + column * kPiece, 64);
    _tile_loadd(1, state + 16, stride);
    _tile_loadd(7, s.values + (column + 1) * kPiece, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stored(0, state, stride);
    _tile_stored(1, state + 16, stride);
  }
  finish_writes();
}

static void attend_few_on_tiles(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                                const AttentionRows& rows, uint8_t* scratch) {
  const TileScratch s = tile_scratch(kv.head_dim, scratch);
  round_few_queries(rows, kv.head_dim, s);
  configure_few(rows.count);
  bool scored = false;
  each_tile(kv, kv_head, table, begin, end, rows, s.copies, [&](const Tile& tile, int64_t start) {
    if (!scored) {
      score_few(tile, s);
      pair_values(tile, s);
    }
    turn_columns(s.few_scores, s.scores);
    weigh_rows(rows, 0, start, s);
    if (tile.next) score_few(*tile.next, s);
    mix_few(s, rows.mixed);
    if (tile.next) pair_values(*tile.next, s);
    scored = tile.next != nullptr;
  });
  _tile_release();
}

// All caches and any number of rows.
static void attend_part_on_tiles(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                                 const AttentionRows& rows, uint8_t* scratch) {
  const auto attend = kv.type != KvType::BF16 ? attend_part : few_rows(kv, rows.count) ? attend_few_on_tiles : attend_bf16_on_tiles;
  attend(kv, kv_head, table, begin, end, rows, scratch);
}
