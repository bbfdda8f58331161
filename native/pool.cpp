#include "pool.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <new>
#include <set>
#include <string>
#include <system_error>

#include "argument_error.h"

namespace bifolio {
namespace {

// How often a thread polls for work before it sleeps: a decode step follows the last one within some ten microseconds,
// and waking a thread costs about as much.
constexpr int kSpins = 4000;

constexpr size_t kHugePage = size_t(2) << 20;

inline void pause_briefly() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Physical cores this process may use: hyperthreads of one core share its vector units.
int default_threads() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
    return std::clamp(int(std::thread::hardware_concurrency()), 1, Pool::kMaxThreads);
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream siblings("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::string line;
    if (!std::getline(siblings, line)) line = std::to_string(cpu);
    cores.insert(line);
  }
  return cores.empty() ? 1 : std::min(int(cores.size()), Pool::kMaxThreads);
}

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

void Member::barrier() {
  if (size == 1) return;
  const uint32_t sense = pool_.sense_.load(std::memory_order_relaxed);
  if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
    pool_.arrived_.store(0, std::memory_order_relaxed);
    pool_.sense_.store(sense + 1, std::memory_order_release);
  } else {
    pool_.wait_for_others(sense);
  }
}

Scratch& Member::scratch() { return *pool_.scratch_[size_t(rank)]; }

std::atomic<int64_t>& Member::counter() { return pool_.counters_[loop_].value; }

// Three counters in turn: the one reset here was last used two barriers ago, so no member still reads it.
void Member::finish_loop() {
  if (rank == 0) pool_.counters_[(loop_ + 1) % 3].value.store(0, std::memory_order_relaxed);
  loop_ = (loop_ + 1) % 3;
  barrier();
}

Pool& Pool::instance() {
  static Pool* pool = new Pool();  // never destroyed: threads may outlive static destructors
  return *pool;
}

Pool::Pool() : size_(default_threads()) {
  try {
    start_threads();
  } catch (const ArgumentError&) {  // work goes on with the threads that the system gave
  }
}

Pool::~Pool() { stop_threads(); }

void Pool::start_threads() {
  scratch_.clear();
  for (int rank = 0; rank < size_; ++rank) scratch_.push_back(std::make_unique<Scratch>());
  const uint32_t seen = generation_.load();
  try {
    for (int rank = 1; rank < size_; ++rank) threads_.emplace_back(&Pool::work_loop, this, rank, seen);
  } catch (const std::system_error&) {
    const int asked = size_;
    size_ = int(threads_.size()) + 1;  // those that the system gave
    throw ArgumentError("the system starts " + std::to_string(size_) + " threads at most, not " + std::to_string(asked));
  }
}

void Pool::stop_threads() {
  stopping_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
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

void Pool::run_alone(const std::function<void()>& work) {
  std::lock_guard lock(mutex_);
  work();
}

int Pool::num_threads() {
  std::lock_guard lock(mutex_);
  return size_;
}

void Pool::wait_for_others(uint32_t sense) {
  for (int spins = 0; sense_.load(std::memory_order_acquire) == sense; ++spins) {
    if (spins < kSpins) {
      pause_briefly();
    } else {
      sched_yield();  // more threads than free cores: yield to the one that is late
    }
  }
}

void Pool::work_loop(int rank, uint32_t seen) {
  for (;;) {
    for (int spins = 0; generation_.load(std::memory_order_acquire) == seen && spins < kSpins; ++spins) pause_briefly();
    if (generation_.load(std::memory_order_acquire) == seen) {
      sleepers_.fetch_add(1);
      generation_.wait(seen);
      sleepers_.fetch_sub(1);
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stopping_) return;
    Member member(*this, rank, size_);
    (*work_)(member);
    member.barrier();
  }
}

void Pool::run(const std::function<void(Member&)>& work) {
  std::lock_guard lock(mutex_);
  for (auto& counter : counters_) counter.value.store(0, std::memory_order_relaxed);
  work_ = &work;
  if (size_ > 1) {
    generation_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) generation_.notify_all();
  }
  Member member(*this, 0, size_);
  work(member);
  member.barrier();
}

}  // namespace bifolio
