// The contracts between kernels: formats, packed layouts, and one table of function pointers for each instruction set.
//
// THE ARITHMETIC. Every instruction set computes the same thing in the same order, so that a result depends neither on
// the number of rows, nor on threads, nor on how a prompt is cut into chunks:
//
//   float weights   y = fma(x[k-1], w[k-1], ... fma(x[1], w[1], fma(x[0], w[0], 0))), k ascending, in float32
//   block weights   a row of x is cut into quant blocks of 32: d = max|x| / 127, q = round_to_even(x * (127 / max|x|)), the product rounded once;
//                   y = fma(float(sum of q * w), d_w * d, y) over the blocks, ascending; the sum is an exact integer.
//                   Where 16 weights share a scale, the sums are those of 16 products. Formats with minima take 32 blocks at a
//                   time: after the sums of these blocks, y = fma(m_w, d * float(sum of q), y) over the same blocks.
//   on AMX          BF16 and block weights are multiplied on tiles of bfloat16, to which x is rounded. A block weight becomes
//                   the upper half of the float (d_w * kWidening) * w (Q4_1: fma with m_w * kWidening): the lower half is cut
//                   off, and the factor corrects the mean error of that. The order of sums is that of the tile
//                   instructions: see isa_amx.cpp.
//   sums over a row 16 partial sums, element i going to partial sum i mod 16, added as a tree: 8+8, 4+4, 2+2, 1+1
//   recurrences     token by token; a state's row is updated and multiplied with the query, rows ascending: see HeadScan
//   attention       the context is cut at absolute positions into spans of 256 and tiles of 32 tokens. Within a span:
//                   online softmax, tile by tile; spans are merged in order. A score is four chains of fma, dimension d
//                   in chain d mod 4, added as (c0 + c1) + (c2 + c3); an output is a chain of fma over positions.
//                   A Q8_0 cache: queries are quantised like rows of x, and a score is computed like a product with block
//                   weights. The weights p of a tile become bytes too: q = round_to_even(p * d_v * (127 / m)),
//                   m = max(1e-30, max of p * d_v); the output grows by fma(float(sum of q * v), m * (1 / 127), .)
//                   A bf16 cache on AMX has an arithmetic of its own: see kernels/attention_tiles.h.
//   indexers        a score of a position: that of attention for each head, then a chain of fma over the heads (IndexRows), also on
//                   AMX. Attention to chosen positions is that to a context which consists of them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>

namespace bifolio {

// The formats that kernels multiply by. The formats of files (blocks.h) become one of these when they are packed.
//   Q4_T            nibbles that number one of sixteen signed bytes, the matrix's table
//   Q6_0, Q6_1      six bits, signed; Q6_1 has minima, and its codes are at most 31
//   ..._16          a scale (and a minimum) for each 16 values instead of 32
//   Q4_K            like Q4_1; the scales of eight blocks are bytes times one half float, and so are their minima
//   from Q2_K on    the bits of the file in another order: see kernels/compact.h. A scale is a small whole number (and a half or a quarter)
//                   times the half float of the file, exact in float32
enum class Format : int32_t { F32 = 0, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_T, Q4_T_16, Q6_0, Q6_1, Q6_0_16, Q4_K,
                              Q2_K, Q3_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M };
#if defined(__x86_64__) || defined(_M_X64)
#define BIFOLIO_PACKS_Q4_K  // elsewhere blocks of Q4_K are packed as Q4_1: unpacking takes longer than reading
#endif
enum class KvType : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3 };
enum class Activation : int32_t { Silu = 0, GeluTanh = 1, Gelu = 2, Relu2 = 3, SwigluClamped = 4, Tanh = 5, Relu = 6, Sigmoid = 7, SiluClamped = 8 };  // both clamped ones only gated, Tanh and Sigmoid never
constexpr float kSwigluLimit = 7.0f, kSwigluSlope = 1.702f, kSiluLimit = 10.0f;

constexpr int64_t kPanel = 16;      // output columns that lie side by side in a packed matrix
constexpr int64_t kQuantBlock = 32; // values of a row that share a scale in a quantised format
constexpr int64_t kMinimaBlocks = 32;  // blocks whose minima are added together, after their sums
constexpr int64_t kRowGroup = 4;    // rows whose activation scales lie side by side
constexpr int64_t kTileRows = 16;   // rows of activations in a tile of an instruction set that has tiles
constexpr float kWidening = 1.0028177f;  // 1 + 2^-8 / (2 ln 2): the mean loss when the lower half of a float is cut off
constexpr int64_t kTile = 32;       // context positions of one step of the online softmax
constexpr int64_t kSpan = 256;      // context positions reduced on their own before spans are merged
constexpr int64_t kMaxRows = 128;   // query rows of one attention unit
constexpr int64_t kRowBlock = 128;  // rows of activations worked on together in a product, about

