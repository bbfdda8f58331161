#include "platform.h"

#include <pthread.h>
#include <time.h>

#include <fstream>
#include <set>
#include <string>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <mach/mach.h>
#include <sys/sysctl.h>
#endif

namespace bifolio::platform {

#if defined(__linux__)

int usable_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return int(std::thread::hardware_concurrency());
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream siblings("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::string line;
    if (!std::getline(siblings, line)) line = std::to_string(cpu);
    cores.insert(line);
  }
  return int(cores.size());
}

double thread_seconds(std::thread::native_handle_type thread) {
  clockid_t clock;
  timespec time{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return -1;
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void sleep_on(std::atomic<uint32_t>& value, uint32_t seen, std::chrono::nanoseconds longest) {
  timespec time{longest.count() / 1'000'000'000, longest.count() % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void wake_sleepers(std::atomic<uint32_t>& value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

#else

int usable_cores() {
#if defined(__APPLE__)
  int cores = 0;
  size_t size = sizeof cores;
  if (sysctlbyname("hw.perflevel0.physicalcpu", &cores, &size, nullptr, 0) == 0 && cores > 0) return cores;
#endif
  return int(std::thread::hardware_concurrency());
}

double thread_seconds([[maybe_unused]] std::thread::native_handle_type thread) {
#if defined(__APPLE__)
  thread_basic_info_data_t info;
  mach_msg_type_number_t count = THREAD_BASIC_INFO_COUNT;
  const auto port = pthread_mach_thread_np(thread);
  if (thread_info(port, THREAD_BASIC_INFO, reinterpret_cast<thread_info_t>(&info), &count) == KERN_SUCCESS)
    return double(info.user_time.seconds + info.system_time.seconds) +
           1e-6 * double(info.user_time.microseconds + info.system_time.microseconds);
#endif
  return -1;
}

void sleep_on(std::atomic<uint32_t>&, uint32_t, std::chrono::nanoseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

void wake_sleepers(std::atomic<uint32_t>&) {}

#endif

#if defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long dotprod = 1ul << 20;  // HWCAP_ASIMDDP
  return getauxval(AT_HWCAP) & dotprod;
#else
  return true;  // every ARM processor of Apple has them
#endif
}
#endif

#if defined(__x86_64__)
bool allow_tiles() {
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace bifolio::platform
