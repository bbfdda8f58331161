// Attention over bf16 caches on tiles of 16 rows, which multiply bfloat16.
//
// Queries and weights are not rounded to eight bits: a number is the sum of two bfloat16, the nearest one (halves go away
// from 0) and the one nearest to what it leaves over. Tiles add the second part's products, then the first's: for every 32
// dimensions of a score, and for every tile of 32 positions of an output. A weight is a power of two, by a polynomial of its
// own, and never below 2^-126. All of this for any number of rows: a row does not depend on the others.
//
// What an instruction set provides is listed in matmul_tiles.h.
#pragma once

constexpr int64_t kPiece = kTileRows * 32;  // words of a tile
constexpr int64_t kFewRows = 4;             // that are columns, so that keys are multiplied as they lie in the cache
constexpr float kLog2E = 1.44269504f;
constexpr float kPowerTerms[6] = {1.00000012f, 0.69314718f, 0.24022107f, 0.05550357f, 0.00967603f, 0.00133909f};  // of 2^f, |f| <= 1/2

// What one call works with; words are tiles of 16 x 32.
struct TileScratch {
  float* scores;      // [kMaxRows][kTile], in place of which come weights, each row's 32 first parts and 32 second ones
  uint16_t* keys;     // [steps][2]: pairs of dimensions as rows, 16 positions as columns
  uint16_t* values;   // [columns]: pairs of positions as rows, 16 dimensions as columns
  uint16_t* query;    // [groups of 16 rows][steps][2]
  float* state;       // [16][padded]: the last rows, where they are fewer
  uint8_t* copies;    // [2][kTile] rows of the cache
  float* few_scores;  // [kTile][kFewRows]: of few rows, as tiles make them
  int64_t steps, columns, padded;
};

// Where the softmax of a row is.
struct RowState {
  float *maximum, *total, *mixed;
};

#ifdef BIFOLIO_OWN_TILE_ATTENTION
static inline void split_row(const float* x, int64_t count, uint16_t* first, uint16_t* second);
static void pair_keys(const Tile& tile, const TileScratch& s);
static void pair_values(const Tile& tile, const TileScratch& s);
static void weigh_four(float* scores, const uint32_t visible[4], const RowState& rows, int64_t padded);
static void turn_columns(const float* columns, float* scores);
#else
static inline uint16_t nearest_word(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return uint16_t((bits + 0x8000u) >> 16);
}

static inline void split_number(float x, uint16_t* first, uint16_t* second) {
  *first = nearest_word(x);
  const uint32_t bits = uint32_t(*first) << 16;
  float part;
  std::memcpy(&part, &bits, 4);
  *second = nearest_word(x - part);
}

// Up to 32 numbers, and zeros after them.
static inline void split_row(const float* x, int64_t count, uint16_t* first, uint16_t* second) {
  for (int64_t i = 0; i < 32; ++i) split_number(i < count ? x[i] : 0.0f, first + i, second + i);
}

static void pair_keys(const Tile& tile, const TileScratch& s) {
  std::memset(s.keys, 0, size_t(s.steps * 2 * kPiece) * 2);
  for (int64_t i = tile.begin; i < tile.end; ++i)
    for (int64_t d = 0; d < tile.kv.head_dim; ++d)
      std::memcpy(s.keys + (d / 32 * 2 + i / 16) * kPiece + d % 32 / 2 * 32 + i % 16 * 2 + d % 2, tile.key(i) + d * 2, 2);
}

// Positions that nobody sees become 0: they are multiplied with weights that are 0.
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
  uint16_t words[2 * kTile];
  split_row(weights, kTile, words, words + kTile);
  std::memcpy(scores, words, sizeof words);
}

// Scores of four rows to weights, in two parts; their states move to the new maxima. Bit i of `visible`: position i of the tile.
static void weigh_four(float* scores, const uint32_t visible[4], const RowState& rows, int64_t padded) {
  for (int64_t r = 0; r < 4; ++r)
    weigh_row(scores + r * kTile, visible[r], {rows.maximum + r, rows.total + r, rows.mixed + r * padded}, padded);
}

