#include "matrix.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "pool.h"

namespace bifolio {
namespace {

#include "simd/generic.h"

constexpr size_t kHugePage = size_t(2) << 20;

size_t block_elements(Format format) { return format >= Format::Q8_0 ? kQuantBlock : 1; }

size_t block_bytes(Format format) {
  static const size_t sizes[] = {4, 2, 2, 34, 18, 20};
  return sizes[int(format)];
}

PackedMatrix layout(Format format, int64_t n, int64_t k) {
  PackedMatrix m{};
  m.format = format;
  m.n = n;
  m.k = k;
  m.num_panels = round_up(n, kPanel) / kPanel;
  const size_t cells = size_t(kPanel) * size_t(k);
  switch (format) {
    case Format::F32: m.panel_bytes = cells * 4; break;
    case Format::F16: m.panel_bytes = cells * 2; break;
    case Format::BF16: m.panel_bytes = size_t(kPanel * round_up(k, 32)) * 2; break;
    default: m.panel_bytes = size_t(round_up(k / kQuantBlock, 2) / 2 * pair_bytes(format)); break;
  }
  m.panel_bytes = size_t(round_up(int64_t(m.panel_bytes), 64));
  return m;
}

void pack_floats(const PackedMatrix& m, const uint8_t* row, int64_t column, uint8_t* panel) {
  for (int64_t k = 0; k < m.k; ++k) {
    if (m.format == Format::F32) {
      std::memcpy(panel + (k * kPanel + column) * 4, row + k * 4, 4);
    } else if (m.format == Format::F16) {
      std::memcpy(panel + (k * kPanel + column) * 2, row + k * 2, 2);
    } else {
      std::memcpy(panel + ((k / 2 * kPanel + column) * 2 + k % 2) * 2, row + k * 2, 2);
    }
  }
}

void pack_blocks(const PackedMatrix& m, const uint8_t* row, int64_t column, uint8_t* panel) {
  const size_t stride = block_bytes(m.format);
  const size_t header = m.format == Format::Q4_1 ? 4 : 2;
  const int64_t lines = m.format == Format::Q8_0 ? 8 : 4;  // of 64 bytes, per block
  for (int64_t b = 0; b < m.k / kQuantBlock; ++b, row += stride) {
    uint8_t* pair = panel + b / 2 * pair_bytes(m.format);
    std::memcpy(pair + (b % 2 * kPanel + column) * 2, row, 2);
    if (m.format == Format::Q4_1) std::memcpy(pair + 64 + (b % 2 * kPanel + column) * 2, row + 2, 2);
    uint8_t* out = pair + header_bytes(m.format) + b % 2 * quant_bytes(m.format) + column * 4;
    for (int64_t line = 0; line < lines; ++line) {
      uint32_t four;
      std::memcpy(&four, row + header + line * 4, 4);
      if (m.format == Format::Q4_0) four ^= 0x88888888u;  // q - 8 as a signed nibble
      std::memcpy(out + line * 64, &four, 4);
    }
  }
}

}  // namespace

HugeBuffer::HugeBuffer(size_t size) : size_(size) {
  mapped_ = size >= 2 * kHugePage;
  if (mapped_) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kHugePage, size) != 0) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(memory);
#if defined(MADV_HUGEPAGE)
    madvise(data_, size / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  } else {
    data_ = static_cast<uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    if (!data_) throw std::bad_alloc();
  }
}

HugeBuffer::~HugeBuffer() { std::free(data_); }

size_t source_row_bytes(Format format, int64_t k) { return size_t(k) / block_elements(format) * block_bytes(format); }

LinearWeights::LinearWeights(const std::vector<SourceRows>& parts, int64_t k, const float* bias, int planes, Pool& pool)
    : k_(k), planes_(planes) {
  for (size_t first = 0; first < parts.size();) {
    size_t last = first;
    int64_t rows = 0;
    for (; last < parts.size() && parts[last].format == parts[first].format; ++last) rows += parts[last].rows;
    PackedMatrix m = layout(parts[first].format, rows, k);
    auto memory = std::make_unique<HugeBuffer>(m.panel_bytes * size_t(m.num_panels));
    uint8_t* target = memory->data();
    m.data = target;
    pool.run([&](Member& member) {
      member.split(m.num_panels, 8, [&](int64_t begin, int64_t end) {
        std::memset(target + size_t(begin) * m.panel_bytes, 0, size_t(end - begin) * m.panel_bytes);
        int64_t row = 0;  // of the fused matrix
        for (size_t p = first; p < last; row += parts[p].rows, ++p) {
          const int64_t from = std::max(row, begin * kPanel), to = std::min(row + parts[p].rows, end * kPanel);
          for (int64_t i = from; i < to; ++i) {
            const uint8_t* source = parts[p].data + size_t(i - row) * parts[p].row_bytes;
            uint8_t* panel = target + size_t(i / kPanel) * m.panel_bytes;
            m.format >= Format::Q8_0 ? pack_blocks(m, source, i % kPanel, panel) : pack_floats(m, source, i % kPanel, panel);
          }
        }
      });
    });
    quantizes_ = quantizes_ || m.format >= Format::Q8_0;
    pieces_.push_back({m, n_, std::move(memory)});
    n_ += rows;
    first = last;
  }
  if (bias) bias_.assign(bias, bias + n_);
}

size_t LinearWeights::num_bytes() const {
  size_t bytes = bias_.size() * sizeof(float);
  for (const Piece& piece : pieces_) bytes += piece.memory->size();
  return bytes;
}

void dequantize_row(Format format, const uint8_t* data, int64_t k, float* out) {
  uint16_t word;
  switch (format) {
    case Format::F32: std::memcpy(out, data, size_t(k) * 4); return;
    case Format::F16:
      for (int64_t i = 0; i < k; ++i) std::memcpy(&word, data + 2 * i, 2), out[i] = half_to_float(word);
      return;
    case Format::BF16:
      for (int64_t i = 0; i < k; ++i) {
        std::memcpy(&word, data + 2 * i, 2);
        const uint32_t bits = uint32_t(word) << 16;
        std::memcpy(out + i, &bits, 4);
      }
      return;
    default: break;
  }
  for (int64_t b = 0; b < k / kQuantBlock; ++b, data += block_bytes(format), out += kQuantBlock) {
    std::memcpy(&word, data, 2);
    const float scale = half_to_float(word);
    if (format == Format::Q8_0) {
      for (int i = 0; i < kQuantBlock; ++i) out[i] = scale * float(int8_t(data[2 + i]));
    } else if (format == Format::Q4_0) {
      for (int i = 0; i < 16; ++i) {
        out[i] = scale * float(int(data[2 + i] & 15) - 8);
        out[16 + i] = scale * float(int(data[2 + i] >> 4) - 8);
      }
    } else {
      std::memcpy(&word, data + 2, 2);
      const float lowest = half_to_float(word);
      for (int i = 0; i < 16; ++i) {
        out[i] = scale * float(data[4 + i] & 15) + lowest;
        out[16 + i] = scale * float(data[4 + i] >> 4) + lowest;
      }
    }
  }
}

}  // namespace bifolio
