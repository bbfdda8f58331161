#include "checksum.h"

#include <cstring>

namespace bifolio {
namespace {

constexpr uint64_t kFactor = 0x3ecb55e90827174bull;
constexpr size_t kGroup = kChecksumLanes * sizeof(uint64_t);

inline void mix(const uint8_t* group, uint64_t lanes[kChecksumLanes]) {
  uint64_t words[kChecksumLanes];
  std::memcpy(words, group, kGroup);
  for (int lane = 0; lane < kChecksumLanes; ++lane) {
    const uint64_t mixed = (lanes[lane] ^ words[lane]) * kFactor;
    lanes[lane] = mixed ^ (mixed >> 29);
  }
}

}  // namespace

void checksum(const uint8_t* data, size_t size, uint64_t lanes[kChecksumLanes]) {
  uint64_t own[kChecksumLanes];
  for (int lane = 0; lane < kChecksumLanes; ++lane) own[lane] = kFactor * uint64_t(2 * lane + 1);
  size_t place = 0;
  for (; place + kGroup <= size; place += kGroup) mix(data + place, own);
  if (place < size) {
    uint8_t rest[kGroup] = {};
    std::memcpy(rest, data + place, size - place);
    mix(rest, own);
  }
  std::memcpy(lanes, own, sizeof own);
}

}  // namespace bifolio
