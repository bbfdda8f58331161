// The instruction set in use: the one with the highest score, or the one chosen with set_isa.
#pragma once

#include <string>
#include <vector>

#include "contracts.h"

namespace bifolio {

const KernelTable& kernels();
std::vector<std::string> available_isas();  // best first
void set_isa(const std::string& name);      // "" chooses by score; ArgumentError lists those that can run

}  // namespace bifolio
