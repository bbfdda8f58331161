// Products with weights of blocks: exact integer dot products for each scale, scaled and summed in order.
#pragma once

#ifndef BIFOLIO_OWN_UNPACK
// The quants of a block to bytes, in the order of Q8_0; six bits are four times too large.
template <Coding C>
static inline void unpack_block(const uint8_t* quants, const int8_t* table, uint8_t* out) {
  static_assert(C.bits == 4 || C.bits == 6);
  if constexpr (C.bits == 4) {
    for (int i = 0; i < 256; ++i) {
      const uint8_t low = quants[i] & 15, high = quants[i] >> 4;
      out[i] = C.table ? uint8_t(table[low]) : C.is_signed ? uint8_t((low ^ 8) - 8) : low;
      out[256 + i] = C.table ? uint8_t(table[high]) : C.is_signed ? uint8_t((high ^ 8) - 8) : high;
    }
  } else {
    for (int half = 0; half < 2; ++half, quants += 192, out += 256)
      for (int i = 0; i < 64; ++i) {
        for (int line = 0; line < 3; ++line) out[line * 64 + i] = uint8_t(quants[line * 64 + i] << 2);
        out[192 + i] = uint8_t((quants[128 + i] & 0xc0) | (quants[64 + i] >> 2 & 0x30) | (quants[i] >> 4 & 0x0c));
      }
  }
}
constexpr float kNibbleUnit = 1.0f;  // the value of a unit of the byte that a signed nibble becomes
constexpr float kSixBitUnit = 0.25f;  // and six bits
constexpr Coding unpacked_coding(Coding packed) { return packed.unpacked(); }
#endif

// The weights of one panel as they are packed.
template <Format F>
struct PackedPanel {
  const uint8_t* data;
  const int8_t* table = nullptr;

  static constexpr Format kFormat = F;
  static constexpr int64_t kScaleWords = coding(F).scales * kPanel;  // of a block
  static constexpr int64_t kBlocks = group_blocks(F);

  const uint8_t* group(int64_t b) const { return data + b / kBlocks * group_bytes(F); }
  const uint8_t* quants(int64_t b) const { return group(b) + header_bytes(F) + b % kBlocks * quant_bytes(F); }
  const uint16_t* scales(int64_t b) const { return words(b) + b % 2 * kScaleWords; }
  const uint16_t* minima(int64_t b) const { return scales(b) + 2 * kScaleWords; }

  V16 factor(int64_t b) const { return load_f16(words(b)); }  // of the scales of a compact group
  // Scale s of block b, and its minimum, of all columns.
  V16 scale(int64_t b, int s) const {
    if constexpr (F == Format::Q4_K) return mul(load_f16(words(b)), load_u8(bytes(b)));
    else if constexpr (coding(F).compact) return mul(load_f16(words(b)), compact_scale<F>(group(b), b % kBlocks, s));
    else return load_f16(scales(b) + s * kPanel);
  }
  V16 minimum(int64_t b, int s) const {
    if constexpr (F == Format::Q4_K) return mul(load_f16(words(b) + kPanel), load_u8(bytes(b) + kBlocks * kPanel));
    else if constexpr (coding(F).compact) return mul(load_f16(words(b) + kPanel), compact_minimum<F>(group(b), b % kBlocks, s));
    else return load_f16(minima(b) + s * kPanel);
  }

  // Block b as bytes, in the order of Q8_0.
  void unpack(int64_t b, uint8_t* out) const {
    if constexpr (coding(F).compact) expand_block<F>(group(b), b % kBlocks, table, out);
    else unpack_block<coding(F)>(quants(b), table, out);
  }

 private:
  const uint16_t* words(int64_t b) const { return reinterpret_cast<const uint16_t*>(group(b)); }
  const uint8_t* bytes(int64_t b) const { return group(b) + 4 * kPanel + b % kBlocks * kPanel; }
};

// Some blocks of a panel for many rows: bytes, and floats for half floats.
struct UnpackedPanel {
  const uint8_t* first;  // quants of the first block
  int64_t pair;          // bytes from one pair of blocks to the next
  const float* all_scales;  // [blocks][scales of a block][16]
  const float* all_minima;  // the same, where the format has minima
  int64_t step;          // floats from the scales of a block to those of the next
  const int8_t* table = nullptr;

