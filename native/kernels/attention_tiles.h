// Attention over bf16 caches on tiles of 16 rows, which multiply bfloat16.
//
// Queries are rounded to bfloat16 like activations, weights with ties away from zero. A tile product adds 32 dimensions to a score, or 32
// positions to an output; sums are floats. A weight is a power of two, by a polynomial of its own, and never below 2^-126.
// All of this for any number of rows: a row does not depend on the others.
//
// matmul_tiles.h lists the functions that an instruction set provides.
#pragma once

constexpr int64_t kPiece = kTileRows * 32;  // words of a tile
constexpr int64_t kFewRows = 4;             // rows that become columns, so that keys are multiplied in place
constexpr float kLog2E = 1.44269504f;
constexpr float kPowerTerms[6] = {1.00000012f, 0.69314718f, 0.24022107f, 0.05550357f, 0.00967603f, 0.00133909f};  // of 2^f, |f| <= 1/2

// Scratch of one call; words are tiles of 16 x 32.
struct TileScratch {
  float* scores;      // [kMaxRows][kTile], overwritten by the 32 weights of each row
  uint16_t* keys;     // [steps][2]: pairs of dimensions as rows, 16 positions as columns
  uint16_t* values;   // [columns]: pairs of positions as rows, 16 dimensions as columns
  uint16_t* query;    // [groups of 16 rows][steps]
  float* state;       // [16][padded]: the last rows, where they are fewer
  uint8_t* copies;    // [2][kTile] rows of the cache
  float* few_scores;  // [kTile][kFewRows]: of few rows, as tiles make them
  int64_t steps, columns, padded;
};

// The softmax state of a row.
struct RowState {
  float *maximum, *total, *mixed;
};

#ifdef BIFOLIO_OWN_TILE_ATTENTION
static void pair_keys(const Tile& tile, const TileScratch& s);
static void pair_values(const Tile& tile, const TileScratch& s);
static void weigh_four(float* scores, const uint32_t visible[4], const RowState& rows, int64_t padded);
static void turn_columns(const float* columns, float* scores);
#else
static void pair_keys(const Tile& tile, const TileScratch& s) {
  std::memset(s.keys, 0, size_t(s.steps * 2 * kPiece) * 2);
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; ++d)
      std::memcpy(s.keys + (d / 32 * 2 + i / 16) * kPiece + d % 32 / 2 * 32 + i % 16 * 2 + d % 2, tile.key(i) + d * 2, 2);
}

// Values of positions that no row sees become 0: their weights are 0, and 0 times NaN is NaN.
static void pair_values(const Tile& tile, const TileScratch& s) {
  std::memset(s.values, 0, size_t(s.columns * kPiece) * 2);
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; ++d)
      std::memcpy(s.values + d / 16 * kPiece + i / 2 * 32 + d % 16 * 2 + i % 2, tile.value(i) + d * 2, 2);
}

static inline float power_of_score(float score, float base) {
  const float t = fma1(score, kLog2E, -base), bounded = t < -126.0f ? -126.0f : t, n = std::nearbyint(bounded), f = bounded - n;
  float p = kPowerTerms[5];
  for (int i = 4; i >= 0; --i) p = fma1(p, f, kPowerTerms[i]);
  return std::isnan(n) ? n : std::ldexp(p, int(n));
}

static inline void weigh_row(float* scores, uint32_t visible, const RowState& row, int64_t padded) {
  float weights[kTile];
  for (int64_t i = 0; i < kTile; ++i) weights[i] = visible >> i & 1 ? scores[i] : -INFINITY;
  const float largest = reduce_max(max(load(weights), load(weights + 16)));
  const bool grows = !(largest <= *row.maximum);
  const float top = grows ? largest : *row.maximum, base = top == -INFINITY ? 0.0f : top * kLog2E;
  if (grows) {
    const float shrink = *row.maximum == -INFINITY ? 0.0f : power_of_score(*row.maximum, base);
    for (int64_t d = 0; d < padded; ++d) row.mixed[d] *= shrink;
    *row.total *= shrink;
    *row.maximum = top;
  }
  for (int64_t i = 0; i < kTile; ++i) weights[i] = visible >> i & 1 ? power_of_score(scores[i], base) : 0.0f;
  *row.total += reduce_add(add(load(weights), load(weights + 16)));
  auto* words = reinterpret_cast<uint16_t*>(scores);
  for (int64_t i = 0; i < kTile; ++i) {
    uint32_t bits;
    std::memcpy(&bits, weights + i, 4);
    words[i] = uint16_t((bits + 0x8000u) >> 16);  // a NaN is lost here, but not in the total
  }
}

