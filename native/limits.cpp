#include "limits.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
#include "matrix.h"
#include "pool.h"

namespace bifolio {
namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

template <class Work>
double best_seconds(int repeats, Work work) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double begin = now();
    Pool::instance().run(work);
    best = std::min(best, now() - begin);
  }
  return best;
}

}  // namespace

double read_bandwidth(size_t bytes) {
  const HugeBuffer buffer(bytes);
  std::memset(buffer.data(), 1, bytes);
  const auto* words = reinterpret_cast<const uint64_t*>(buffer.data());
  std::vector<uint64_t> sinks(size_t(Pool::kMaxThreads) * 8);  // the number of threads may change before they run
  const double seconds = best_seconds(7, [&](Member& m) {
    const size_t count = bytes / 8 / size_t(m.size), begin = count * size_t(m.rank);
    uint64_t sum = 0;
    for (size_t i = begin; i < begin + count; ++i) sum ^= words[i];
    sinks[size_t(m.rank) * 8] = sum;
  });
  return double(bytes) / seconds;
}

double product_rate(bool bytes) {
  std::vector<int64_t> operations(size_t(Pool::kMaxThreads) * 8);
  const double seconds = best_seconds(5, [&](Member& m) { operations[size_t(m.rank) * 8] = kernels().peak_loop(bytes); });
  double total = 0;
  for (int64_t count : operations) total += double(count);
  return total / seconds;
}

}  // namespace bifolio
