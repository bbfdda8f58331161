// The error of a caller that hands over arrays or numbers that the kernels cannot work on. Python sees it as
// bifolio.errors.KernelArgumentError.
#pragma once

#include <stdexcept>

namespace bifolio {

struct ArgumentError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace bifolio