  const uint8_t* quants(int64_t b) const { return first + b / 2 * pair + b % 2 * kQuantBlock * kPanel; }
  const float* scales(int64_t b) const { return all_scales + b * step; }
  const float* minima(int64_t b) const { return all_minima + b * step; }
  V16 scale(int64_t b, int s) const { return load(scales(b) + s * kPanel); }
  V16 minimum(int64_t b, int s) const { return load(minima(b) + s * kPanel); }
  // The same from block `b` on, which is even.
  UnpackedPanel from(int64_t b) const { return {quants(b), pair, scales(b), minima(b), step, table}; }
};

// Activation rows from some block on. Rows r .. r + 3 share a row group when r is a multiple of 4.
struct IntRows {
  const int8_t* q;       // [rows][k]
  int64_t stride;        // k
  const float* scale;    // [blocks][4]
  const float* sum;      // [blocks][4]
  const int32_t* isum;   // [blocks][4]
  int64_t group;         // from the scales of one row group to those of the next
  const int32_t* half_isum;  // [rows][k / 16]
  const float* half_sum;     // [halves][4]

  IntRows from(int64_t b) const {
    return {q + b * kQuantBlock, stride, scale + b * kRowGroup, sum + b * kRowGroup, isum + b * kRowGroup, group,
            half_isum + 2 * b, half_sum + 2 * b * kRowGroup};
  }
  // The place of the scale of row r, if the first row is `first_row` of its group.
  int64_t at(int r, int64_t b, int first_row) const { return r / 4 * group + b * kRowGroup + first_row + r % 4; }
  // The same of half a block.
  int64_t half_at(int r, int64_t b, int half, int first_row) const { return r / 4 * 2 * group + (2 * b + half) * kRowGroup + first_row + r % 4; }
  int32_t half_total(int r, int64_t b, int half) const { return half_isum[r * (stride / 16) + 2 * b + half]; }
};

// Minima of `blocks` blocks times the sums of the rows.
template <Coding C, int R, class Panel>
static inline void add_minima(const Panel& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16 acc[R]) {
  for (int64_t b = begin; b < end; ++b)
    for (int s = 0; s < C.scales; ++s) {
      const V16 minimum = w.minimum(b, s);
      for (int r = 0; r < R; ++r)
        acc[r] = fma(minimum, broadcast(C.scales == 1 ? x.sum[x.at(r, b, first_row)] : x.half_sum[x.half_at(r, b, s, first_row)]), acc[r]);
    }
}

#ifdef BIFOLIO_OWN_SIX_BITS
constexpr bool kSixBitsAsPacked = true;  // `packed_six_bit_dots<Halves, R>`: no block is unpacked for few rows
#else
constexpr bool kSixBitsAsPacked = false;
#endif

#ifndef BIFOLIO_OWN_INT_TILE
// An instruction set provides the sums of one block for R rows, `block_dots<Bits, Signed, R>` for eight bits and for nibbles
// without a table, and of half a block of bytes, `half_dots<Signed, R>`; if it raises quants, `raised_dots<Coding, R>` for both.
template <Coding C, int R, class Panel>
static inline void int_sums(const Panel& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16 acc[R]) {
  constexpr bool as_packed = kSixBitsAsPacked && C.bits == 6 && !C.raised;
  constexpr bool unpacks = C.compact || (!C.raised && !as_packed && (C.bits == 6 || (C.bits == 4 && (C.table || C.scales == 2))));
  constexpr Coding code = unpacks ? unpacked_coding(C) : C;
  constexpr float unit = unpacks && C.bits == 6 ? kSixBitUnit : 1.0f;
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t* quants = w.quants(b);
    alignas(64) uint8_t bytes[kQuantBlock * kPanel];
    if constexpr (unpacks) {
      w.unpack(b, bytes);
      quants = bytes;
    }
    for (int s = 0; s < C.scales; ++s) {
      V16 sums[R];
      int32_t totals[R];
      for (int r = 0; r < R; ++r) totals[r] = C.scales == 2 ? x.half_total(r, b, s) : x.isum[x.at(r, b, first_row)];
      const int8_t* rows = x.q + b * kQuantBlock + s * 16;
      if constexpr (as_packed) packed_six_bit_dots<2 / C.scales, R>(quants + s * 192, rows, x.stride, totals, sums);
      else if constexpr (code.raised) raised_dots<code, R>(quants + s * 256, rows, x.stride, totals, sums);
      else if constexpr (code.scales == 2) half_dots<code.is_signed, R>(quants + s * 256, rows, x.stride, totals, sums);
      else block_dots<code.bits, code.is_signed, R>(quants, rows, x.stride, totals, sums);
      const V16 scale = w.scale(b, s);
      for (int r = 0; r < R; ++r)
        acc[r] = fma(sums[r], mul(scale, broadcast(x.scale[x.at(r, b, first_row)] * unit)), acc[r]);
    }
  }
}
#endif

