// Tiles of up to fourteen rows and two panels in 512-bit registers: each weight is loaded once for all rows, and each number of x once
// for both panels, so that two multiplications need about one load.
#pragma once

constexpr int64_t kFloatPanels = 2;
constexpr int64_t kFloatTileRows = 14;

// Seven rows need one pointer and the multiples of a stride that an address can have.
template <int R, int P>
static void accumulate_rows(const float* x, int64_t x_stride, const float* const w[P], int64_t count, float* sums, bool first) {
  __m512 acc[P][R];
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) acc[p][r] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + (r * P + p) * kPanel);
  int64_t stride = x_stride * int64_t(sizeof(float)), three = 3 * stride, five = 5 * stride;
  const float *upper = x, *lower = R > 7 ? x + 7 * x_stride : x, *left = w[0], *right = w[P - 1];
  asm volatile("" : "+r"(stride), "+r"(three), "+r"(five), "+r"(upper), "+r"(lower));
  for (int64_t k = 0; k < count; ++k) {
    const __m512 first_column = _mm512_loadu_ps(left + k * kPanel), second_column = _mm512_loadu_ps(right + k * kPanel);
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const int i = r < 7 ? r : r - 7;
      const int64_t offset = i == 0 ? 0 : i == 1 ? stride : i == 2 ? 2 * stride : i == 3 ? three : i == 4 ? 4 * stride : i == 5 ? five : 2 * three;
      const auto* number = reinterpret_cast<const float*>(reinterpret_cast<const char*>(r < 7 ? upper : lower) + offset);
      __m512 value = _mm512_set1_ps(*number);
      if (P > 1) asm("" : "+v"(value));  // one load for both panels
      acc[0][r] = _mm512_fmadd_ps(first_column, value, acc[0][r]);
      if constexpr (P > 1) acc[1][r] = _mm512_fmadd_ps(second_column, value, acc[1][r]);
    }
    ++upper, ++lower;
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + (r * P + p) * kPanel, acc[p][r]);
}

template <int P>
using AccumulateRows = void (*)(const float* x, int64_t x_stride, const float* const w[P], int64_t count, float* sums, bool first);

template <int P>
constexpr AccumulateRows<P> kAccumulateRows[kFloatTileRows] = {
    accumulate_rows<1, P>, accumulate_rows<2, P>, accumulate_rows<3, P>,  accumulate_rows<4, P>,  accumulate_rows<5, P>,
    accumulate_rows<6, P>, accumulate_rows<7, P>, accumulate_rows<8, P>,  accumulate_rows<9, P>,  accumulate_rows<10, P>,
    accumulate_rows<11, P>, accumulate_rows<12, P>, accumulate_rows<13, P>, accumulate_rows<14, P>};

// Tiles of about the same height: a low one would wait for its own sums.
template <int P>
static inline void accumulate_block(const float* x, int64_t x_stride, const float* const w[P], int64_t count, int64_t rows, float* sums,
                                    bool first) {
  const int64_t tiles = (rows + kFloatTileRows - 1) / kFloatTileRows;
  for (int64_t tile = 0, r = 0; tile < tiles; ++tile) {
    const int64_t height = rows * (tile + 1) / tiles - r;
    kAccumulateRows<P>[height - 1](x + r * x_stride, x_stride, w, count, sums + r * P * kPanel, first);
    r += height;
  }
}