// Rows of floats in blocks, which are cut into tiles of about the same height: a low one would wait for its own sums.
constexpr int64_t kFloatTileRows = 14;
constexpr int64_t kFloatBlock = 10 * kFloatTileRows;
constexpr int64_t parts_of(int64_t rows, int64_t most) { return (rows + most - 1) / most; }
constexpr int64_t part_begin(int64_t rows, int64_t most, int64_t part) { return rows * part / parts_of(rows, most); }

// A matrix [n, k] cut into panels of 16 output columns, the last one padded with zeros. Inside a panel:
//   F32, F16   [k][16]
//   BF16       [k / 2][16][2]: two consecutive k side by side, k padded with zeros to a multiple of 32
//   all others  pairs of blocks, so that a product reads one stream and everything in it is aligned:
//                      |scales [2][16] f16|minima [2][16] f16, if any|quants of the first block|quants of the second|
//               with a scale for each 16 values, there are two rows of scales (and of minima) for a block;
//               of Q4_K groups of eight blocks: |factor of scales [16] f16|factor of minima [16] f16|scales [8][16]|minima [8][16]|quants|
//               of the formats from Q2_K on groups of eight blocks too, as kernels/compact.h has them
//               quants of 8 bits: [8][16][4] int8; of 4 bits: [4][16][4] bytes, low nibble element e, high nibble
//               element e + 16 of the block; Q4_0 holds q - 8 as a signed nibble; of 6 bits: [2][3][16][4] bytes for
//               each half of the block, with the elements 0 to 11 in the low six bits, and two bits each of the elements
//               12 to 15 in the high bits, the lowest two in the first of the three
struct PackedMatrix {
  Format format;
  int64_t n, k;
  int64_t num_panels;
  size_t panel_bytes;
  const uint8_t* data;   // 64-byte aligned
  int64_t gap_panel = INT64_MAX;  // panels from this one on lie `gap` bytes further on
  size_t gap = 0;
  const int8_t* table = nullptr;  // the sixteen values of a nibble, 16-byte aligned (Q4_T, Q4_T_16), or the rows of a grid (IQ1, IQ2, IQ3)

  const uint8_t* panel(int64_t index) const { return data + size_t(index) * panel_bytes + (index >= gap_panel ? gap : 0); }

  // Panels [begin, begin + count), all of whole columns.
  PackedMatrix some(int64_t begin, int64_t count) const {
    return {format, count * kPanel, k, count, panel_bytes, panel(begin), INT64_MAX, 0, table};
  }

  // Panels [begin, begin + count) beside as many from `other` on.
  PackedMatrix side_by_side(int64_t begin, int64_t other, int64_t count) const {
    const size_t between = size_t(other - begin - count) * panel_bytes;
    return {format, 2 * count * kPanel, k, 2 * count, panel_bytes, panel(begin), count, between, table};
  }
};

// How the weights of a block are written.
struct Coding {
  int bits;        // of a quant
  bool is_signed;  // of its own: not by a table
  bool table, minima;
  int scales;      // of a block: 1, or 2 where each 16 values have one
  bool raised = false;  // each quant in a byte of its own, where those with a sign are raised to be 0 or more
  bool compact = false;  // the bits of the file, which become bytes of their own

  // Six bits become bytes that are four times too large; the scale corrects it.
  constexpr float unit() const { return bits == 6 && !raised ? 0.25f : 1.0f; }
  // The same with quants that have become bytes.
  constexpr Coding unpacked() const { return {8, is_signed || table, false, minima, scales}; }
  // Two and three bits are raised as four are, by 8.
  constexpr Coding unpacked_raised() const {
    return bits == 8 || table ? unpacked() : Coding{bits == 6 ? 6 : 4, is_signed, false, minima, scales, true};
  }
};

constexpr Coding coding(Format format) {
  switch (format) {
    case Format::Q4_0: return {4, true, false, false, 1};
    case Format::Q4_1:
    case Format::Q4_K: return {4, false, false, true, 1};
    case Format::Q4_T: return {4, false, true, false, 1};
    case Format::Q4_T_16: return {4, false, true, false, 2};
    case Format::Q6_0: return {6, true, false, false, 1};
    case Format::Q6_1: return {6, true, false, true, 1};
    case Format::Q6_0_16: return {6, true, false, false, 2};
    case Format::Q2_K: return {2, false, false, true, 2, false, true};
    case Format::Q3_K: return {3, true, false, false, 2, false, true};
    case Format::IQ2_XS:
    case Format::IQ2_S:
    case Format::IQ1_M: return {8, true, false, false, 2, false, true};
    case Format::IQ2_XXS:
    case Format::IQ3_XXS:
    case Format::IQ3_S:
    case Format::IQ1_S: return {8, true, false, false, 1, false, true};
    default: return {8, true, false, false, 1};
  }
}