#ifdef BIFOLIO_OWN_COMPACT_DOTS
// The same for the bits of a file and one row, whole groups of blocks. An instruction set provides `GroupNumbers<Format>`, made for a group
// before its blocks are multiplied, `compact_dots<Format>` and `compact_scales<Format>`.
template <Format F>
static inline void compact_sums(const PackedPanel<F>& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16& acc) {
  constexpr int scales = coding(F).scales;
  constexpr int64_t kPart = (group_bytes(F) + 511) / 512 * 64;  // of a group, which is prefetched in as many parts as it has blocks
  constexpr int64_t kAhead = 4096;  // bytes: a processor by itself prefetches within a page alone
  for (int64_t first = begin; first < end; first += group_blocks(F)) {
    const uint8_t* group = w.group(first);
    const V16 factor = w.factor(first);
    const GroupNumbers<F> numbers(group, 0, w.table);
    for (int64_t b = 0; b < group_blocks(F); ++b) {
      for (int64_t at = b * kPart; at < (b + 1) * kPart; at += 64) __builtin_prefetch(group + kAhead + at);
      V16 sums[scales], own[scales];
      int32_t totals[scales];
      for (int s = 0; s < scales; ++s) totals[s] = scales == 2 ? x.half_total(0, first + b, s) : x.isum[x.at(0, first + b, first_row)];
      compact_dots<F>(group, b, w.table, numbers, x.q + (first + b) * kQuantBlock, totals, sums);
      compact_scales<F>(group, b, own);
      const V16 row_scale = broadcast(x.scale[x.at(0, first + b, first_row)]);
      for (int s = 0; s < scales; ++s) acc = fma(sums[s], mul(mul(factor, own[s]), row_scale), acc);
    }
  }
}
#endif

// Sums of blocks [begin, end) of a panel for R rows, without minima.
template <Coding C, int R, class Panel>
static inline void add_sums(const Panel& w, const IntRows& x, int first_row, int64_t begin, int64_t end, V16 acc[R]) {
#ifdef BIFOLIO_OWN_COMPACT_DOTS
  if constexpr (C.compact && R == 1) return compact_sums(w, x, first_row, begin, end, acc[0]);
#endif
  int_sums<C, R>(w, x, first_row, begin, end, acc);
}

// Blocks of a panel against R rows.
template <Coding C, int R, class Panel>
static inline void int_tile(const Panel& w, const IntRows& x, int first_row, int64_t blocks, V16 acc[R]) {
  if constexpr (!C.minima) {
    add_sums<C, R>(w, x, first_row, 0, blocks, acc);
  } else {
    for (int64_t b = 0; b < blocks; b += kMinimaBlocks) {
      const int64_t end = blocks - b < kMinimaBlocks ? blocks : b + kMinimaBlocks;
      add_sums<C, R>(w, x, first_row, b, end, acc);
      add_minima<C, R>(w, x, first_row, b, end, acc);
    }
  }
}

static inline IntRows int_rows(const Activations& x, int64_t row, int64_t block) {
  const int64_t scales = (row / kRowGroup) * (x.k / kQuantBlock) * kRowGroup + block * kRowGroup;
  return {x.q + row * x.k + block * kQuantBlock, x.k, x.scale + scales, x.sum + scales, x.isum + scales,
          x.k / kQuantBlock * kRowGroup, x.half_isum + row * (x.k / 16) + block * 2, x.half_sum + 2 * scales};
}

template <Format F, int R>
static void matmul_int_few(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                           int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    V16 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = zero();
    int_tile<coding(F), R>(PackedPanel<F>{m.panel(p), m.table}, int_rows(x, 0, 0), 0, m.k / kQuantBlock, acc);
    for (int r = 0; r < R; ++r) finish_columns(acc[r], m, p * kPanel, bias, y + r * y_stride);
  }
}

template <Coding C, int R>
static inline void accumulate_int_rows(const UnpackedPanel& w, const IntRows& x, int first_row, int64_t blocks, float* sums,
                                       int64_t stride, bool first) {
  V16 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = first ? zero() : load(sums + r * stride);
  int_tile<C, R>(w, x, first_row, blocks, acc);
  for (int r = 0; r < R; ++r) store(sums + r * stride, acc[r]);
}

#ifndef BIFOLIO_INT_ROWS
#define BIFOLIO_INT_ROWS 4  // rows of a tile when there are many
#endif

