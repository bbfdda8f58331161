// A checksum of many bytes at the speed of memory, against damage: eight lanes, each of every eighth word.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bifolio {

constexpr int kChecksumLanes = 8;

// A change within one lane always changes the lane: every step is a bijection of it. Bytes after the last whole group
// of words count as zeros, so the caller tells lengths apart.
void checksum(const uint8_t* data, size_t size, uint64_t lanes[kChecksumLanes]);

}  // namespace bifolio
