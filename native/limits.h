// Limits of the machine, measured: the bandwidth of memory, and the rate of products in registers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bifolio {

double read_bandwidth(size_t bytes);   // bytes per second, all threads reading their share
double product_rate(bool bytes);       // operations per second (a product and a sum are two), all threads

}  // namespace bifolio
