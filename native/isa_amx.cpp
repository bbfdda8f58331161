// x86 with AVX-512 and the AMX tiles.
#include <immintrin.h>

#include "contracts.h"

namespace bifolio {
namespace {

#include "simd/avx512.h"

#include "kernels/elementwise.h"
#include "kernels/matmul_float.h"
#include "kernels/vnni.h"
#include "kernels/matmul_int.h"
#include "kernels/x86_attention.h"

int score() { return 0; }

}  // namespace

#include "kernels/table.h"
const KernelTable kAmxKernels = BIFOLIO_KERNEL_TABLE("amx");

}  // namespace bifolio
