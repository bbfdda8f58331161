// x86 with AVX-512 and the AMX tiles: bytes and bfloat16.
//
// Products with BF16 weights run on tiles for any number of rows, so that a row does not depend on the others. Their
// arithmetic is the tiles': activations are rounded to bfloat16; for 32 values of k, sixteen pairs of products are
// accumulated in float32 in two sums, even and odd k, which are added to the result. Everything else gives the same bits
// as the other instruction sets: sums of bytes are exact.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <initializer_list>

#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/avx512.h"

#define BIFOLIO_FLOAT_ROWS 12
#define BIFOLIO_INT_ROWS 8
#include "kernels/elementwise.h"
#include "kernels/matmul_float.h"
#include "kernels/vnni.h"

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t row_count, int64_t bytes) {
    rows[tile] = uint8_t(row_count);
    row_bytes[tile] = uint16_t(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

// The compiler does not know that tile instructions read memory: what was written before must be there.
static inline void finish_writes() { asm volatile("" ::: "memory"); }

static void configure(const TileConfig& config) {
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// ---- bytes: tiles 0-3 are sums of 16 rows and 16 columns, 4 and 5 rows, 6 and 7 weights ---------------------------

static void configure_bytes() {
  TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, 16, 64);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, 16, kBlock);
  for (int tile = 6; tile < 8; ++tile) config.set(tile, kBlock / 4, 64);
  configure(config);
}

#define BIFOLIO_OWN_INT_16
struct UnpackedPanel;
struct IntRows;
template <bool Min>
static void accumulate_int_16(const UnpackedPanel& w, const IntRows& x, int64_t blocks, float* sums, bool first);

#include "kernels/matmul_int.h"

// The sums of up to four blocks, [block][16 rows][16 columns].
static inline void tile_dots(const UnpackedPanel& w, int64_t b, const int8_t* q, int64_t stride, int64_t count, int32_t* out) {
  finish_writes();
#define BLOCK(I, ROWS, WEIGHTS)                              \
  if (count > I) {                                           \
    _tile_zero(I);                                           \
    _tile_loadd(ROWS, q + I * kBlock, stride);               \
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
template <bool Min>
static void accumulate_int_16(const UnpackedPanel& w, const IntRows& x, int64_t blocks, float* sums, bool first) {
  alignas(64) int32_t dots[2][4 * 256];
  V16 acc[16];
  for (int r = 0; r < 16; ++r) acc[r] = first ? zero() : load(sums + r * kPanel);
  const auto start = [&](int64_t b) {
    if (b < blocks) tile_dots(w, b, x.q + b * kBlock, x.stride, blocks - b, dots[b / 4 % 2]);
  };
  start(0);
  for (int64_t b = 0; b < blocks; b += 4) {
    start(b + 4);
    for (int64_t i = 0; i < 4 && b + i < blocks; ++i) {
      const int32_t* found = dots[b / 4 % 2] + i * 256;
      const V16 scale = load(w.scales(b + i));
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        const int64_t at = r / 4 * x.group + (b + i) * kRowGroup + r % 4;
        const V16 total = {{_mm512_cvtepi32_ps(_mm512_load_si512(found + r * 16))}};
        acc[r] = fma(total, mul(scale, broadcast(x.scale[at])), acc[r]);
        if constexpr (Min) acc[r] = fma(load(w.minima(b + i)), broadcast(x.sum[at]), acc[r]);
      }
    }
  }
  for (int r = 0; r < 16; ++r) store(sums + r * kPanel, acc[r]);
}

// ---- bfloat16: tiles 0-3 are 2 x 2 results, 4 and 5 rows, 6 and 7 weights -----------------------------------------

static void configure_words(int64_t upper_rows, int64_t lower_rows) {
  TileConfig config;
  const int64_t lower = lower_rows ? lower_rows : 1;
  for (int tile : {0, 1, 4}) config.set(tile, upper_rows, 64);
  for (int tile : {2, 3, 5}) config.set(tile, lower, 64);
  for (int tile : {6, 7}) config.set(tile, 16, 64);
  configure(config);
}

// Up to 32 rows against one or two panels; out: [2][2][16][16], first by panel, then by upper and lower rows.
template <bool Lower, bool Right>
static inline void multiply_words(const uint16_t* x, int64_t padded, const uint8_t* left, const uint8_t* right, float* out) {
  finish_writes();
  _tile_zero(0);
  if constexpr (Right) _tile_zero(1);
  if constexpr (Lower) _tile_zero(2);
  if constexpr (Lower && Right) _tile_zero(3);
  for (int64_t k = 0; k < padded; k += 32) {
    _tile_loadd(4, x + k, padded * 2);
    if constexpr (Lower) _tile_loadd(5, x + 16 * padded + k, padded * 2);
    _tile_loadd(6, left + k * kPanel * 2, 64);
    if constexpr (Right) _tile_loadd(7, right + k * kPanel * 2, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Right) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Lower) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Lower && Right) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 64);
  if constexpr (Right) _tile_stored(1, out + 512, 64);
  if constexpr (Lower) _tile_stored(2, out + 256, 64);
  if constexpr (Lower && Right) _tile_stored(3, out + 768, 64);
}

