// The calls that differ between operating systems; no other file has any.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace bifolio::platform {

// Physical cores that this process may use: hyperthreads of one core share its vector units.
int usable_cores();

// Processor time of a thread in seconds; below 0 where it cannot be read.
double thread_seconds(std::thread::native_handle_type thread);

// Sleep until the value is no longer `seen`, for at most `longest`; it may lie in memory that processes share. May wake early.
void sleep_on(std::atomic<uint32_t>& value, uint32_t seen, std::chrono::nanoseconds longest);
void wake_sleepers(std::atomic<uint32_t>& value);

#if defined(__aarch64__)
// Whether the processor has the dot product instructions of ARMv8.2.
bool has_dot_products();
#endif

#if defined(__x86_64__)
// Ask for the permission to use AMX tiles, which holds for the whole process.
bool allow_tiles();
#endif

}  // namespace bifolio::platform
