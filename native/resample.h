// Images in another size: a weighted sum of the pixels along each row, then along each column, with weights in integers.
#pragma once

#include <cstdint>

namespace bifolio {

// The weights along one edge. Output `i` is the sum of `count[i]` inputs from `first[i]` on, times weights[i * most ...],
// which are multiples of 2^-kWeightBits; the sum is rounded to the nearest byte.
struct Taps {
  int64_t inputs, outputs, most;
  const int32_t* first;
  const int32_t* count;
  const int32_t* weights;
};

constexpr int kWeightBits = 22;

// out u8[rows.outputs][columns.outputs][3] from pixels u8[rows.inputs][columns.inputs][3]. An edge without outputs (0) stays as
// it is. `between` has room for u8[rows.inputs][columns.outputs][3].
void resample(const uint8_t* pixels, const Taps& rows, const Taps& columns, uint8_t* between, uint8_t* out);

}  // namespace bifolio