static void turn_columns(const float* columns, float* scores) {
  for (int64_t i = 0; i < kTile; ++i)
    for (int64_t r = 0; r < kFewRows; ++r) scores[r * kTile + i] = columns[i * kFewRows + r];
}
#endif

static void split_queries(const AttentionRows& rows, int64_t head_dim, const TileScratch& s) {
  for (int64_t r = 0; r < rows.count; ++r)
    for (int64_t step = 0; step < s.steps; ++step) {
      uint16_t* words = s.query + (r / kTileRows * s.steps + step) * 2 * kPiece + r % kTileRows * 32;
      const int64_t left = head_dim - step * 32;
      split_row(rows.query + r * head_dim + step * 32, left < 32 ? left : 32, words, words + kPiece);
    }
}

// One or two groups of 16 rows, each with the whole tile: results in 0 and 1, of the second group in 2 and 3; rows in 4 and 5,
// keys in 6 and 7.
template <bool Two>
static void score_groups(const uint16_t* query, const TileScratch& s, float* scores) {
  const uint16_t *other = query + s.steps * 2 * kPiece, *keys = s.keys;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (Two) _tile_zero(2);
  if constexpr (Two) _tile_zero(3);
#define MULTIPLY(PART)                                            \
  _tile_loadd(4, query + PART * kPiece, 64);                      \
  if constexpr (Two) _tile_loadd(5, other + PART * kPiece, 64);   \
  _tile_dpbf16ps(0, 4, 6);                                        \
  _tile_dpbf16ps(1, 4, 7);                                        \
  if constexpr (Two) _tile_dpbf16ps(2, 5, 6);                     \
  if constexpr (Two) _tile_dpbf16ps(3, 5, 7);
  for (int64_t step = 0; step < s.steps; ++step, query += 2 * kPiece, other += 2 * kPiece, keys += 2 * kPiece) {
    _tile_loadd(6, keys, 64);
    _tile_loadd(7, keys + kPiece, 64);
    MULTIPLY(1)
    MULTIPLY(0)
  }
#undef MULTIPLY
  _tile_stored(0, scores, kTile * 4);
  _tile_stored(1, scores + 16, kTile * 4);
  if constexpr (Two) _tile_stored(2, scores + kTileRows * kTile, kTile * 4);
  if constexpr (Two) _tile_stored(3, scores + kTileRows * kTile + 16, kTile * 4);
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
  for (int64_t r = first; r < rows.count; r += 4) {
    uint32_t visible[4];
    for (int64_t i = 0; i < 4; ++i) visible[i] = visible_positions(rows, r + i, start);
    const RowState found{rows.maximum + r, rows.total + r, rows.mixed + r * s.padded};
    const int64_t left = rows.count - r;
    if (left >= 4) {
      weigh_four(s.scores + r * kTile, visible, found, s.padded);
      continue;
    }
    float maximum[4] = {}, total[4] = {};  // what follows the last row is not ours
    std::memcpy(maximum, found.maximum, size_t(left) * sizeof(float));
    std::memcpy(total, found.total, size_t(left) * sizeof(float));
    weigh_four(s.scores + r * kTile, visible, {maximum, total, found.mixed}, s.padded);
    std::memcpy(found.maximum, maximum, size_t(left) * sizeof(float));
    std::memcpy(found.total, total, size_t(left) * sizeof(float));
  }
}

