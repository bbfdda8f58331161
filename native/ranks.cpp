#include "ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "platform.h"

namespace bifolio {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(50);  // polled before a rank sleeps
constexpr auto kNap = std::chrono::milliseconds(50);   // the longest sleep, after which the fault word is read again

bool reached(uint32_t seen, uint32_t value) { return int32_t(seen - value) >= 0; }  // the numbers may wrap around

}  // namespace

void RankMemory::set(int index, uint32_t value) {
  Word& target = word(index);
  target.value.store(value);
  if (target.sleepers.load()) platform::wake_sleepers(target.value);
}

bool RankMemory::await(int index, uint32_t value, double seconds, bool stop_at_fault) {
  Word& source = word(index);
  uint32_t seen = source.value.load(std::memory_order_acquire);
  if (reached(seen, value)) return true;
  const auto begin = Clock::now();
  for (int turn = 0;; ++turn) {
    seen = source.value.load(std::memory_order_acquire);
    if (reached(seen, value)) return true;
    if (turn % 64 != 63) continue;
    if (stop_at_fault && fault()) throw RankFault("another rank of this engine failed in the same pass");
    const auto waited = Clock::now() - begin;
    if (waited >= std::chrono::duration<double>(seconds)) return false;
    if (waited < kSpin) {
      std::this_thread::yield();
      continue;
    }
    source.sleepers.fetch_add(1);
    if (!reached(source.value.load(), value) && !(stop_at_fault && fault())) platform::sleep_on(source.value, seen, kNap);
    source.sleepers.fetch_sub(1);
  }
}

bool RankMemory::wait(int signal, uint32_t value, double seconds) { return await(signal_word(signal), value, seconds, false); }

void RankMemory::set_fault(uint32_t value) {
  set(0, value);
  for (int r = 0; value && r < size_; ++r) platform::wake_sleepers(word(1 + r).value);
}

void RankMemory::arrive_and_wait() {
  set(1 + rank_, ++count_);
  for (int r = 0; r < size_; ++r) await(1 + r, count_, 1e9, true);
}

void RankMemory::gather(Rows x, const std::vector<int64_t>& widths, Rows out) {
  const int64_t widest = *std::max_element(widths.begin(), widths.end());
  const int64_t piece = int64_t(kCapacity / sizeof(float)) / widest;  // rows of one exchange
  for (int64_t first = 0; first < x.count; first += piece) {
    const int64_t rows = std::min(piece, x.count - first);
    const auto copy = [&](float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t width) {
      for (int64_t row = 0; row < rows; ++row) std::memcpy(to + row * to_stride, from + row * from_stride, size_t(width) * sizeof(float));
    };
    copy(part(count_ + 1, rank_), widths[size_t(rank_)], x.row(first), x.stride, widths[size_t(rank_)]);
    arrive_and_wait();
    if (!out.data) continue;
    int64_t column = 0;
    for (int r = 0; r < size_; ++r) {
      const int64_t width = widths[size_t(r)];
      copy(out.row(first) + column, out.stride, part(count_, r), width, width);
      column += width;
    }
  }
}

void RankMemory::reduce(Rows x) {
  const int64_t piece = int64_t(kCapacity / sizeof(float)) / x.width;
  for (int64_t first = 0; first < x.count; first += piece) {
    const int64_t rows = std::min(piece, x.count - first);
    float* own = part(count_ + 1, rank_);
    for (int64_t row = 0; row < rows; ++row) std::memcpy(own + row * x.width, x.row(first + row), size_t(x.width) * sizeof(float));
    arrive_and_wait();
    for (int64_t row = 0; row < rows; ++row) {
      float* sum = x.row(first + row);
      std::memcpy(sum, part(count_, 0) + row * x.width, size_t(x.width) * sizeof(float));
      for (int r = 1; r < size_; ++r) {
        const float* other = part(count_, r) + row * x.width;
        for (int64_t i = 0; i < x.width; ++i) sum[i] += other[i];
      }
    }
  }
}

}  // namespace bifolio
