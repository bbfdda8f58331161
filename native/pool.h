// A small team of threads that run one function together, with barriers between its steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace bifolio {

class Pool;

// Memory that grows and is never shared between threads.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch();
  uint8_t* bytes(size_t size);  // 64-byte aligned; the content is lost when it grows
  template <class T>
  T* array(size_t count) {
    return reinterpret_cast<T*>(bytes(count * sizeof(T)));
  }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// One thread's place in the team. Every member must pass the same barriers and loops in the same order.
class Member {
 public:
  Member(Pool& pool, int rank, int size) : rank(rank), size(size), pool_(pool) {}

  const int rank;
  const int size;

  void barrier();
  Scratch& scratch();

  // Calls body(begin, end) for pieces of [0, count), each taken by the next free member. Ends with a barrier.
  template <class Body>
  void split(int64_t count, int64_t piece, Body body) {
    if (size == 1 || count <= piece) {
      if (rank == 0 && count > 0) body(int64_t(0), count);
      barrier();
      return;
    }
    std::atomic<int64_t>& next = counter();
    for (int64_t begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < count;)
      body(begin, begin + piece < count ? begin + piece : count);
    finish_loop();
  }

 private:
  std::atomic<int64_t>& counter();
  void finish_loop();

  Pool& pool_;
  int loop_ = 0;  // index of the next counter
};

// Rows of a piece, so that taking a piece costs little beside the work: about 8 K numbers.
inline int64_t row_piece(int64_t width) { return width > 8192 ? 1 : 8192 / (width > 0 ? width : 1); }

template <class Body>
void each_row(Member& m, int64_t count, int64_t width, Body body) {
  m.split(count, row_piece(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

class Pool {
 public:
  static constexpr int kMaxThreads = 1024;
  static Pool& instance();

  // Runs work(member) on every thread of the team and returns when all are done. One caller at a time.
  void run(const std::function<void(Member&)>& work);
  void run_alone(const std::function<void()>& work);  // on the calling thread, while no other work runs
  void set_num_threads(int count);  // 0: one for each physical core
  int num_threads();

 private:
  friend class Member;
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };

  Pool();
  ~Pool();
  void start_threads();
  void stop_threads();
  void work_loop(int rank, uint32_t seen);
  void wait_for_others(uint32_t sense);

  std::mutex mutex_;  // held by the caller for the whole of `run`
  int size_ = 1;
  std::vector<std::thread> threads_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  const std::function<void(Member&)>* work_ = nullptr;
  bool stopping_ = false;

  alignas(64) std::atomic<uint32_t> generation_{0};  // a change starts the threads
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> sense_{0};  // a change opens the barrier
  Counter counters_[3];
};

}  // namespace bifolio