constexpr int64_t quant_bytes(Format format) {  // of a block
  switch (format) {
    case Format::IQ1_S:
    case Format::IQ1_M: return 64;
    case Format::Q2_K:
    case Format::IQ2_XXS:
    case Format::IQ2_XS:
    case Format::IQ2_S: return 128;
    case Format::Q3_K:
    case Format::IQ3_XXS:
    case Format::IQ3_S: return 192;
    default: return kQuantBlock * kPanel * coding(format).bits / 8;
  }
}
constexpr int64_t group_blocks(Format format) { return format >= Format::Q4_K ? 8 : 2; }  // that share a header
constexpr int64_t header_bytes(Format format) {  // a multiple of 64
  switch (format) {
    case Format::Q4_K:
    case Format::Q2_K:
    case Format::IQ2_S:
    case Format::IQ1_S: return 320;
    case Format::Q3_K:
    case Format::IQ3_S: return 256;
    case Format::IQ2_XXS:
    case Format::IQ3_XXS: return 64;
    case Format::IQ2_XS: return 192;
    case Format::IQ1_M: return 384;
    default: return (coding(format).minima ? 128 : 64) * coding(format).scales;
  }
}
constexpr int64_t group_bytes(Format format) { return header_bytes(format) + group_blocks(format) * quant_bytes(format); }
// Bytes of so many blocks of a panel from its beginning, or from that of a group, on.
constexpr int64_t blocks_bytes(Format format, int64_t blocks) {
  return (blocks + group_blocks(format) - 1) / group_blocks(format) * group_bytes(format);
}

// Rows of activations, as they are and (for block formats) quantised.
struct Activations {
  const float* x;      // [rows][x_stride]
  int64_t x_stride;
  int64_t rows, k;
  const int8_t* q;     // [rows][k]
  const float* scale;  // [rows / 4][k / 32][4]  rows interleaved by 4
  const float* sum;    // the same: scale * (sum of the block's q)
  const int32_t* isum; // the same: sum of the block's q
  const int32_t* half_isum;  // [rows][k / 16]  sums of 16 q
  const float* half_sum;     // [rows / 4][k / 16][4]  scale * half_isum
  // For instruction sets with tiles: x as bfloat16, 32 numbers of sixteen rows (or of all, if there are fewer) together, in the
  // order of KParts; rows and k are padded with zeros.
  const uint16_t* bf16;  // [pieces][16][32]
  const float* packed = nullptr;  // the block of x in tiles, as kernels().pack_rows writes them; null: x is read
};

struct NormWeights {
  const float* weight;
  const float* bias;  // may be null
  int64_t size;
  float eps;
  bool centered;
};

// The K/V arrays of one layer: [num_blocks][num_kv_heads][block_size][row]. A row is head_dim numbers, for Q8_0 head_dim
// int8 followed by head_dim / 32 f16 scales.
struct KvLayer {
  KvType type;
  uint8_t* keys;
  uint8_t* values;
  int64_t block_size, num_kv_heads, head_dim;
  size_t row_bytes;
};

// Query rows against a part of a context, and the softmax state that each has reached.
struct AttentionRows {
  int64_t count;
  const float* query;    // [count][head_dim], scaled
  const int64_t* begin;  // [count] first visible position
  const int64_t* end;    // [count] one past the last visible position
  float* maximum;        // [count]
  float* total;          // [count]
  float* mixed;          // [count][padded head_dim]
  float softcap = 0.0f;  // scores become softcap * tanh(score / softcap); 0: off
  const float* slopes = nullptr;  // [count] scores grow by slope * (position - position of the query); null: they do not
  const float* const* bias = nullptr;  // [count] of distance 0, in a table from -reach to reach that is added to scores; null: none
  const int64_t* position = nullptr;   // [count] from which distances are counted
  int64_t reach = 0;                   // larger distances have the bias of this one
  const int32_t* chosen = nullptr;     // the positions of the context that are those of the rows, in order; null: all, from 0 on

  void clear(int64_t padded) const {
    for (int64_t r = 0; r < count; ++r) maximum[r] = -INFINITY, total[r] = 0.0f;
    std::memset(mixed, 0, size_t(count * padded) * sizeof(float));
  }
};

