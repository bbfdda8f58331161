// Exchanges between the ranks of tensor parallelism through memory that their processes share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "ops.h"

namespace bifolio {

// Another rank failed in this pass, or its process ended: the exchange cannot complete.
struct RankFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The memory, which all ranks map:
//
//   |fault|arrived 0|...|arrived n-1|signals|  words of 32 bits, each on its own cache line
//   |rank 0|...|rank n-1|rank 0|...|rank n-1|  two generations of `capacity` bytes for each rank
//
// A rank writes its part, sets its word `arrived` to the number of the exchange, waits until all words have reached that
// number, and reads the other parts. Exchange k writes generation k % 2: all ranks have read exchange k - 2 when they arrive at
// exchange k - 1, so a part is never overwritten while another rank reads it.
class RankMemory {
 public:
  static constexpr size_t kLine = 64;
  static constexpr int kMaxRanks = 64, kSignals = 2 + kMaxRanks;
  static constexpr size_t kCapacity = size_t(1) << 20;  // bytes of one rank's part of an exchange
  static size_t num_bytes(int size) { return words(size) * kLine + 2 * size_t(size) * kCapacity; }

  RankMemory(uint8_t* memory, int rank, int size) : memory_(memory), rank_(rank), size_(size) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Columns of all ranks side by side: x is [t, widths[rank]], out is [t, sum of widths]. out.data may be null: only x is sent.
  void gather(Rows x, const std::vector<int64_t>& widths, Rows out);
  // x becomes the sum over all ranks, added in the order of the ranks.
  void reduce(Rows x);

  // Signals: numbers that grow. `wait` returns whether the signal reached the value within the time.
  void post(int signal, uint32_t value) { set(signal_word(signal), value); }
  uint32_t read(int signal) { return word(signal_word(signal)).value.load(std::memory_order_acquire); }
  bool wait(int signal, uint32_t value, double seconds);

  // Fault: other than 0, every exchange that waits throws RankFault.
  void set_fault(uint32_t value);
  uint32_t fault() { return word(0).value.load(std::memory_order_acquire); }

  uint32_t count() const { return count_; }  // exchanges so far; equal on all ranks between two passes
  void set_count(uint32_t count) { count_ = count; }

 private:
  struct Word {
    std::atomic<uint32_t> value, sleepers;
  };
  static size_t words(int size) { return size_t(1 + size + kSignals); }
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Word) <= kLine);

  Word& word(int index) { return *reinterpret_cast<Word*>(memory_ + size_t(index) * kLine); }
  int signal_word(int signal) const { return 1 + size_ + signal; }
  float* part(uint32_t exchange, int rank) {
    return reinterpret_cast<float*>(memory_ + words(size_) * kLine + (size_t(exchange % 2) * size_t(size_) + size_t(rank)) * kCapacity);
  }
  void set(int index, uint32_t value);
  bool await(int index, uint32_t value, double seconds, bool stop_at_fault);
  void arrive_and_wait();

  uint8_t* memory_;
  int rank_, size_;
  uint32_t count_ = 0;
};

}  // namespace bifolio
