// Pools beside each other under the thread sanitizer (scripts/sanitize): results are exact, and no memory is shared.
#include <cstdio>
#include <numeric>

#include "pool.h"

namespace bifolio {
namespace {

int64_t work(Pool& pool, int rounds) {
  int64_t total = 0;
  std::vector<int64_t> numbers(5000);
  for (int round = 0; round < rounds; ++round)
    pool.run([&](Member& m) {
      m.split(5000, 7, [&](int64_t begin, int64_t end) {
        m.scratch().bytes(64)[0] = 1;
        for (int64_t i = begin; i < end; ++i) numbers[size_t(i)] = i + round;
      });
      m.split(5000, 100, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) numbers[size_t(i)] *= 2;
      });
      total += std::accumulate(numbers.begin(), numbers.end(), int64_t(0));
    });
  return total;
}

int compare(int rounds) {
  Pool alone(1);
  const int64_t expected = work(alone, rounds);
  Pool two(2), three(3);
  int64_t results[3] = {};
  std::thread first([&] { results[0] = work(two, rounds); });
  std::thread second([&] { results[1] = work(three, rounds); });
  std::thread third([&] { results[2] = work(three, rounds); });  // shares a pool: one of both waits
  std::thread settings([&] {
    for (int i = 0; i < 20; ++i) two.set_num_threads(1 + i % 4), Pool::run_alone([] {});
  });
  first.join(), second.join(), third.join(), settings.join();
  int wrong = 0;
  for (int64_t result : results) wrong += result != expected;
  return wrong;
}

}  // namespace
}  // namespace bifolio

int main() {
  int wrong = 0;
  for (int i = 0; i < 5; ++i) wrong += bifolio::compare(300);
  std::printf(wrong ? "%d sums are wrong\n" : "all sums are right\n", wrong);
  return wrong != 0;
}
