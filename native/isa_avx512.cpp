// x86 with AVX-512 (F, BW, VL, DQ) and VNNI.
#include <immintrin.h>

#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/avx512.h"

#define BIFOLIO_FLOAT_ROWS 12
#define BIFOLIO_INT_ROWS 8
#include "kernels/elementwise.h"
#include "kernels/matmul_float.h"
#include "kernels/vnni.h"
#include "kernels/matmul_int.h"
#include "kernels/x86_attention.h"

int score() {
  __builtin_cpu_init();
  const bool usable = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("f16c");
  return usable ? 20 : 0;
}

}  // namespace

#include "kernels/table.h"
const KernelTable kAvx512Kernels = BIFOLIO_KERNEL_TABLE("avx512", false, matmul);

}  // namespace bifolio
