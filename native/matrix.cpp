#include "matrix.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "isa.h"
#include "pool.h"

namespace bifolio {
namespace {

#include "simd/generic.h"

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSlabBytes = size_t(8) << 20;  // of a packed matrix, before the pages of its source are dropped

// Whole pages of a read-only map of a file, which come back when they are touched.
void drop_pages(const uint8_t* begin, const uint8_t* end) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t first = uintptr_t(begin) / page * page, last = uintptr_t(end) / page * page;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
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
    default: m.panel_bytes = size_t(blocks_bytes(format, k / kQuantBlock)); break;
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

size_t source_row_bytes(FileFormat format, int64_t k) {
  const FileBlock& block = file_block(format);
  return size_t(k / block.elements) * block.bytes;
}

size_t packed_bytes(FileFormat format, int64_t n, int64_t k) {
  const PackedMatrix m = layout(file_block(format).packed, n, k);
  return m.panel_bytes * size_t(m.num_panels);
}

LinearWeights::LinearWeights(const std::vector<SourceRows>& parts, int64_t k, const float* bias, int planes, Pool& pool)
    : k_(k), planes_(planes) {
  for (size_t first = 0; first < parts.size();) {
    size_t last = first;
    int64_t rows = 0;
    const FileBlock& kind = file_block(parts[first].format);
    const auto fits_beside = [&](const FileBlock& other) { return other.packed == kind.packed && other.table == kind.table; };
    for (; last < parts.size() && fits_beside(file_block(parts[last].format)); ++last) rows += parts[last].rows;
    PackedMatrix m = layout(kind.packed, rows, k);
    m.table = packed_table(kind.format);
    auto memory = std::make_unique<HugeBuffer>(m.panel_bytes * size_t(m.num_panels));
    m.data = memory->data();
    pack(parts, first, last, m, memory->data(), pool);
    quantizes_ = quantizes_ || m.format >= Format::Q8_0;
    pieces_.push_back({m, n_, std::move(memory)});
    n_ += rows;
    first = last;
  }
  if (bias) bias_.assign(bias, bias + n_);
}

// Parts [first, last) side by side, some megabytes at a time: so little of a mapped file is in memory together with its packed form.
void LinearWeights::pack(const std::vector<SourceRows>& parts, size_t first, size_t last, const PackedMatrix& m, uint8_t* target,
                         Pool& pool) {
  std::atomic<bool> good = true;
  const auto each_part = [&](int64_t begin, int64_t end, auto body) {  // rows of the fused matrix -> body(part, its rows, column)
    int64_t row = 0;
    for (size_t p = first; p < last; row += parts[p].rows, ++p) {
      const int64_t from = std::max(row, begin), to = std::min(row + parts[p].rows, end);
      if (from < to) body(parts[p], from - row, to - row, from);
    }
  };
  const auto pack_panel = [&](int64_t index) {
    uint8_t* panel = target + size_t(index) * m.panel_bytes;
    std::vector<Column> columns;
    each_part(index * kPanel, (index + 1) * kPanel, [&](const SourceRows& part, int64_t from, int64_t to, int64_t column) {
      for (int64_t i = from; i < to; ++i, ++column)
        columns.push_back({&file_block(part.format), part.data + size_t(i) * part.row_bytes, column % kPanel});
    });
    if (m.format >= Format::Q8_0) {
      if (!kernels().pack_blocks(m, columns.data(), int64_t(columns.size()), panel)) good = false;
      return;
    }
    std::memset(panel, 0, m.panel_bytes);
    for (const Column& column : columns) pack_floats(m, column.row, column.place, panel);
  };
  const int64_t slab = std::max<int64_t>(1, int64_t(kSlabBytes / m.panel_bytes));
  for (int64_t begin = 0; begin < m.num_panels; begin += slab) {
    const int64_t end = std::min(begin + slab, m.num_panels);
    pool.run([&](Member& member) {
      member.split(end - begin, 8, [&](int64_t a, int64_t b) {
        for (int64_t index = begin + a; index < begin + b; ++index) pack_panel(index);
      });
    });
    each_part(begin * kPanel, end * kPanel, [&](const SourceRows& part, int64_t from, int64_t to, int64_t) {
      if (part.is_mapped) drop_pages(part.data + size_t(from) * part.row_bytes, part.data + size_t(to) * part.row_bytes);
    });
  }
  if (!good) throw RangeError("a scale of a block is no finite number below 65520");
}

size_t LinearWeights::num_bytes() const {
  size_t bytes = bias_.size() * sizeof(float);
  for (const Piece& piece : pieces_) bytes += piece.memory->size();
  return bytes;
}

void dequantize_row(FileFormat format, const uint8_t* data, int64_t k, float* out) {
  uint16_t word;
  switch (format) {
    case FileFormat::F32: std::memcpy(out, data, size_t(k) * 4); return;
    case FileFormat::F16:
      for (int64_t i = 0; i < k; ++i) std::memcpy(&word, data + 2 * i, 2), out[i] = half_to_float(word);
      return;
    case FileFormat::BF16:
      for (int64_t i = 0; i < k; ++i) {
        std::memcpy(&word, data + 2 * i, 2);
        const uint32_t bits = uint32_t(word) << 16;
        std::memcpy(out + i, &bits, 4);
      }
      return;
    default: break;
  }
  const FileBlock& file = file_block(format);
  const int64_t group = file.group();
  const bool minima = coding(file.packed).minima;
  const DecodeBlock decode = kernels().decoders[size_t(format)];
  Codes block;
  for (int64_t at = 0; at < k; at += file.elements, data += file.bytes, out += file.elements) {
    decode(data, block);
    for (int64_t g = 0; g < file.elements / group; ++g) {
      const float scale = block.scales[g];
      const auto* codes = block.codes + g * group;
      float* __restrict numbers = out + g * group;
      if (file.table)
        for (int64_t i = 0; i < group; ++i) numbers[i] = scale * float(file.table[codes[i]]);
      else
        for (int64_t i = 0; i < group; ++i) numbers[i] = scale * float(codes[i]);
      for (int64_t i = 0; i < group && minima; ++i) numbers[i] += block.minima[g];
    }
  }
}

}  // namespace bifolio