// Queries of one sequence with all heads of an indexer, whose keys have one head:
//   scores[position] = sum over heads of weights[head] * max(0, query[head] . key[position]), by fma, heads ascending
// The product is computed like a score of attention, on every instruction set from floats or bytes.
struct IndexRows {
  int64_t count, heads;  // count * heads is at most kMaxRows
  const float* query;    // [count][heads][head_dim], scaled
  const float* weights;  // [count][heads]
  float* scores;         // [count][stride]; of the last tile also behind the last position
  int64_t stride;
};

// Some channels of one token of a causal convolution: out = silu(y) or gate * y, where y = bias + sum of input * weight, the oldest
// tap first. Inputs of null are 0; an input may have a factor of the same length.
constexpr int64_t kMaxTaps = 16;
struct ConvolutionRow {
  int64_t width, size;
  const float* inputs[kMaxTaps];
  const float* factors[kMaxTaps];  // null: 1
  const float* weight;             // [width][stride]
  int64_t stride;
  const float* bias;  // may be null
  const float* gate;  // null: silu
  float* out;
};

// The tokens of one sequence for some columns of a head's state S, [key_size][value_size]. For each token:
//   delta   change = rate * (value - decay * (key^T S))       else   change = rate * value
//   S = fma(key, change, decay * S);   out = query^T S, rows of S ascending
constexpr int64_t kStateColumns = 32;  // of one unit of work
struct HeadScan {
  bool delta, keyed;
  int64_t tokens, key_size, value_size;
  const float *keys, *queries, *values;  // of the first token; `stride` apart
  int64_t stride;
  const float *decays, *rates;  // of the first token; `gate_stride` apart; keyed: a decay for each row of S
  int64_t gate_stride;
  float* states;          // of the head, `state_stride` apart; null: none is read or written
  int64_t state_stride;
  int32_t read;           // the state before the first token; 0: empty
  const int32_t* writes;  // [tokens]  where the state is kept after a token; 0 and below: nowhere
  int64_t column, columns;
  float* out;  // column 0 of the head
  int64_t out_stride;
  float* tile;  // [key_size][kStateColumns]
  const float* ahead = nullptr;  // the columns of a state that the next unit of work reads: prefetched. Null: none
};

// The tokens of one sequence for a head of RWKV-7 with a state S, [key_size][value_size]. Rows hold its vectors at these places. For
// each token, with the removed key of length 1 and the decays of `kernels/operands.py` (Recurrence):
//   S = fma(added, value, fma(-rate * removed, removed^T S, decay * S));   out = (norm(query^T S) + bonus * value) * gate
constexpr float kSlowest = -0.60653066f, kLeastLength = 1e-12f;  // the logarithm of the largest decay: -1 / sqrt(e)
struct RwkvHead {
  int64_t tokens, key_size, value_size;
  const float* row;  // of the first token; `stride` apart
  int64_t stride;
  int64_t query, decay, key, value, rate, gate, amount, first;
  bool mixes;               // values with those of the first layer
  const float* factors[3];  // of the removed key, of the added one, and of the bonus
  NormWeights norm;         // no weights: none
  float* states;            // as in HeadScan
  int64_t state_stride;
  int32_t read;
  const int32_t* writes;
  float* out;
  int64_t out_stride;
  float* scratch;  // of a state, and of four keys and two values in whole lanes
};

struct Codes;
struct Column;
using DecodeBlock = void (*)(const uint8_t* block, Codes& out);

struct KernelTable {
  const char* name;
  int (*score)();          // 0: this machine cannot run it
  bool has_tiles;          // products with BF16 and block weights take activations as bfloat16, in tiles

  void (*norm_row)(const float* x, const NormWeights& norm, float* y);
  void (*add_row)(const float* x, const float* y, int64_t size, float* out);
  void (*act_row)(const float* x, int64_t size, Activation activation, float* out);
  void (*act_mul_row)(const float* gate, const float* up, int64_t size, Activation activation, float* out);
  void (*gate_row)(const float* logits, const float* x, int64_t size, float* out);  // sigmoid(logits) * x
  void (*softcap_row)(float* x, int64_t size, float cap);

  // floor(exp((x - highest) * warmth) * 2^40), the same bits on every machine; highest is the largest of x.
  void (*weights_row)(const float* x, int64_t size, float highest, float warmth, int64_t* out);

  // Convert some numbers of a row in blocks of 32: quantised, with scales kRowGroup apart; or as bfloat16, with blocks
  // `step` apart and zeros up to the end of the last block.
  void (*quantize_row)(const float* x, int64_t k, int8_t* q, float* scale, float* sum, int32_t* isum);
  void (*round_row)(const float* x, int64_t k, uint16_t* words, int64_t step);

