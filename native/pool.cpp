#include "pool.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <new>
#include <shared_mutex>
#include <string>
#include <system_error>
#include <utility>

#include "argument_error.h"
#include "platform.h"

namespace bifolio {
namespace {

// How often a thread polls for work before it sleeps: a decode step follows the last one within some ten microseconds,
// and waking a thread costs about as much.
constexpr int kSpins = 4000;

constexpr uint32_t kOpen = 1 << 16;
constexpr double kTolerated = 100e-6;  // seconds that the caller waits for a piece before its thread counts as suspended
constexpr double kWindow = 0.1;        // seconds over which waits for suspended threads are added up
constexpr double kTooMuch = 0.1;       // share of the window spent in such waits from which on a thread is left out
constexpr double kShortestPause = 2e-3, kLongestPause = 0.25;  // seconds without a thread that was suspended
constexpr double kProbation = 2;                               // pauses after a pause in which one wait leads to the next
constexpr double kForgotten = 1.0;                             // seconds without a pause that make pauses short again

thread_local Scratch* own_scratch = nullptr;

// Held shared while a pool runs work, and exclusively while a setting of the process changes.
std::shared_mutex& settings_mutex() {
  static std::shared_mutex* mutex = new std::shared_mutex();
  return *mutex;
}

double now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

constexpr size_t kHugePage = size_t(2) << 20;

inline void pause_briefly() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int default_threads() { return std::clamp(platform::usable_cores(), 1, Pool::kMaxThreads); }

}  // namespace

Scratch::~Scratch() { std::free(data_); }

// Huge pages from some size on: otherwise rows that are far apart each need an entry of the TLB.
uint8_t* Scratch::bytes(size_t size) {
  if (size > size_) {
    std::free(data_);
    const size_t page = size >= kHugePage / 4 ? kHugePage : 4096;
    size_ = (size + page - 1) / page * page;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(page, size_));
    if (!data_) {
      size_ = 0;
      throw std::bad_alloc();
    }
#if defined(MADV_HUGEPAGE)
    if (page == kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
#endif
  }
  return data_;
}

Scratch& Member::scratch() { return *own_scratch; }

Pool& Pool::instance() {
  static Pool* pool = new Pool(0);  // never destroyed: threads may outlive static destructors
  return *pool;
}

Pool::Pool(int count) : size_(count > 0 ? count : default_threads()) { start_threads(); }

Pool::~Pool() { stop_threads(); }

void Pool::start_threads() {
  scratch_.clear();
  for (int rank = 0; rank < size_; ++rank) scratch_.push_back(std::make_unique<Scratch>());
  try {
    for (int rank = 1; rank < size_; ++rank) {
      workers_.push_back(std::make_unique<Worker>());
      workers_.back()->thread = std::thread(&Pool::work_loop, this, rank, std::ref(workers_.back()->inside));
    }
  } catch (const std::system_error&) {
    const int asked = size_;
    stop_threads();
    size_ = 1;
    throw ArgumentError("the system does not start " + std::to_string(asked) + " threads: ask for fewer");
  }
  pause_ = resume_at_ = waited_ = last_wait_ = probation_until_ = 0;
  active_.store(size_ - 1);
  active_.notify_all();
}

void Pool::stop_threads() {
  stopping_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  active_.store(kMaxThreads);
  active_.notify_all();
  for (auto& worker : workers_)
    if (worker->thread.joinable()) worker->thread.join();
  workers_.clear();
  active_.store(0);
  stopping_ = false;
}

void Pool::set_num_threads(int count) {
  std::lock_guard lock(mutex_);
  const int size = count > 0 ? count : default_threads();
  if (size == size_) return;
  stop_threads();
  size_ = size;
  start_threads();
}

int Pool::num_threads() {
  std::lock_guard lock(mutex_);
  return size_;
}

void Pool::run_alone(const std::function<void()>& work) {
  std::unique_lock lock(settings_mutex());
  work();
}

void Pool::run(const std::function<void(Member&)>& work) {
  std::lock_guard lock(mutex_);
  std::shared_lock settings(settings_mutex());
  own_scratch = scratch_[0].get();
  Member member(*this, size_);
  work(member);
}

// -- one loop -------------------------------------------------------------------------------------------------------------

void Pool::share(const Loop& loop) {
  if (active_.load(std::memory_order_relaxed) < size_ - 1) recover(now());
  if (active_.load(std::memory_order_relaxed) == 0) {
    loop.call(loop.body, 0, loop.count);
    return;
  }
  loop_ = loop;
  next_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen, std::memory_order_release);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) generation_.notify_all();
  try {
    take_pieces(loop);
  } catch (...) {
    next_.store(loop.count, std::memory_order_relaxed);
    wait_for_others();
    throw;
  }
  if (const double waited = wait_for_others(); waited > 0) suspended(now(), waited);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::take_pieces(const Loop& loop) {
  for (int64_t begin; (begin = next_.fetch_add(loop.piece, std::memory_order_relaxed)) < loop.count;)
    loop.call(loop.body, begin, std::min(begin + loop.piece, loop.count));
}