// Moves the outputs of 16 rows on: 16 dimensions in each of the tiles 0 to 3; weights in 4 and 5, values in 6 and 7.
static void mix_sixteen(const float* weights, const TileScratch& s, float* state) {
  const int64_t stride = s.padded * 4;
  const uint16_t* values = s.values;
  _tile_loadd(4, weights, kTile * 4);
  _tile_loadd(5, weights + kTile / 2, kTile * 4);
#define MIX(COLUMN, VALUES)                              \
  _tile_loadd(COLUMN, state + COLUMN * 16, stride);      \
  _tile_loadd(VALUES, values + COLUMN * kPiece, 64);     \
  _tile_dpbf16ps(COLUMN, 5, VALUES);                     \
  _tile_dpbf16ps(COLUMN, 4, VALUES);
  int64_t column = 0;
  for (; column + 4 <= s.columns; column += 4, state += 64, values += 4 * kPiece) {
    MIX(0, 6)
    MIX(1, 7)
    MIX(2, 6)
    MIX(3, 7)
    _tile_stored(0, state, stride);
    _tile_stored(1, state + 16, stride);
    _tile_stored(2, state + 32, stride);
    _tile_stored(3, state + 48, stride);
  }
  for (; column < s.columns; ++column, state += 16, values += kPiece) {
    MIX(0, 6)
    _tile_stored(0, state, stride);
  }
#undef MIX
}

// Rows [first, first + 16) where their outputs lie; where fewer are left, in a copy: what follows them is not ours.
static void mix_group(const AttentionRows& rows, int64_t first, const TileScratch& s) {
  float* state = rows.mixed + first * s.padded;
  const int64_t left = rows.count - first;
  const bool copied = left < kTileRows && first > 0;
  const size_t bytes = size_t(left * s.padded) * sizeof(float);
  if (copied) std::memcpy(s.state, state, bytes);
  finish_writes();
  mix_sixteen(s.scores + first * kTile, s, copied ? s.state : state);
  finish_writes();
  if (copied) std::memcpy(state, s.state, bytes);
}

static void score_groups_from(int64_t first, int64_t count, const TileScratch& s) {
  finish_writes();
  for (int64_t r = first; r < count; r += 2 * kTileRows) {
    const auto score = r + kTileRows < count ? score_groups<true> : score_groups<false>;
    score(s.query + r / kTileRows * s.steps * 2 * kPiece, s, s.scores + r * kTile);
  }
  finish_writes();
}

static TileScratch tile_scratch(int64_t head_dim, uint8_t* memory) {
  TileScratch s{};
  s.steps = (head_dim + 31) / 32, s.columns = (head_dim + 15) / 16, s.padded = s.columns * 16;
  s.scores = reinterpret_cast<float*>(memory);
  s.keys = reinterpret_cast<uint16_t*>(s.scores + kMaxRows * kTile);
  s.values = s.keys + s.steps * 2 * kPiece;
  s.query = s.values + s.columns * kPiece;
  s.state = reinterpret_cast<float*>(s.query + kMaxRows / kTileRows * s.steps * 2 * kPiece);
  s.few_scores = s.state + kTileRows * s.padded;
  s.copies = reinterpret_cast<uint8_t*>(s.few_scores + kTile * kFewRows);
  return s;
}

// Tiles wait for what was stored last, and so do loads for what tiles store. Between the two comes something else: the next
// tile of the context is on its way while one is worked on.
static void attend_bf16_on_tiles(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                                 const AttentionRows& rows, uint8_t* scratch) {
  const TileScratch s = tile_scratch(kv.head_dim, scratch);
  split_queries(rows, kv.head_dim, s);
  configure_tiles(rows.count < kTileRows ? rows.count : kTileRows);
  const auto first_group = [&](int64_t start) { return first_row(rows, start) / kTileRows * kTileRows; };
  bool scored = false;
  each_tile(kv, kv_head, table, begin, end, rows, s.copies, [&](const Tile& tile, int64_t start) {
    const int64_t first = first_group(start);
    if (!scored) {
      pair_keys(tile, s);
      score_groups_from(first, rows.count, s);
      pair_values(tile, s);
    }
    weigh_rows(rows, first, start, s);
    if (tile.next) pair_keys(*tile.next, s);
    for (int64_t r = first; r < rows.count; r += kTileRows) mix_group(rows, r, s);
    scored = tile.next != nullptr;
    if (!scored) return;
    score_groups_from(first_group(start + kTile), rows.count, s);
    pair_values(*tile.next, s);
  });
  _tile_release();
}