  // Columns of panels [begin, end) of y = x W^T + bias for all rows. scratch: matmul_scratch_bytes(), 64-byte aligned.
  void (*matmul)(const PackedMatrix& matrix, const Activations& x, const float* bias, float* y, int64_t y_stride,
                 int64_t panel_begin, int64_t panel_end, uint8_t* scratch);

  // Store one key or value row of a token in the format of the cache.
  void (*store_kv_row)(const float* x, int64_t size, KvType type, void* out);

  // Advance the softmax state of the rows over the positions [begin, end) of a span; begin is the start of a tile.
  void (*attend_part)(const KvLayer& kv, int64_t kv_head, const int32_t* block_table, int64_t begin, int64_t end,
                      const AttentionRows& rows, uint8_t* scratch);

  // Multiply in registers alone, bytes or the type that suits 16-bit weights best; returns the number of operations.
  int64_t (*peak_loop)(bool bytes);

  // Recurrent layers: a convolution; x / sqrt(sum of squares + eps) * scale; the gates of a token's heads; a scan.
  void (*convolve_row)(const ConvolutionRow& row);
  void (*unit_row)(float* x, int64_t size, float eps, float scale);
  // steps = softplus(x + bias) clipped to [least, most]; decays = exp(steps * decay), which may replace the steps
  void (*decay_row)(const float* x, const float* bias, const float* decay, int64_t size, float least, float most, float* steps,
                    float* decays);
  // decays = exp(-bound * sigmoid(-decay * (x + bias)))
  void (*bounded_decay_row)(const float* x, const float* bias, const float* decay, int64_t size, float bound, float* decays);
  void (*sigmoid_row)(const float* x, int64_t size, float* out);
  void (*exp_row)(const float* x, const float* factor, int64_t size, float* out);  // e^(x * factor)
  void (*scan_columns)(const HeadScan& scan);
  // x + factors * (before - x); before: null: 0
  void (*mix_row)(const float* x, const float* before, const float* factors, int64_t size, float* out);
  void (*rwkv_head)(const RwkvHead& head);

  // Add the state (m, l, a) of a later span to (M, L, A).
  void (*merge_span)(float* M, float* L, float* A, float m, float l, const float* a, int64_t size);

  // Scores of the positions [begin, end); begin is the start of a tile.
  void (*score_index)(const KvLayer& kv, const int32_t* block_table, int64_t begin, int64_t end, const IndexRows& rows, uint8_t* scratch);

  // Copy some columns of a tile of at most kFloatTileRows rows: out[column][row]. Null: products read rows of floats as they are.
  void (*pack_rows)(const float* x, int64_t x_stride, int64_t rows, int64_t columns, float* out);

  const DecodeBlock* decoders;  // by the format of a file (`blocks.h`); null for dense formats
  // Up to sixteen rows of blocks as columns of a panel; false: a scale is no half float.
  bool (*pack_blocks)(const PackedMatrix& matrix, const Column* columns, int64_t count, uint8_t* panel);
};

size_t matmul_scratch_bytes();
size_t attention_scratch_bytes(int64_t head_dim);

// How k is cut for products on tiles, in steps of 32 numbers: into parts whose rows stay in a near cache, of about
// the same size, since each part reads and writes all sums. Blocks of weights come in pairs: parts begin at even steps.
struct KParts {
  static constexpr int64_t kMost = 32;  // steps of a part
  int64_t steps, count;

  explicit KParts(int64_t steps) : steps(steps), count((steps + kMost - 1) / kMost) {}
  KParts(int64_t steps, int64_t count) : steps(steps), count(count) {}

  int64_t begin(int64_t part) const { return part == count ? steps : (steps + 1) / 2 * part / count * 2; }
  int64_t size(int64_t part) const { return begin(part + 1) - begin(part); }

  // The piece of a matrix of `tiles` row tiles that holds the first step of a part. The steps of a tile lie one after the
  // other, followed by those of the next tile: a part is contiguous in memory.
  int64_t place(int64_t part, int64_t tile, int64_t tiles) const { return begin(part) * tiles + tile * size(part); }
};

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

extern const KernelTable kGenericKernels;
#ifdef BIFOLIO_SOFTWARE_TILES
extern const KernelTable kTileKernels;  // for tests
#endif
#if defined(__aarch64__)
extern const KernelTable kNeonKernels;
#elif defined(__x86_64__)
extern const KernelTable kAvx2Kernels, kAvx512Kernels, kAmxKernels;
#endif

}  // namespace bifolio
