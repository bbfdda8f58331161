#include "blocks.h"

#include <cstring>

namespace bifolio {
namespace {

struct alignas(64) TableLine {
  int8_t bytes[64];
};

struct Grid {
  std::vector<uint8_t> numbers;
  std::vector<TableLine> table;  // as kernels read it: see SmallGrid
};

Grid& grid(FileFormat format) {
  static Grid grids[size_t(FileFormat::Count)];
  return grids[size_t(format)];
}

alignas(16) constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kSmallFloats[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled
alignas(16) constexpr int8_t kThreeBits[16] = {-4, -3, -2, -1, 0, 1, 2, 3};
alignas(16) constexpr int8_t kThree[16] = {8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43};
alignas(16) constexpr int8_t kEight[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
alignas(16) constexpr int8_t kOdd[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
alignas(16) constexpr int8_t kThirds[16] = {-9, -7, -1, 1, 7, 9};

#ifdef BIFOLIO_PACKS_Q4_K
constexpr Format kPackedQ4K = Format::Q4_K;
#else
constexpr Format kPackedQ4K = Format::Q4_1;
#endif

const FileBlock kBlocks[size_t(FileFormat::Count)] = {
    {"F32", 1, 4, Format::F32, nullptr, FileFormat::F32},
    {"F16", 1, 2, Format::F16, nullptr, FileFormat::F16},
    {"BF16", 1, 2, Format::BF16, nullptr, FileFormat::BF16},
    {"Q8_0", 32, 34, Format::Q8_0, nullptr, FileFormat::Q8_0},
    {"Q4_0", 32, 18, Format::Q4_0, nullptr, FileFormat::Q4_0},
    {"Q4_1", 32, 20, Format::Q4_1, nullptr, FileFormat::Q4_1},
    {"Q5_0", 32, 22, Format::Q6_0, nullptr, FileFormat::Q5_0},
    {"Q5_1", 32, 24, Format::Q6_1, nullptr, FileFormat::Q5_1},
    {"Q2_K", 256, 84, Format::Q2_K, nullptr, FileFormat::Q2_K},
    {"Q3_K", 256, 110, Format::Q3_K, kThreeBits, FileFormat::Q3_K},
    {"Q4_K", 256, 144, kPackedQ4K, nullptr, FileFormat::Q4_K},
    {"Q5_K", 256, 176, Format::Q6_1, nullptr, FileFormat::Q5_K},
    {"Q6_K", 256, 210, Format::Q6_0_16, nullptr, FileFormat::Q6_K},
    {"IQ4_NL", 32, 18, Format::Q4_T, kUneven, FileFormat::IQ4_NL},
    {"IQ4_XS", 256, 136, Format::Q4_T, kUneven, FileFormat::IQ4_XS},
    {"MXFP4", 32, 17, Format::Q4_T, kSmallFloats, FileFormat::MXFP4},
    {"NVFP4", 64, 36, Format::Q4_T_16, kSmallFloats, FileFormat::NVFP4},
    {"TQ1_0", 256, 54, Format::Q4_0, nullptr, FileFormat::TQ1_0},
    {"TQ2_0", 256, 66, Format::Q4_0, nullptr, FileFormat::TQ2_0},
    {"IQ2_XXS", 256, 66, Format::IQ2_XXS, kThree, FileFormat::IQ2_XXS},
    {"IQ2_XS", 256, 74, Format::IQ2_XS, kThree, FileFormat::IQ2_XS},
    {"IQ2_S", 256, 82, Format::IQ2_S, kThree, FileFormat::IQ2_S},
    {"IQ3_XXS", 256, 98, Format::IQ3_XXS, kEight, FileFormat::IQ3_XXS},
    {"IQ3_S", 256, 110, Format::IQ3_S, kOdd, FileFormat::IQ3_S},
    {"IQ1_S", 256, 50, Format::IQ1_S, kThirds, FileFormat::IQ1_S},
    {"IQ1_M", 256, 56, Format::IQ1_M, kThirds, FileFormat::IQ1_M},
};

}  // namespace

const uint8_t* grid_of(FileFormat format) { return grid(format).numbers.data(); }

const int8_t* packed_table(FileFormat format) {
  return grid_rows(format) ? grid(format).table.data()->bytes : file_block(format).table;
}

const FileBlock& file_block(FileFormat format) { return kBlocks[size_t(format)]; }

void set_grid(FileFormat format, std::vector<uint8_t> numbers) {
  if (!needs_grid(format)) return;  // packed matrices point to the table of the first one
  const bool is_iq1 = format == FileFormat::IQ1_S || format == FileFormat::IQ1_M;
  const int8_t* table = file_block(format).table;
  const size_t width = numbers.size() / grid_rows(format), bits = 16 / width;
  std::vector<int8_t> bytes;
  for (const uint8_t number : numbers) bytes.push_back(is_iq1 ? int8_t(8 * number) : table[number]);
  for (size_t row = 0; row < numbers.size(); row += width) {
    unsigned code = 0;
    for (size_t e = 0; e < width; ++e) code |= unsigned(numbers[row + e]) << (e % 2 * 8 + e / 2 * bits);
    bytes.push_back(int8_t(code)), bytes.push_back(int8_t(code >> 8));
  }
  for (size_t i = 0; i < 64; ++i) bytes.push_back(table[i % (width == 8 ? 4 : 8)]);
  std::vector<TableLine> lines((bytes.size() + 63) / 64);
  std::memcpy(lines.data(), bytes.data(), bytes.size());
  grid(format) = {std::move(numbers), std::move(lines)};
}

size_t grid_rows(FileFormat format) {
  switch (format) {
    case FileFormat::IQ2_XXS: case FileFormat::IQ3_XXS: return 256;
    case FileFormat::IQ2_XS: case FileFormat::IQ3_S: return 512;
    case FileFormat::IQ2_S: return 1024;
    case FileFormat::IQ1_S: case FileFormat::IQ1_M: return 2048;
    default: return 0;
  }
}

bool needs_grid(FileFormat format) { return grid_rows(format) > 0 && grid(format).numbers.empty(); }

}  // namespace bifolio
