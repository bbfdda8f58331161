// Limits of the machine, measured: the bandwidth of memory, and the rate of products in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace bifolio {

double read_bandwidth(Pool& pool, size_t bytes);  // bytes per second, all threads reading their share
double product_rate(Pool& pool, bool bytes);      // operations per second (a product and a sum are two), all threads

}  // namespace bifolio