// Closes the loop and waits for the threads that are inside a piece; returns the seconds waited for one that was suspended:
// its processor time stood still meanwhile. A slow piece (page faults, cold caches) is no suspension: 0.
double Pool::wait_for_others() {
  uint32_t gate = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
  for (int spins = 0; gate != 0 && spins < kSpins; ++spins) {
    pause_briefly();
    gate = gate_.load(std::memory_order_acquire);
  }
  if (gate == 0) return 0;
  const double began = now();
  std::vector<std::pair<std::thread::native_handle_type, double>> inside;  // threads inside a piece, their processor time
  for (auto& worker : workers_) {
    if (!worker->inside.load(std::memory_order_relaxed)) continue;
    const auto thread = worker->thread.native_handle();
    if (const double seconds = platform::thread_seconds(thread); seconds >= 0) inside.emplace_back(thread, seconds);
  }
  for (; gate != 0; gate = gate_.load(std::memory_order_acquire)) gate_.wait(gate, std::memory_order_acquire);
  const double waited = now() - began;
  double computed = 0;
  for (auto& [thread, before] : inside) computed = std::max(computed, platform::thread_seconds(thread) - before);
  return waited > kTolerated && computed < waited / 2 ? waited : 0;
}

// The caller waited for a suspended thread. A single wait costs less than a pause; waits that add up to a share of the time
// cost more than the thread computes.
void Pool::suspended(double now, double waited) {
  waited_ = waited_ * std::exp((last_wait_ - now) / kWindow) + waited;
  last_wait_ = now;
  if (waited_ > kTooMuch * kWindow || now < probation_until_) slow_down(now);
}

// Leave one thread out, longer with every time that this happens again.
void Pool::slow_down(double now) {
  waited_ = 0;
  active_.store(std::max(active_.load(std::memory_order_relaxed) - 1, 0), std::memory_order_relaxed);
  if (now > resume_at_ + kForgotten) pause_ = 0;
  pause_ = std::clamp(pause_ * 2, kShortestPause, kLongestPause);
  resume_at_ = now + pause_;
}

void Pool::recover(double now) {
  if (now < resume_at_) return;
  active_.fetch_add(1, std::memory_order_relaxed);
  active_.notify_all();
  resume_at_ = now + pause_;
  probation_until_ = now + kProbation * pause_;
}

// -- the other threads ----------------------------------------------------------------------------------------------------

void Pool::wait_for_loop(uint32_t seen) {
  for (int spins = 0; spins < kSpins; ++spins) {
    if (generation_.load(std::memory_order_acquire) != seen) return;
    pause_briefly();
  }
  sleepers_.fetch_add(1);
  generation_.wait(seen);
  sleepers_.fetch_sub(1);
}

void Pool::work_loop(int rank, std::atomic<bool>& inside) {
  own_scratch = scratch_[size_t(rank)].get();
  for (uint32_t seen = 0;;) {
    for (int active; (active = active_.load(std::memory_order_acquire)) < rank;) active_.wait(active);
    wait_for_loop(seen);
    seen = generation_.load();
    if (stopping_) return;  // set before the generation changes for the last time
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    while ((gate & kOpen) && !gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
    }
    if (!(gate & kOpen)) continue;  // the loop has ended
    inside.store(true, std::memory_order_relaxed);
    try {
      take_pieces(loop_);
    } catch (...) {
      next_.store(loop_.count, std::memory_order_relaxed);
      std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    inside.store(false, std::memory_order_relaxed);
    if (gate_.fetch_sub(1, std::memory_order_acq_rel) == 1) gate_.notify_one();  // the last to leave a closed loop
  }
}

}  // namespace bifolio
