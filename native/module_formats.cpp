// The formats of files: their names and sizes, decoding and encoding.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "checksum.h"
#include "encode.h"
#include "module.h"

using namespace nanobind::literals;

namespace bifolio {

// The bytes of a matrix hold whole rows of `width` numbers.
FileFormat require_rows(const char* name, int code, const Bytes& bytes, const char* width_name, int64_t width) {
  const FileFormat format = format_of("format", code);
  require_between(width_name, width, 1, kMaxWidth);
  const int64_t elements = file_block(format).elements;
  require(width % elements == 0, width_name, " is ", width, " and must be a multiple of ", elements, " for formats of blocks");
  require(rows_in(bytes) > 0, name, " has no rows and must have at least one");
  require_width(name, bytes, int64_t(source_row_bytes(format, width)));
  return format;
}

namespace {

using BytesOut = Array<uint8_t, 2>;

// The names of the formats of files, in the order of their codes.
std::vector<std::string> file_formats() {
  std::vector<std::string> names;
  for (int code = 0; code < int(FileFormat::Count); ++code) names.emplace_back(file_block(FileFormat(code)).name);
  return names;
}

FileFormat known_format(int code) {
  require_between("format", code, 0, int(FileFormat::Count) - 1);
  return FileFormat(code);
}

// Rows of a grid of magnitudes; the kernels index it with every number that a file can hold.
void set_grid_rows(int code, const Bytes& rows) {
  const FileFormat format = known_format(code);
  const size_t count = grid_rows(format), width = format == FileFormat::IQ3_XXS || format == FileFormat::IQ3_S ? 4 : 8;
  require(count > 0, "format is ", file_block(format).name, ", which has no grid");
  require(rows.shape(0) == count && rows.shape(1) == width, "bytes has the shape (", rows.shape(0), ", ", rows.shape(1), ") and must have (",
          count, ", ", width, ")");
  const int most = width == 8 ? 4 : 8;  // magnitudes
  for (size_t i = 0; i < rows.size(); ++i)
    require(rows.data()[i] < most, "bytes holds ", int(rows.data()[i]), " and must hold numbers below ", most);
  set_grid(format, {rows.data(), rows.data() + rows.size()});
}

void dequantize(int code, const Bytes& bytes, int64_t width, const Output& out) {
  const FileFormat format = require_rows("bytes", code, bytes, "width", width);
  require(out.shape(0) == bytes.shape(0), "out has ", out.shape(0), " rows and must have ", bytes.shape(0), ", as bytes has");
  require_width("out", out, width);
  nb::gil_scoped_release release;
  Pool::instance().run([&](Member& m) {
    each_row(m, int64_t(bytes.shape(0)), width, [&](int64_t row) {
      dequantize_row(format, bytes.data() + size_t(row) * bytes.shape(1), width, out.data() + row * width);
    });
  });
}

// A float of eight bits, E4M3. Numbers without a leading one are differences of floats that have one: the processor may have been set
// to flush denormals.
inline float number_of(uint8_t code) {
  const bool has_one = code & 0x78;
  const float size = std::bit_cast<float>((uint32_t(code & 127) << 20) + ((has_one ? 120u : 121u) << 23)) - (has_one ? 0.0f : 0x1p-6f);
  return code & 128 ? -size : size;
}

// Floats of eight bits (E4M3) times the scale of their block, as bfloat16; false if one of them is not a number.
bool decode_fp8(const Bytes& bytes, const Input& scales, int64_t height, int64_t width, const BytesOut& out) {
  const int64_t rows = rows_in(bytes), k = width_of(bytes);
  require_between("height", height, 1, kMaxWidth);
  require_between("width", width, 1, kMaxWidth);
  require(rows_in(scales) == (rows + height - 1) / height && width_of(scales) == (k + width - 1) / width, "scales has the shape (",
          rows_in(scales), ", ", width_of(scales), "), which does not fit bytes and the blocks");
  require(rows_in(out) == rows, "out has ", rows_in(out), " rows and must have ", rows, ", as bytes has");
  require_width("out", out, 2 * k);
  std::atomic<bool> are_numbers{true};
  nb::gil_scoped_release release;
  Pool::instance().run([&](Member& m) {
    each_row(m, rows, k, [&](int64_t row) {
      const uint8_t* codes = bytes.data() + row * k;
      const float* factors = scales.data() + row / height * width_of(scales);
      uint8_t* target = out.data() + row * 2 * k;
      uint8_t found = 0;
      for (int64_t start = 0; start < k; start += width) {
        const float factor = factors[start / width];
        for (int64_t i = start, end = std::min(start + width, k); i < end; ++i) {
          found |= (codes[i] & 127) == 127;
          const uint32_t bits = std::bit_cast<uint32_t>(number_of(codes[i]) * factor);
          const uint16_t rounded = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
          std::memcpy(target + 2 * i, &rounded, 2);
        }
      }
      if (found) are_numbers = false;
    });
  });
  return are_numbers;
}

// Codes of 4 bits in words of 32: how eight of them lie in a word, from its lowest bits on, and the words in a matrix.
enum class CodeOrder : int {
  AlongRow,  // eight columns; [rows, columns / 8]
  DownRows,  // eight columns; [columns / 8, rows]
  Awq,       // eight rows, 0 2 4 6 1 3 5 7; [columns, rows / 8]
};

constexpr int64_t kCodesBlock = 32, kCodesBytes = 16;
constexpr int kAwqPlaces[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// The codes of a block of one row, or of eight (Awq), as Q4_0 and Q4_1 hold them: codes i and i + 16 in byte i. `target(r)` is the
// place for row r.
template <class Target>
void put_codes(CodeOrder order, const uint8_t* words, int64_t stride, int64_t row, int64_t block, Target target) {
  if (order == CodeOrder::Awq) {
    uint32_t eights[kCodesBlock];
    for (int64_t i = 0; i < kCodesBlock; ++i) std::memcpy(eights + i, words + (block * kCodesBlock + i) * stride + row / 2, 4);
    for (int64_t r = 0; r < 8; ++r) {
      uint8_t* out = target(row + r);
      const int shift = 4 * kAwqPlaces[r];
      for (int64_t i = 0; i < 16; ++i) out[i] = uint8_t((eights[i] >> shift & 15) | (eights[i + 16] >> shift & 15) << 4);
    }
    return;
  }
  uint8_t pairs[kCodesBytes];  // in the order of columns
  const bool is_along = order == CodeOrder::AlongRow;
  const uint8_t* first = is_along ? words + row * stride + block * kCodesBytes : words + block * 4 * stride + row * 4;
  for (int64_t i = 0; i < 4; ++i) std::memcpy(pairs + 4 * i, first + i * (is_along ? 4 : stride), 4);
  uint8_t* out = target(row);
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = uint8_t((pairs[i] & 15) | (pairs[i + 8] & 15) << 4);
    out[2 * i + 1] = uint8_t(pairs[i] >> 4 | (pairs[i + 8] & 0xf0));
  }
}

// Blocks of 32 columns: the header of the block's group of columns, then the codes. A group has `header_bytes` in each row of headers.
void pack_codes(int code, const Bytes& words, const Bytes& headers, int64_t header_bytes, const BytesOut& out) {
  require_between("order", code, int(CodeOrder::AlongRow), int(CodeOrder::Awq));
  require(header_bytes == 2 || header_bytes == 4, "header_bytes is ", header_bytes, " and must be 2 or 4");
  const CodeOrder order{code};
  const int64_t rows = rows_in(out), block_bytes = header_bytes + kCodesBytes, blocks = width_of(out) / block_bytes;
  const int64_t groups = width_of(headers) / header_bytes, columns = blocks * kCodesBlock;
  require(blocks > 0 && width_of(out) % block_bytes == 0, "out is ", width_of(out), " wide and must be a multiple of ", block_bytes);
  require(groups > 0 && width_of(headers) % header_bytes == 0 && blocks % groups == 0, "headers is ", width_of(headers),
          " wide, which does not fit ", blocks, " blocks");
  require(rows_in(headers) == rows, "headers has ", rows_in(headers), " rows and must have ", rows, ", as out has");
  require(order != CodeOrder::Awq || rows % 8 == 0, "out has ", rows, " rows and must have a multiple of 8");
  const int64_t shapes[][2] = {{rows, columns / 2}, {columns / 8, rows * 4}, {columns, rows / 2}};  // of bytes, by order
  require(rows_in(words) == shapes[code][0], "bytes has ", rows_in(words), " rows and must have ", shapes[code][0]);
  require_width("bytes", words, shapes[code][1]);
  const int64_t tile = 128, at_once = order == CodeOrder::Awq ? 8 : 1;  // rows: the nearest cache holds the lines of a tile
  nb::gil_scoped_release release;
  Pool::instance().run([&](Member& m) {
    m.split((rows + tile - 1) / tile, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = 0; b < blocks; ++b)
        for (int64_t row = begin * tile; row < std::min(end * tile, rows); row += at_once)
          put_codes(order, words.data(), width_of(words), row, b, [&](int64_t own) {
            uint8_t* block = out.data() + own * width_of(out) + b * block_bytes;
            const uint8_t* header = headers.data() + own * width_of(headers) + b * groups / blocks * header_bytes;
            std::memcpy(block, header, size_t(header_bytes));
            return block + header_bytes;
          });
    });
  });
}

