// A small team of threads that share the pieces of loops.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
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

// The team as an operation sees it. An operation runs on the calling thread; only the pieces of its loops run on several
// threads, so the code between two loops needs no synchronisation.
class Member {
 public:
  Member(Pool& pool, int size) : size(size), pool_(pool) {}

  const int size;  // threads of the team

  Scratch& scratch();  // of the thread that runs the present piece

  // Calls body(begin, end) for pieces of [0, count), each taken by the next free thread; returns when all are done. A thread
  // that is not running takes no piece, and the others do not wait for it.
  template <class Body>
  void split(int64_t count, int64_t piece, Body body);

 private:
  Pool& pool_;
};

// Rows of a piece, so that taking a piece costs little beside the work: about 8 K numbers.
inline int64_t row_piece(int64_t width) { return width > 8192 ? 1 : 8192 / (width > 0 ? width : 1); }

template <class Body>
void each_row(Member& m, int64_t count, int64_t width, Body body) {
  m.split(count, row_piece(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// The pieces [0, count) of a loop.
struct Loop {
  void (*call)(void* body, int64_t begin, int64_t end);
  void* body;
  int64_t count, piece;
};

// The threads of one engine. They poll briefly for the next loop, then sleep. When the machine is busy and a thread is
// suspended inside a piece, the calling thread sleeps instead of polling. When such waits take a share of the time, the team
// continues with fewer threads for a while: a thread that is often suspended costs more than it computes.
class Pool {
 public:
  static constexpr int kMaxThreads = 1024;
  static Pool& instance();  // that of the process, for work that belongs to no engine

  explicit Pool(int count);  // 0: one for each physical core
  ~Pool();
  Pool(const Pool&) = delete;

  // Runs work(member) on the calling thread, its loops on all threads. One caller at a time: others wait.
  void run(const std::function<void(Member&)>& work);
  void set_num_threads(int count);  // 0: one for each physical core
  int num_threads();

  static void run_alone(const std::function<void()>& work);  // on the calling thread, while no pool runs any work

 private:
  friend class Member;

  struct alignas(64) Worker {
    std::thread thread;
    std::atomic<bool> inside{false};  // a piece of the loop
  };

  void start_threads();
  void stop_threads();
  void work_loop(int rank, std::atomic<bool>& inside);
  void wait_for_loop(uint32_t seen);
  void share(const Loop& loop);
  void take_pieces(const Loop& loop);
  double wait_for_others();
  void suspended(double now, double waited);
  void slow_down(double now);
  void recover(double now);

  std::mutex mutex_;  // held by the caller for the whole of `run`
  int size_ = 1;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::atomic<bool> stopping_{false};
  Loop loop_{};  // valid for threads inside the gate
  std::mutex error_mutex_;
  std::exception_ptr error_;  // of the first piece that failed
  double pause_ = 0, resume_at_ = 0;  // seconds without the suspended threads, and when they are asked again
  double waited_ = 0, last_wait_ = 0;  // decaying sum of the seconds the caller waited for suspended threads; the last wait
  double probation_until_ = 0;

  alignas(64) std::atomic<uint32_t> generation_{0};  // changes with every loop
  alignas(64) std::atomic<uint32_t> gate_{0};        // bit 16: the loop is open; below: the threads inside
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> active_{0};  // threads beside the caller that may take pieces
  alignas(64) std::atomic<int64_t> next_{0};
};

template <class Body>
void Member::split(int64_t count, int64_t piece, Body body) {
  if (count <= 0) return;
  if (size == 1 || count <= piece) {
    body(int64_t(0), count);
    return;
  }
  pool_.share({[](void* of, int64_t begin, int64_t end) { (*static_cast<Body*>(of))(begin, end); }, &body, count, piece});
}

}  // namespace bifolio
