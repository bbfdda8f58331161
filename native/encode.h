// Floats to blocks of GGML's formats, by search for the scales with the least weighted error.
#pragma once

#include "blocks.h"

namespace bifolio {

bool can_encode(FileFormat format);

// A row of k values. `importance` weighs the errors of its columns, or is null: then large values count more.
void encode_row(FileFormat format, const float* x, const float* importance, int64_t k, uint8_t* out);

}  // namespace bifolio
