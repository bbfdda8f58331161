// One tile of a paged context: 32 positions, where their rows lie, and the walk from tile to tile.
#pragma once

static inline V16 load_kv(KvType type, const uint8_t* row, int64_t at, int64_t head_dim) {  // lanes past the end are 0
  const int64_t left = head_dim - at;
  if (left >= 16) {
    if (type == KvType::F32) return load(reinterpret_cast<const float*>(row) + at);
    const auto* words = reinterpret_cast<const uint16_t*>(row) + at;
    return type == KvType::F16 ? load_f16(words) : load_bf16(words);
  }
  if (type == KvType::F32) return load_part(reinterpret_cast<const float*>(row) + at, left);
  uint16_t words[16] = {};
  std::memcpy(words, row + at * 2, size_t(left) * 2);
  return type == KvType::F16 ? load_f16(words) : load_bf16(words);
}

// One tile of the context. Positions are counted from the start of the tile. Four positions from a multiple of four on
// lie one row after the other; rows of positions that no query sees can be read and hold anything.
struct Tile {
  const KvLayer& kv;
  int64_t begin, end;               // visible to at least one row
  const uint8_t* keys[kTile / 4];   // of the positions 0, 4, ..., 28
  const uint8_t* values[kTile / 4];
  const Tile* next;                 // null at the end; set in the current tile and in the one after it
  const Tile* ahead;                // the tile to prefetch: the next one, or behind the end the likely next one; may be null

  const uint8_t* key(int64_t i) const { return keys[i / 4] + size_t(i % 4) * kv.row_bytes; }
  const uint8_t* value(int64_t i) const { return values[i / 4] + size_t(i % 4) * kv.row_bytes; }

  // Prefetch the same four rows of the tile ahead, in small parts: a burst would stall the loads of the current tile.
  void prefetch_keys(int64_t i) const { if (ahead) prefetch(ahead->keys[i / 4]); }
  void prefetch_values(int64_t i) const { if (ahead) prefetch(ahead->values[i / 4]); }
  void prefetch(const uint8_t* rows) const {
    for (size_t at = 0; at < 4 * kv.row_bytes; at += 64) __builtin_prefetch(rows + at);
  }
};

// Chosen positions, and blocks whose size is not a multiple of four, do not have their rows in fours: they are copied.
static inline bool is_copied(const KvLayer& kv, const int32_t* chosen) { return chosen || kv.block_size % 4; }

static inline void copy_rows(Tile& tile, int64_t kv_head, const int32_t* table, const int32_t* chosen, int64_t start, uint8_t* rows) {
  const KvLayer& kv = tile.kv;
  uint8_t* const values = kv.values == kv.keys ? rows : rows + kTile * kv.row_bytes;
  for (int64_t i = tile.begin; i < tile.end; ++i) {
    const int64_t position = chosen ? chosen[start + i] : start + i, block = table[position / kv.block_size];
    const int64_t row = (block * kv.num_kv_heads + kv_head) * kv.block_size + position % kv.block_size;
    std::memcpy(rows + size_t(i) * kv.row_bytes, kv.keys + size_t(row) * kv.row_bytes, kv.row_bytes);
    if (values != rows) std::memcpy(values + size_t(i) * kv.row_bytes, kv.values + size_t(row) * kv.row_bytes, kv.row_bytes);
  }
  for (int64_t i = 0; i < kTile; i += 4) {
    tile.keys[i / 4] = rows + size_t(i) * kv.row_bytes;
    tile.values[i / 4] = values + size_t(i) * kv.row_bytes;
  }
}

