// The blocks of GGML's formats as they lie in a file: whole numbers, their scales and minima.
#pragma once

#include <cstdint>
#include <vector>

#include "contracts.h"

namespace bifolio {

// The codes by which Python names the formats of files; the first six are also formats of kernels.
enum class FileFormat : int32_t {
  F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, TQ1_0, TQ2_0,
  IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, Count
};

constexpr int kMostElements = 256;  // of a block

// A block taken apart. Value i is scales[i / group] * q + minima[i / group], q being codes[i] or, where the format has a table,
// table[codes[i]]; the group is 16 or 32 values, as the packed format has it.
struct Codes {
  int8_t codes[kMostElements];
  float scales[kMostElements / 16];
  float minima[kMostElements / 16];
};

struct FileBlock {
  const char* name;
  int64_t elements;
  size_t bytes;
  Format packed;        // the format of kernels that it becomes
  const int8_t* table;  // the values of sixteen codes, or null
  FileFormat format;

  int64_t group() const { return kQuantBlock / coding(packed).scales; }
};

const FileBlock& file_block(FileFormat format);

// A row of a tensor, and the column of a panel that it becomes.
struct Column {
  const FileBlock* file;
  const uint8_t* row;
  int64_t place;
};

// The grids of the IQ1, IQ2 and IQ3 formats are data of the gguf package: rows of 4 or 8 numbers of magnitudes. A format that needs
// one cannot be decoded before it is set.
const uint8_t* grid_of(FileFormat format);
const int8_t* packed_table(FileFormat format);  // of a packed matrix: the values of a grid, or of sixteen codes; null: it needs none
void set_grid(FileFormat format, std::vector<uint8_t> numbers);  // once; later ones change nothing
size_t grid_rows(FileFormat format);  // that a block can number; 0: the format has no grid
bool needs_grid(FileFormat format);  // and has none yet

}  // namespace bifolio