constexpr int64_t kUnpackedBlocks = 64;  // blocks of a panel that are worked on at a time: 2048 k values, 32 KB

#ifndef BIFOLIO_FEW_ROWS_BLOCKS
#define BIFOLIO_FEW_ROWS_BLOCKS kUnpackedBlocks  // the same for up to 32 rows and quants that are unpacked
#endif

#ifndef BIFOLIO_OWN_INT_4
template <Format F>
constexpr bool kUnpacksInTile = false;  // the tile of the first four rows unpacks quants for those that follow
#endif

// Blocks [begin, begin + blocks) of a panel, begin being even; without `quants` their bytes are left to be written.
template <Format F>
static inline UnpackedPanel unpack_panel(const PackedPanel<F>& w, int64_t begin, int64_t blocks, uint8_t* scratch,
                                         bool quants = true) {
  constexpr Coding code = coding(F);
  constexpr int64_t step = code.scales * kPanel;
  constexpr float unit = F == Format::Q4_0 ? kNibbleUnit : code.bits == 6 ? kSixBitUnit : 1.0f;
  auto* scales = reinterpret_cast<float*>(scratch + kUnpackedBlocks * kQuantBlock * kPanel);
  float* minima = scales + kUnpackedBlocks * step;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int s = 0; s < code.scales; ++s) {
      const V16 scale = w.scale(begin + b, s);
      store(scales + b * step + s * kPanel, unit != 1.0f ? mul(scale, broadcast(unit)) : scale);
      if constexpr (code.minima) store(minima + b * step + s * kPanel, w.minimum(begin + b, s));
    }
    if constexpr (F != Format::Q8_0)
      if (quants) w.unpack(begin + b, scratch + b * kQuantBlock * kPanel);
  }
  if constexpr (F == Format::Q8_0) return {w.quants(begin), group_bytes(F), scales, minima, step};
  return {scratch, 2 * kQuantBlock * kPanel, scales, minima, step};
}

// Memory to prefetch.
struct MemoryPart {
  const uint8_t* data;
  size_t size;

  MemoryPart part(int64_t index, int64_t parts) const {
    return {data + size * size_t(index) / size_t(parts), size / size_t(parts)};
  }
};

// Prefetch part `part` of `parts` of `size` bytes: the next panel arrives while this one is multiplied.
static inline void prefetch_part(const uint8_t* data, size_t size, int64_t part, int64_t parts) {
  const size_t begin = size * size_t(part) / size_t(parts), end = size * size_t(part + 1) / size_t(parts);
  for (size_t at = begin / 64 * 64; at < end; at += 64) __builtin_prefetch(data + at, 0, 3);
}

#ifdef BIFOLIO_AVX512_INT_TILE
#include "avx512_int_tile.h"
#endif

