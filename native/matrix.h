// Weights as the kernels read them, made once at load.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "blocks.h"
#include "pool.h"

namespace bifolio {

struct RangeError : std::overflow_error {
  using std::overflow_error::overflow_error;
};

// Aligned memory, on huge pages where the system has them: decoding is bound by reading weights, and with 4 KB pages every
// 64 lines end in a page walk.
class HugeBuffer {
 public:
  explicit HugeBuffer(size_t size);
  HugeBuffer(const HugeBuffer&) = delete;
  ~HugeBuffer();
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_;
  size_t size_;
  bool mapped_;
};

// Rows of one tensor as they lie in the file.
struct SourceRows {
  FileFormat format;
  const uint8_t* data;
  int64_t rows;
  size_t row_bytes;
  bool is_mapped = false;  // a read-only map of a file: pages are dropped once they are packed
};

size_t source_row_bytes(FileFormat format, int64_t k);

// Bytes of a packed matrix [n, k].
size_t packed_bytes(FileFormat format, int64_t n, int64_t k);

// One Linear: its parts side by side, those of one packed format in one matrix. RangeError where a scale of a block is no
// half float.
class LinearWeights {
 public:
  LinearWeights(const std::vector<SourceRows>& parts, int64_t k, const float* bias, int planes = 1,
                Pool& pool = Pool::instance());
  LinearWeights(const LinearWeights&) = delete;

  int64_t in_features() const { return k_; }
  int64_t out_features() const { return n_; }
  size_t num_bytes() const;
  bool quantizes() const { return quantizes_; }
  bool has_format(Format format) const {
    for (const Piece& piece : pieces_)
      if (piece.matrix.format == format) return true;
    return false;
  }
  bool has_two_scales() const {  // in a block of some piece
    for (const Piece& piece : pieces_)
      if (piece.matrix.format >= Format::Q8_0 && coding(piece.matrix.format).scales == 2) return true;
    return false;
  }
  int planes() const { return planes_; }  // bytes of one activation in products with quantised weights

  struct Piece {
    PackedMatrix matrix;
    int64_t column;  // where its output begins
    std::unique_ptr<HugeBuffer> memory;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }

 private:
  void pack(const std::vector<SourceRows>& parts, size_t first, size_t last, const PackedMatrix& m, uint8_t* target,
            Pool& pool);

  int64_t n_ = 0, k_;
  int planes_;
  bool quantizes_ = false;
  std::vector<Piece> pieces_;
  std::vector<float> bias_;
};

// Row `row` of a table in file order, as floats.
void dequantize_row(FileFormat format, const uint8_t* data, int64_t k, float* out);

}  // namespace bifolio