// Scores of four rows to weights; their states move to the new maxima. Bit i of `visible`: position i of the tile.
static void weigh_four(float* scores, const uint32_t visible[4], const RowState& rows, int64_t padded) {
  for (int64_t r = 0; r < 4; ++r)
    weigh_row(scores + r * kTile, visible[r], {rows.maximum + r, rows.total + r, rows.mixed + r * padded}, padded);
}

static void turn_columns(const float* columns, float* scores) {
  for (int64_t i = 0; i < kTile; ++i)
    for (int64_t r = 0; r < kFewRows; ++r) scores[r * kTile + i] = columns[i * kFewRows + r];
}
#endif

static void round_queries(const AttentionRows& rows, int64_t head_dim, const TileScratch& s) {
  for (int64_t r = 0; r < rows.count; ++r)
    round_row(rows.query + r * head_dim, head_dim, s.query + r / kTileRows * s.steps * kPiece + r % kTileRows * 32, kPiece);
}

// Tiles 0 to 3 are of queries, weights and results, 4 to 7 of keys or values.
static void configure_attention(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, tile < 4 ? rows : 16, 64);
  configure(config);
}

// Groups of 16 rows, each with the whole tile: results in 0 and 1, rows in 2 and 3. The keys of 64 dimensions stay in the
// tiles 4 to 7, the first half of the positions in 4 and 6.
static void score_of_64(const uint16_t* query, int64_t groups, const TileScratch& s, float* scores) {
  _tile_loadd(4, s.keys, 64);
  _tile_loadd(5, s.keys + kPiece, 64);
  _tile_loadd(6, s.keys + 2 * kPiece, 64);
  _tile_loadd(7, s.keys + 3 * kPiece, 64);
  for (int64_t group = 0; group < groups; ++group, query += 2 * kPiece, scores += kTileRows * kTile) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(2, query, 64);
    _tile_dpbf16ps(0, 2, 4);
    _tile_dpbf16ps(1, 2, 5);
    _tile_loadd(3, query + kPiece, 64);
    _tile_dpbf16ps(0, 3, 6);
    _tile_dpbf16ps(1, 3, 7);
    _tile_stored(0, scores, kTile * 4);
    _tile_stored(1, scores + 16, kTile * 4);
  }
}

// The same for any number of dimensions.
static void score_of_any(const uint16_t* query, int64_t groups, const TileScratch& s, float* scores) {
  for (int64_t group = 0; group < groups; ++group, scores += kTileRows * kTile) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t step = 0; step < s.steps; ++step, query += kPiece) {
      _tile_loadd(2, query, 64);
      _tile_loadd(4, s.keys + step * 2 * kPiece, 64);
      _tile_dpbf16ps(0, 2, 4);
      _tile_loadd(5, s.keys + (step * 2 + 1) * kPiece, 64);
      _tile_dpbf16ps(1, 2, 5);
    }
    _tile_stored(0, scores, kTile * 4);
    _tile_stored(1, scores + 16, kTile * 4);
  }
}

// Positions of a tile that row r sees, as bits.
static inline uint32_t visible_positions(const AttentionRows& rows, int64_t r, int64_t start) {
  if (r >= rows.count) return 0;
  const int64_t begin = rows.begin[r] - start, end = rows.end[r] - start;
  const uint64_t before = begin <= 0 ? 0 : begin >= kTile ? UINT32_MAX : (uint64_t(1) << begin) - 1;
  const uint64_t until = end <= 0 ? 0 : end >= kTile ? UINT32_MAX : (uint64_t(1) << end) - 1;
  return uint32_t(until & ~before);
}

static void weigh_rows(const AttentionRows& rows, int64_t first, int64_t start, const TileScratch& s) {
  adjust_scores(rows, first, start, s.scores);
  for (int64_t r = first; r < rows.count; r += 4) {
    uint32_t visible[4];
    for (int64_t i = 0; i < 4; ++i) visible[i] = visible_positions(rows, r + i, start);
    const RowState found{rows.maximum + r, rows.total + r, rows.mixed + r * s.padded};
    const int64_t left = rows.count - r;
    if (left >= 4) {
      weigh_four(s.scores + r * kTile, visible, found, s.padded);
      continue;
    }
    float maximum[4] = {}, total[4] = {};  // a copy: memory behind the last row is not part of the state
    std::memcpy(maximum, found.maximum, size_t(left) * sizeof(float));
    std::memcpy(total, found.total, size_t(left) * sizeof(float));
    weigh_four(s.scores + r * kTile, visible, {maximum, total, found.mixed}, s.padded);
    std::memcpy(found.maximum, maximum, size_t(left) * sizeof(float));
    std::memcpy(found.total, total, size_t(left) * sizeof(float));
  }
}