template <Format F>
static void matmul_int_many(const PackedMatrix& m, const Activations& x, int64_t row_begin, int64_t rows,
                            const float* bias, float* y, int64_t y_stride, int64_t begin, int64_t end,
                            uint8_t* scratch) {
  constexpr Coding code = unpacked_coding(coding(F));
  uint8_t* unpacked = scratch + kRowBlock * kPanel * sizeof(float);
  const int64_t num_blocks = m.k / kQuantBlock;
  const int64_t most = F != Format::Q8_0 && rows <= 32 ? BIFOLIO_FEW_ROWS_BLOCKS : kUnpackedBlocks;
  y += row_begin * y_stride;
  int64_t p = begin;
#ifdef BIFOLIO_OWN_INT_PANELS
  if constexpr (code.scales == 1) {
    const int64_t whole = rows < kLeastRowsOfPanels ? begin : std::min(end, m.n / kPanel);
    for (; p + kIntPanels <= whole; p += kIntPanels) multiply_byte_panels<F, kIntPanels>(m, x, row_begin, rows, bias, y, y_stride, p, scratch);
    for (; p + 2 <= whole; p += 2) multiply_byte_panels<F, 2>(m, x, row_begin, rows, bias, y, y_stride, p, scratch);
  }
#endif
  for (; p < end; ++p) {
    const PackedPanel<F> panel{m.panel(p), m.table};
    const bool whole = (p + 1) * kPanel <= m.n;  // then sums are accumulated in the output
    float* sums = whole ? y + p * kPanel : reinterpret_cast<float*>(scratch);
    const int64_t stride = whole ? y_stride : kPanel;
    for (int64_t b = 0; b < num_blocks; b += most) {
      const int64_t blocks = num_blocks - b < most ? num_blocks - b : most;
      const UnpackedPanel w = unpack_panel(panel, b, blocks, unpacked, !kUnpacksInTile<F> || rows < 4);
      const uint8_t* next = m.panel(p) + blocks_bytes(F, b + blocks);  // the next blocks in memory
      const size_t next_bytes = p + 1 < end ? size_t(blocks / group_blocks(F) * group_bytes(F)) : 0;
      int64_t r = 0;
#ifdef BIFOLIO_OWN_INT_4
      for (; r + 4 <= rows && code.scales == 1; r += 4) {
        const MemoryPart ahead = r < 16 ? MemoryPart{next, next_bytes}.part(r / 4, rows < 16 ? rows / 4 : 4) : MemoryPart{next, 0};
        accumulate_int_4(panel, w, int_rows(x, row_begin + r, b), b, blocks, r == 0, sums + r * stride, stride, ahead);
      }
#endif
      for (; r + BIFOLIO_INT_ROWS <= rows; r += BIFOLIO_INT_ROWS) {
        if (r < 16) prefetch_part(next, next_bytes, r / BIFOLIO_INT_ROWS, 16 / BIFOLIO_INT_ROWS);
        accumulate_int_rows<code, BIFOLIO_INT_ROWS>(w, int_rows(x, row_begin + r, b), 0, blocks, sums + r * stride, stride, b == 0);
      }
      for (; r + 4 <= rows; r += 4)
        accumulate_int_rows<code, 4>(w, int_rows(x, row_begin + r, b), 0, blocks, sums + r * stride, stride, b == 0);
      for (; r < rows; ++r)
        accumulate_int_rows<code, 1>(w, int_rows(x, row_begin + r, b), int(r % 4), blocks, sums + r * stride, stride, b == 0);
    }
    if (whole && !bias) continue;
    for (int64_t r = 0; r < rows; ++r) finish_columns(load(sums + r * stride), m, p * kPanel, bias, y + r * y_stride);
  }
}

template <Format F>
static void matmul_int(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                       int64_t begin, int64_t end, uint8_t* scratch) {
  switch (x.rows) {
    case 1: return matmul_int_few<F, 1>(m, x, bias, y, y_stride, begin, end);
    case 2: return matmul_int_few<F, 2>(m, x, bias, y, y_stride, begin, end);
    case 3: return matmul_int_few<F, 3>(m, x, bias, y, y_stride, begin, end);
    case 4: return matmul_int_few<F, 4>(m, x, bias, y, y_stride, begin, end);
    default: break;
  }
  for (int64_t row = 0; row < x.rows; row += kRowBlock) {
    const int64_t rows = x.rows - row < kRowBlock ? x.rows - row : kRowBlock;
    matmul_int_many<F>(m, x, row, rows, bias, y, y_stride, begin, end, scratch);
  }
}

static void matmul(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                   int64_t begin, int64_t end, uint8_t* scratch) {
  switch (m.format) {
    case Format::F32: return matmul_float<Format::F32>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::F16: return matmul_float<Format::F16>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::BF16: return matmul_float<Format::BF16>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q8_0: return matmul_int<Format::Q8_0>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q4_0: return matmul_int<Format::Q4_0>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q4_1: return matmul_int<Format::Q4_1>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q4_T: return matmul_int<Format::Q4_T>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q4_T_16: return matmul_int<Format::Q4_T_16>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q6_0: return matmul_int<Format::Q6_0>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q6_1: return matmul_int<Format::Q6_1>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q6_0_16: return matmul_int<Format::Q6_0_16>(m, x, bias, y, y_stride, begin, end, scratch);
#ifdef BIFOLIO_PACKS_Q4_K
    case Format::Q4_K: return matmul_int<Format::Q4_K>(m, x, bias, y, y_stride, begin, end, scratch);
#else
    case Format::Q4_K: return;  // no matrix is packed so
#endif
    case Format::Q2_K: return matmul_int<Format::Q2_K>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::Q3_K: return matmul_int<Format::Q3_K>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ2_XXS: return matmul_int<Format::IQ2_XXS>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ2_XS: return matmul_int<Format::IQ2_XS>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ2_S: return matmul_int<Format::IQ2_S>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ3_XXS: return matmul_int<Format::IQ3_XXS>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ3_S: return matmul_int<Format::IQ3_S>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ1_S: return matmul_int<Format::IQ1_S>(m, x, bias, y, y_stride, begin, end, scratch);
    case Format::IQ1_M: return matmul_int<Format::IQ1_M>(m, x, bias, y, y_stride, begin, end, scratch);
  }
}
