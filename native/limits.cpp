#include "limits.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>

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
double best_seconds(Pool& pool, int repeats, Work work) {
  double best = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const double begin = now();
    pool.run(work);
    best = std::min(best, now() - begin);
  }
  return best;
}

}  // namespace

double read_bandwidth(Pool& pool, size_t bytes) {
  constexpr int64_t kPiece = int64_t(1) << 17;  // words, 1 MiB
  const HugeBuffer buffer(bytes);
  std::memset(buffer.data(), 1, bytes);
  const auto* words = reinterpret_cast<const uint64_t*>(buffer.data());
  std::atomic<uint64_t> sink{0};
  const double seconds = best_seconds(pool, 7, [&](Member& m) {
    m.split(int64_t(bytes / 8), kPiece, [&](int64_t begin, int64_t end) {
      uint64_t sum = 0;
      for (int64_t i = begin; i < end; ++i) sum ^= words[i];
      sink.fetch_xor(sum, std::memory_order_relaxed);
    });
  });
  return double(bytes) / seconds;
}

double product_rate(Pool& pool, bool bytes) {
  constexpr int64_t kPieces = 8;  // of each thread, so that one that starts late takes fewer
  std::atomic<int64_t> operations{0};
  int repeats = 0;
  const double seconds = best_seconds(pool, 5, [&](Member& m) {
    ++repeats;
    m.split(kPieces * m.size, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) operations.fetch_add(kernels().peak_loop(bytes), std::memory_order_relaxed);
    });
  });
  return double(operations) / repeats / seconds;
}

}  // namespace bifolio