// Each number of `importance` (f32[k], or None) weighs the errors in its column.
void encode(int code, const Input& values, const Vector& importance, const BytesOut& out) {
  const FileFormat format = known_format(code);
  const int64_t rows = rows_in(values), k = int64_t(values.shape(1));
  require(can_encode(format), "format is ", file_block(format).name, ", which cannot be written");
  require(k % file_block(format).elements == 0, "x has rows of ", k, " and must have a multiple of ", file_block(format).elements);
  require(rows_in(out) == rows, "bytes has ", rows_in(out), " rows and must have ", rows, ", as x has");
  require_width("bytes", out, int64_t(source_row_bytes(format, k)));
  if (importance.is_valid()) require_length("importance", importance, k);
  nb::gil_scoped_release release;
  Pool::instance().run([&](Member& m) {
    each_row(m, rows, 64 * k, [&](int64_t row) {
      encode_row(format, values.data() + row * k, importance.is_valid() ? importance.data() : nullptr, k, out.data() + row * int64_t(out.shape(1)));
    });
  });
}

}  // namespace

void bind_formats(nb::module_& m) {
  m.def("file_formats", &file_formats);
  m.def("packed_bytes", [](int format, int64_t n, int64_t k) {
    const FileFormat known = known_format(format);
    require_between("n", n, 1, kMaxWidth);
    require_between("k", k, 1, kMaxWidth);
    require(k % file_block(known).elements == 0, "k is ", k, " and must be a multiple of ", file_block(known).elements);
    return packed_bytes(known, n, k);
  }, "format"_a, "n"_a, "k"_a);
  m.def("needs_grid", [](int format) { return needs_grid(known_format(format)); }, "format"_a);
  m.def("set_grid", [](int format, nb::handle rows) { set_grid_rows(format, array_of<const uint8_t, 2>("bytes", rows)); }, "format"_a, array("bytes"));
  m.def("dequantize", [](int format, nb::handle bytes, int64_t width, nb::handle out) {
    dequantize(format, array_of<const uint8_t, 2>("bytes", bytes), width, array_of<float, 2>("out", out));
  }, "format"_a, array("bytes"), "width"_a, array("out"));
  m.def("decode_fp8", [](nb::handle bytes, nb::handle scales, int64_t height, int64_t width, nb::handle out) {
    return decode_fp8(array_of<const uint8_t, 2>("bytes", bytes), input("scales", scales), height, width, array_of<uint8_t, 2>("out", out));
  }, array("bytes"), array("scales"), "height"_a, "width"_a, array("out"));
  m.def("pack_codes", [](int order, nb::handle bytes, nb::handle headers, int64_t header_bytes, nb::handle out) {
    pack_codes(order, array_of<const uint8_t, 2>("bytes", bytes), array_of<const uint8_t, 2>("headers", headers), header_bytes,
               array_of<uint8_t, 2>("out", out));
  }, "order"_a, array("bytes"), array("headers"), "header_bytes"_a, array("out"));
  m.def("checksum", [](nb::handle bytes, nb::handle out) {
    const auto data = array_of<const uint8_t, 1>("bytes", bytes);
    const auto lanes = array_of<uint64_t, 1>("out", out);
    require_length("out", lanes, kChecksumLanes);
    nb::gil_scoped_release release;
    checksum(data.data(), data.shape(0), lanes.data());
  }, array("bytes"), array("out"));
  m.def("encode", [](int format, nb::handle values, nb::handle importance, nb::handle out) {
    encode(format, array_of<const float, 2>("x", values),
           importance.is_none() ? Vector() : vector("importance", importance), array_of<uint8_t, 2>("bytes", out));
  }, "format"_a, array("x"), array("importance"), array("bytes"));
}

}  // namespace bifolio
