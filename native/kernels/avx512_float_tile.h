// Products of floats in tiles of up to fourteen rows and two panels in 512-bit registers: each weight is loaded once for all rows,
// and each number of x once for both panels, so that two multiplications need about one load.
#pragma once

constexpr int64_t kFloatPanels = 2;
constexpr int64_t kFloatK = 128;      // both panels of so many k stay in the first cache level while all rows are multiplied
constexpr int64_t kPrefetchedK = 16;  // k values that a single tile prefetches

// A tile of x: numbers of one row are `k_step` apart.
struct FloatTile {
  const float* x;
  int64_t row_step, k_step;
};

// Sums of R rows to the result.
template <int R, int P>
static inline void write_tile(const __m512 acc[P][R], const FloatResult& result) {
  for (int p = 0; p < P; ++p) {
    const __m512 bias = result.bias ? _mm512_loadu_ps(result.bias + p * kPanel) : _mm512_setzero_ps();
    for (int r = 0; r < R; ++r) {
      const __m512 sum = result.bias ? _mm512_add_ps(acc[p][r], bias) : acc[p][r];
      _mm512_storeu_ps(result.y + r * result.stride + p * kPanel, sum);
    }
  }
}

// Seven rows need one pointer and the multiples of a step that an address can have.
template <int R, int P>
static void accumulate_tile(const FloatTile& tile, const float* const w[P], const float* const ahead[P], int64_t count, float* sums,
                            bool first, const FloatResult* result) {
  __m512 acc[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) acc[p][r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + (r * P + p) * kPanel);
  int64_t step = tile.row_step * int64_t(sizeof(float)), three = 3 * step, five = 5 * step;
  const float *upper = tile.x, *lower = R > 7 ? tile.x + 7 * tile.row_step : tile.x;
  const float *left = w[0], *right = w[P - 1], *next_left = ahead[0], *next_right = ahead[P - 1];
  asm volatile("" : "+r"(step), "+r"(three), "+r"(five), "+r"(upper), "+r"(lower));
  for (int64_t k = 0; k < count; ++k) {
    const __m512 first_column = _mm512_loadu_ps(left + k * kPanel), second_column = _mm512_loadu_ps(right + k * kPanel);
    _mm_prefetch(reinterpret_cast<const char*>(next_left + k * kPanel), _MM_HINT_T0);
    if (P > 1) _mm_prefetch(reinterpret_cast<const char*>(next_right + k * kPanel), _MM_HINT_T0);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const int i = r < 7 ? r : r - 7;
      const int64_t offset = i == 0 ? 0 : i == 1 ? step : i == 2 ? 2 * step : i == 3 ? three : i == 4 ? 4 * step : i == 5 ? five : 2 * three;
      const auto* number = reinterpret_cast<const float*>(reinterpret_cast<const char*>(r < 7 ? upper : lower) + offset);
      __m512 value = _mm512_set1_ps(*number);
      if (P > 1) asm("" : "+v"(value));  // one load for both panels
      acc[0][r] = _mm512_fmadd_ps(first_column, value, acc[0][r]);
      if constexpr (P > 1) acc[1][r] = _mm512_fmadd_ps(second_column, value, acc[1][r]);
    }
    upper += tile.k_step, lower += tile.k_step;
  }
  if (result) return write_tile<R, P>(acc, *result);
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + (r * P + p) * kPanel, acc[p][r]);
}

template <int P>
using AccumulateTile = void (*)(const FloatTile& tile, const float* const w[P], const float* const ahead[P], int64_t count, float* sums,
                                bool first, const FloatResult* result);

template <int P>
constexpr AccumulateTile<P> kAccumulateTile[kFloatTileRows] = {
    accumulate_tile<1, P>, accumulate_tile<2, P>, accumulate_tile<3, P>,  accumulate_tile<4, P>,  accumulate_tile<5, P>,
    accumulate_tile<6, P>, accumulate_tile<7, P>, accumulate_tile<8, P>,  accumulate_tile<9, P>,  accumulate_tile<10, P>,
    accumulate_tile<11, P>, accumulate_tile<12, P>, accumulate_tile<13, P>, accumulate_tile<14, P>};

// k values [begin, begin + count) of a block. The last of many tiles prefetches the weights at `ahead`, which are multiplied next; a
// single one those that it is about to read.
template <int P>
static inline void accumulate_block(const Activations& x, int64_t row_begin, int64_t rows, int64_t begin, int64_t count,
                                    const float* const w[P], const float* const ahead[P], float* sums, const FloatResult* result) {
  const int64_t tiles = parts_of(rows, kFloatTileRows);
  const float* soon[P];
  for (int p = 0; p < P; ++p) soon[p] = w[p] + kPrefetchedK * kPanel;
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t r = part_begin(rows, kFloatTileRows, tile), height = part_begin(rows, kFloatTileRows, tile + 1) - r;
    const FloatTile own = x.packed ? FloatTile{x.packed + r * x.k + begin * height, 1, height}
                                   : FloatTile{x.x + (row_begin + r) * x.x_stride + begin, x.x_stride, 1};
    const float* const* prefetched = tiles == 1 ? soon : tile == tiles - 1 ? ahead : w;
    const FloatResult target = result ? FloatResult{result->y + r * result->stride, result->stride, result->bias} : FloatResult{};
    kAccumulateTile<P>[height - 1](own, w, prefetched, count, sums + r * P * kPanel, begin == 0, result ? &target : nullptr);
  }
}

// Sixteen columns of sixteen rows, transposed in registers.
static inline void transpose_sixteen(__m512 a[16]) {
  __m512 b[16];
  for (int i = 0; i < 16; i += 2) b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44), a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44), a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {  // a[i + 4 g] has the columns i, i + 4, i + 8 and i + 12 of the rows 4 g to 4 g + 3
    const __m512 low = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), high = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
    const __m512 other_low = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88), other_high = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    b[i] = _mm512_shuffle_f32x4(low, other_low, 0x88), b[i + 8] = _mm512_shuffle_f32x4(low, other_low, 0xdd);
    b[i + 4] = _mm512_shuffle_f32x4(high, other_high, 0x88), b[i + 12] = _mm512_shuffle_f32x4(high, other_high, 0xdd);
  }
  for (int i = 0; i < 16; ++i) a[i] = b[i];
}

static void pack_rows(const float* x, int64_t x_stride, int64_t rows, int64_t columns, float* out) {
  const auto of_rows = __mmask16((1u << rows) - 1);
  for (int64_t column = 0; column < columns; column += 16) {
    const int64_t count = std::min<int64_t>(16, columns - column);
    const auto of_columns = __mmask16((1u << count) - 1);
    __m512 a[16];
    for (int64_t r = 0; r < 16; ++r)
      a[r] = r < rows ? _mm512_maskz_loadu_ps(of_columns, x + r * x_stride + column) : _mm512_setzero_ps();
    transpose_sixteen(a);
    for (int64_t i = 0; i < count; ++i) _mm512_mask_storeu_ps(out + (column + i) * rows, of_rows, a[i]);
  }
}
constexpr auto kPackRows = pack_rows;