static inline void find_rows(Tile& tile, int64_t kv_head, const int32_t* table, const int32_t* chosen, int64_t start, uint8_t* rows) {
  const KvLayer& kv = tile.kv;
  if (is_copied(kv, chosen)) return copy_rows(tile, kv_head, table, chosen, start, rows);
  if (kv.block_size % kTile == 0) {  // one block has them all
    const int64_t block = table[start / kv.block_size];
    const size_t at = size_t((block * kv.num_kv_heads + kv_head) * kv.block_size + start % kv.block_size) * kv.row_bytes;
    _Pragma("GCC unroll 8") for (size_t g = 0; g < kTile / 4; ++g)
      tile.keys[g] = kv.keys + at + 4 * g * kv.row_bytes, tile.values[g] = kv.values + at + 4 * g * kv.row_bytes;
    return;
  }
  const int64_t first = tile.begin / 4 * 4, last = (tile.end - 1) / 4 * 4;
  int64_t offset = (start + first) % kv.block_size;
  const int32_t* block = table + (start + first) / kv.block_size;
  for (int64_t i = first; i <= last; ++block, offset = 0) {
    const size_t base = size_t((int64_t(*block) * kv.num_kv_heads + kv_head) * kv.block_size) * kv.row_bytes;
    for (; offset < kv.block_size && i <= last; offset += 4, i += 4) {
      tile.keys[i / 4] = kv.keys + base + size_t(offset) * kv.row_bytes;
      tile.values[i / 4] = kv.values + base + size_t(offset) * kv.row_bytes;
    }
  }
  for (int64_t g = 0; g < first / 4; ++g) tile.keys[g] = tile.keys[first / 4], tile.values[g] = tile.values[first / 4];
  for (int64_t g = last / 4 + 1; g < kTile / 4; ++g) tile.keys[g] = tile.keys[last / 4], tile.values[g] = tile.values[last / 4];
}

#ifndef BIFOLIO_OWN_FEW_ROWS
// Whether few rows are faster without transposing; an instruction set that returns true defines the functions below.
static inline bool reads_directly(const KvLayer&, int64_t) { return false; }
template <KvType T>
static inline void prepare_direct(const AttentionRows&, int64_t, float*) {}
template <KvType T, int R>
static inline void score_directly(const Tile&, const float*, float*) {}
template <KvType T, int R>
static inline void mix_directly(const Tile&, const float*, int64_t, float*) {}
template <int R>
static inline void direct_key_dots(const Tile&, int64_t, const int8_t*, int64_t, const int32_t*, float*) {}
template <int R>
static inline void direct_value_dots(const Tile&, int64_t, const int8_t*, float*) {}
#endif

#define BIFOLIO_BY_ROWS(FIRST, COUNT, CALL)       \
  {                                               \
    int64_t r = FIRST;                            \
    for (; r + 4 <= COUNT; r += 4) CALL(4);       \
    if (COUNT - r == 3) CALL(3);                  \
    if (COUNT - r == 2) CALL(2);                  \
    if (COUNT - r == 1) CALL(1);                  \
  }

// The rows before this one, in fours, end before a tile: queries of one sequence come in the order of their positions.
static inline int64_t first_row(const AttentionRows& rows, int64_t start) {
  int64_t r = 0;
  while (r < rows.count && rows.end[r] <= start) ++r;
  return r / 4 * 4;
}

// Calls step(tile, start of the tile) for every tile in [begin, end) that some row sees.
template <class Step>
static inline void each_tile(const KvLayer& kv, int64_t kv_head, const int32_t* table, int64_t begin, int64_t end,
                             const AttentionRows& rows, uint8_t* copies, Step step) {
  int64_t first = rows.begin[0], last = rows.end[0];
  for (int64_t r = 1; r < rows.count; ++r) {
    first = rows.begin[r] < first ? rows.begin[r] : first;
    last = rows.end[r] > last ? rows.end[r] : last;
  }
  first = first > begin ? first : begin;
  last = last < end ? last : end;
  const bool copied = is_copied(kv, rows.chosen);  // to one place: only one tile at a time
  const int64_t known = rows.end[0] > last ? rows.end[0] : last;  // positions that the table of the first row covers
  const auto tile_at = [&](int64_t start) {
    const int64_t stop = start < last ? last : known;
    Tile tile{kv, first > start ? first - start : 0, stop < start + kTile ? stop - start : kTile, {}, {}, nullptr, nullptr};
    find_rows(tile, kv_head, table, rows.chosen, start, copies);
    return tile;
  };
  int64_t start = first / kTile * kTile;
  if (first >= last) return;
  Tile tile = tile_at(start);
  if (copied) {
    for (; start < last; start += kTile) {
      if (start > first) new (&tile) Tile(tile_at(start));
      step(tile, start);
    }
    return;
  }
  const auto following = [&](int64_t at) { return tile_at(at < known ? at : start); };
  Tile next = following(start + kTile);
  for (; start < last; start += kTile) {
    const Tile after = following(start + 2 * kTile);
    next.ahead = start + 2 * kTile < known ? &after : nullptr;
    next.next = start + 2 * kTile < last ? &after : nullptr;
    tile.ahead = start + kTile < known ? &next : nullptr;
    tile.next = start + kTile < last ? &next : nullptr;
    step(tile, start);
    new (&tile) Tile(next);
    new (&next) Tile(after);
  }
}