static void matmul_words(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end) {
  alignas(64) float results[4 * 256];
  const int64_t padded = round_up(m.k, 32);
  for (int64_t row = 0; row < x.rows; row += 32) {
    const int64_t rows = x.rows - row < 32 ? x.rows - row : 32;
    const int64_t upper = rows < 16 ? rows : 16, lower = rows - upper;
    configure_words(upper, lower);
    const uint16_t* source = x.bf16 + row * padded;
    for (int64_t p = begin; p < end; p += 2) {
      const uint8_t *left = m.panel(p), *right = p + 1 < end ? m.panel(p + 1) : nullptr;
      if (lower && right) multiply_words<true, true>(source, padded, left, right, results);
      else if (lower) multiply_words<true, false>(source, padded, left, right, results);
      else if (right) multiply_words<false, true>(source, padded, left, right, results);
      else multiply_words<false, false>(source, padded, left, right, results);
      for (int64_t panel = 0; panel < (right ? 2 : 1); ++panel)
        for (int64_t r = 0; r < rows; ++r)
          finish_columns(load(results + panel * 512 + r * kPanel), m, (p + panel) * kPanel, bias, y + (row + r) * y_stride);
    }
  }
}

static void matmul_tiles(const PackedMatrix& m, const Activations& x, const float* bias, float* y, int64_t y_stride,
                         int64_t begin, int64_t end, uint8_t* scratch) {
  const bool words = m.format == Format::BF16, bytes = m.format >= Format::Q8_0 && x.rows >= 16;
  if (!words && !bytes) return matmul(m, x, bias, y, y_stride, begin, end, scratch);
  if (words) {
    matmul_words(m, x, bias, y, y_stride, begin, end);
  } else {
    configure_bytes();
    matmul(m, x, bias, y, y_stride, begin, end, scratch);
  }
  _tile_release();  // a thread that holds tiles costs more to switch
}

#include "kernels/x86_attention.h"

int64_t peak_loop(bool bytes) {
  constexpr int64_t rounds = 1 << 17;
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  configure(config);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
  for (int64_t i = 0; i < rounds; ++i) {
    if (bytes) {
      _tile_dpbssd(0, 4, 6); _tile_dpbssd(1, 4, 7); _tile_dpbssd(2, 5, 6); _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_release();
  return rounds * 4 * 16 * 16 * (bytes ? 128 : 64);
}

// The system must be asked before tiles may be used; the answer holds for the whole process.
bool tiles_allowed() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

int score() {
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!avx512 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, int8 = 1u << 25;
  if ((d & bf16) == 0 || (d & tile) == 0 || (d & int8) == 0) return 0;
  static const bool allowed = tiles_allowed();
  return allowed ? 30 : 0;
}

}  // namespace

#include "kernels/table.h"
const KernelTable kAmxKernels = BIFOLIO_KERNEL_TABLE("amx", true, matmul_tiles);

}  // namespace bifolio
