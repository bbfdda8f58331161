// Comparisons of the self-test, shared by its files.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "isa.h"

namespace bifolio::selftest {

inline std::mt19937 rng(1);
inline int failures = 0;

inline std::vector<float> normal(size_t count, float scale = 1.0f) {
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(rng);
  return values;
}

struct Comparison {
  double difference = 0;  // relative to the largest
  bool equal = true;
};

inline Comparison compare(const std::vector<float>& a, const std::vector<float>& b) {
  Comparison result;
  double largest = 1e-30;
  for (float value : b) largest = std::max(largest, double(std::fabs(value)));
  for (size_t i = 0; i < a.size(); ++i) {
    result.equal = result.equal && std::memcmp(&a[i], &b[i], 4) == 0;
    const double error = std::fabs(double(a[i]) - double(b[i])) / largest;
    result.difference = std::isnan(error) ? 1e30 : std::max(result.difference, error);
  }
  return result;
}

inline void report(const std::string& what, const std::string& isa, const Comparison& found, double tolerance, bool exact) {
  const bool good = exact ? found.equal : found.difference <= tolerance;
  failures += !good;
  if (!good) std::printf("FAILED %-34s %-8s differs by %.2e%s\n", what.c_str(), isa.c_str(), found.difference, exact ? " (must be equal)" : "");
}

// The result of each instruction set against that of plain C++; of tiles within a tolerance, where that is not 0.
template <class Work>
void check(const std::string& what, double tolerance_of_tiles, Work work) {
  set_isa("generic");
  const std::vector<float> expected = work();
  set_isa("tiles");
  const std::vector<float> on_tiles = work();
  report(what, "tiles", compare(on_tiles, expected), tolerance_of_tiles, tolerance_of_tiles == 0);
  for (const std::string& isa : available_isas()) {
    if (isa == "generic" || isa == "tiles") continue;
    set_isa(isa);
    report(what, isa, compare(work(), isa == "amx" ? on_tiles : expected), 0, true);
  }
  set_isa("");
}

// Attention of every cache type, NaN in queries, and the plans of both phases (selftest_attention.cpp).
void check_attention();

}  // namespace bifolio::selftest