// Advances the outputs of groups of 16 rows, 32 dimensions (or the last 16) at a time: they are in the tiles 0 and 1, weights in
// 2, values in 6 and 7.
static void mix_groups(const float* weights, int64_t groups, const TileScratch& s, float* state) {
  const int64_t stride = s.padded * 4;
  for (int64_t column = 0; column < s.columns; column += 2) {
    const bool two = column + 1 < s.columns;
    _tile_loadd(6, s.values + column * kPiece, 64);
    if (two) _tile_loadd(7, s.values + (column + 1) * kPiece, 64);
    for (int64_t group = 0; group < groups; ++group) {
      float* sums = state + group * kTileRows * s.padded + column * 16;
      _tile_loadd(2, weights + group * kTileRows * kTile, kTile * 4);
      _tile_loadd(0, sums, stride);
      _tile_dpbf16ps(0, 2, 6);
      if (two) _tile_loadd(1, sums + 16, stride);
      if (two) _tile_dpbf16ps(1, 2, 7);
      _tile_stored(0, sums, stride);
      if (two) _tile_stored(1, sums + 16, stride);
    }
  }
}

// Rows from `first` on, in place; the last ones, if they are fewer than the rows of a tile, in a copy: memory behind them is
// not part of the outputs.
static void mix_rows(const AttentionRows& rows, int64_t first, const TileScratch& s) {
  const int64_t whole = rows.count < kTileRows ? 1 : (rows.count - first) / kTileRows, last = first + whole * kTileRows;
  const int64_t left = rows.count - last;
  float* state = rows.mixed + last * s.padded;
  if (left > 0) std::memcpy(s.state, state, size_t(left * s.padded) * sizeof(float));
  finish_writes();
  mix_groups(s.scores + first * kTile, whole, s, rows.mixed + first * s.padded);
  if (left > 0) mix_groups(s.scores + last * kTile, 1, s, s.state);
  finish_writes();
  if (left > 0) std::memcpy(state, s.state, size_t(left * s.padded) * sizeof(float));
}

static void score_rows(int64_t first, int64_t count, const TileScratch& s) {
  const auto score = s.steps == 2 ? score_of_64 : score_of_any;
  finish_writes();
  score(s.query + first / kTileRows * s.steps * kPiece, (count - first + kTileRows - 1) / kTileRows, s, s.scores + first * kTile);
  finish_writes();
}

static TileScratch tile_scratch(int64_t head_dim, uint8_t* memory) {
  TileScratch s{};
  s.steps = (head_dim + 31) / 32, s.columns = (head_dim + 15) / 16, s.padded = s.columns * 16;
  s.scores = reinterpret_cast<float*>(memory);
  s.keys = reinterpret_cast<uint16_t*>(s.scores + kMaxRows * kTile);
  s.values = s.keys + s.steps * 2 * kPiece;
  s.query = s.values + s.columns * kPiece;
  s.state = reinterpret_cast<float*>(s.query + kMaxRows / kTileRows * s.steps * kPiece);
  s.few_scores = s.state + kTileRows * s.padded;
  s.copies = reinterpret_cast<uint8_t*>(s.few_scores + kTile * kFewRows);
  return s;
}

// Tile loads wait for earlier stores, and loads wait for tile stores. The work on two tiles of the context is interleaved, so
// that other instructions fill the time.
static void attend_bf16_on_tiles(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                                 const AttentionRows& rows, uint8_t* scratch) {
  const TileScratch s = tile_scratch(kv.head_dim, scratch);
  round_queries(rows, kv.head_dim, s);
  configure_attention(rows.count < kTileRows ? rows.count : kTileRows);
  const auto first_group = [&](int64_t start) { return first_row(rows, start) / kTileRows * kTileRows; };
  bool scored = false;
  each_tile(kv, kv_head, table, begin, end, rows, s.copies, [&](const Tile& tile, int64_t start) {
    const int64_t first = first_group(start);
    if (!scored) {
      pair_keys(tile, s);
      score_rows(first, rows.count, s);
      pair_values(tile, s);
    }
    weigh_rows(rows, first, start, s);
    if (tile.next) pair_keys(*tile.next, s);
    mix_rows(rows, first, s);
    scored = tile.next != nullptr;
    if (!scored) return;
    score_rows(first_group(start + kTile), rows.count, s);
    pair_values(*tile.next, s);
  });
  _tile_release();
}
