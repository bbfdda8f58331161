// A test of the kernels without Python: every instruction set of this machine against plain C++, then how fast each is.
//
//   scripts/native-selftest          builds this for the machine it runs on, and runs it
//   scripts/native-selftest --few    products of a few sizes alone: enough for an emulator
//   scripts/native-selftest --time   with the speed of products; both can be given
//
// Results must be equal bit for bit, except where tiles have an arithmetic of their own (bfloat16 caches, bfloat16 and
// quantised weights).
// "tiles" is the code of AMX on tile registers in plain C++: these two must be equal everywhere.
#include <cstdlib>

#include "limits.h"
#include "matrix.h"
#include "ops.h"
#include "selftest.h"

using namespace bifolio;
using namespace bifolio::selftest;

namespace {

bool few = false;  // some sizes alone

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

// Random bytes with scales that are ordinary half floats.
std::vector<uint8_t> random_rows(FileFormat format, int64_t rows, int64_t k) {
  std::vector<uint8_t> bytes(source_row_bytes(format, k) * size_t(rows));
  if (format == FileFormat::F32) {
    const auto values = normal(size_t(rows * k));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  }
  for (uint8_t& byte : bytes) byte = uint8_t(rng());
  const auto half = [&](size_t at, uint16_t word) { std::memcpy(bytes.data() + at, &word, 2); };
  for (size_t at = 0; at < bytes.size(); at += file_block(format).bytes) {
    if (format == FileFormat::F16) half(at, uint16_t(0x2000 + rng() % 0x1c00 + (rng() & 1) * 0x8000));
    if (format == FileFormat::BF16) half(at, uint16_t(0x3d00 + rng() % 0x0200 + (rng() & 1) * 0x8000));
    if (format == FileFormat::MXFP4) bytes[at] = uint8_t(118 + rng() % 4);
    if (format < FileFormat::Q8_0 || format == FileFormat::MXFP4) continue;
    if (format == FileFormat::IQ1_M) {  // four bits in each of four words
      const unsigned word = 0x2000 + rng() % 0x400;
      for (size_t i = 0; i < 4; ++i) bytes[at + 49 + 2 * i] = uint8_t((bytes[at + 49 + 2 * i] & 15) | (word >> (4 * i) & 15) << 4);
      continue;
    }
    const size_t place = format == FileFormat::Q6_K ? 208 : format == FileFormat::Q3_K ? 108 : format == FileFormat::Q2_K ? 80 : 0;
    half(at + place, uint16_t(0x2000 + rng() % 0x400));
    const bool minima = coding(file_block(format).packed).minima, positive = format >= FileFormat::Q2_K;
    if (minima) half(at + place + 2, uint16_t((positive ? 0x2000 : 0xa000) + rng() % 0x400));
  }
  return bytes;
}

// Every packed format once or more.
using enum FileFormat;
const FileFormat kFormats[] = {F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, Q5_0, Q5_K, Q2_K, Q3_K, IQ4_NL, MXFP4,
                               IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M};

// Grids of any values: those of the formats are data of a Python package.
void make_grids() {
  for (const FileFormat format : kFormats) {
    const bool is_iq3 = format == IQ3_XXS || format == IQ3_S;
    std::vector<uint8_t> numbers(grid_rows(format) * (is_iq3 ? 4 : 8));
    for (uint8_t& number : numbers) number = uint8_t(rng() % (is_iq3 ? 8 : 3));
    if (!numbers.empty()) set_grid(format, numbers);
  }
}

const char* name_of(FileFormat format) { return file_block(format).name; }
Workspace workspace;

std::vector<float> product(const std::vector<float>& x, int64_t rows, const LinearWeights& weights) {
  std::vector<float> y(size_t(rows * weights.out_features()));
  const Rows input{const_cast<float*>(x.data()), rows, weights.in_features(), weights.in_features()};
  const Rows output{y.data(), rows, weights.out_features(), weights.out_features()};
  Pool::instance().run([&](Member& m) { linear(m, input, weights, output, workspace); });
  return y;
}

// Rounding must have no bias: the slope of rounded over exact products is 1.
void check_slope(const std::string& what, const std::vector<float>& found, const std::vector<float>& expected) {
  double both = 0, squares = 0;
  for (size_t i = 0; i < found.size(); ++i) both += double(found[i]) * expected[i], squares += double(expected[i]) * expected[i];
  const double slope = both / squares;
  failures += !(std::fabs(slope - 1) < 5e-4);
  if (!(std::fabs(slope - 1) < 5e-4)) std::printf("FAILED %-34s has a slope of %.5f\n", what.c_str(), slope);
}

// The product with the weights of the file, summed in double precision, and the limit of the error on tiles.
//
// A product of tiles is the sum of x (1 + e) w (1 + f). Rounding x to bfloat16 gives |e| <= 2^-8. A weight is w * kWidening with up to 2^-7 of
// it cut off: 1 + f is between kWidening (1 - 2^-7) and kWidening, so that |f| < 0.0051. The error is the sum of x w times at most 2^-8 + 0.0051 =
// 0.0091 each. The signs of x are independent of |x|, e, w and f, and symmetric: by Hoeffding's inequality such a sum exceeds 6 times the root of the
// sum of squares of its terms with a probability below 2 exp(-18) = 3e-8, whether the roundings of weights cancel or (few values: IQ1) do not.
// The rest is for roundings of sums and of scales.
struct ExactProduct {
  std::vector<float> y;
  std::vector<double> limit;
};
constexpr double kTileTerm = 0.0091, kHoeffding = 6, kOtherRoundings = 1e-6;

ExactProduct exact_product(const std::vector<float>& x, int64_t rows, FileFormat format, const std::vector<uint8_t>& bytes, int64_t n) {
  const int64_t k = int64_t(x.size()) / rows;
  ExactProduct result{std::vector<float>(size_t(rows * n)), std::vector<double>(size_t(rows * n))};
  std::vector<float> w(static_cast<size_t>(k));
  for (int64_t column = 0; column < n; ++column) {
    dequantize_row(format, bytes.data() + size_t(column) * source_row_bytes(format, k), k, w.data());
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0, squares = 0, sizes = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double term = double(x[size_t(row * k + i)]) * double(w[size_t(i)]);
        sum += term, squares += term * term, sizes += std::fabs(term);
      }
      result.y[size_t(row * n + column)] = float(sum);
      result.limit[size_t(row * n + column)] = kHoeffding * kTileTerm * std::sqrt(squares) + kOtherRoundings * sizes;
    }
  }
  return result;
}

void check_limits(const std::string& what, const std::vector<float>& found, const ExactProduct& exact) {
  double most = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    const double share = std::fabs(double(found[i]) - double(exact.y[i])) / exact.limit[i];
    most = std::isnan(share) ? 1e30 : std::max(most, share);
  }
  failures += !(most <= 1);
  if (!(most <= 1)) std::printf("FAILED %-34s has %.3f of the largest error that rounding can explain\n", what.c_str(), most);
}

void check_products() {
  for (const FileFormat format : kFormats) {
    const int64_t unit = file_block(format).elements;
    const bool dense = unit == 1, wide = unit == 256;
    for (int64_t rows : few ? std::vector<int64_t>{1, 4, 6, 17} : std::vector<int64_t>{1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 70, 140, 530})
      for (auto [n, k] : std::vector<std::pair<int64_t, int64_t>>{
               {16, wide ? 256 : 32}, {37, wide ? 512 : 96}, {50, wide ? 2304 : 2112}, {33, dense ? 77 : wide ? 768 : 160}, {300, wide ? 512 : 544}}) {
        if (few && n != 37) continue;
        if ((rows > 500) != (n == 300)) continue;  // more rows and columns than tiles take at a time, once
        const auto bytes = random_rows(format, n, k);
        const LinearWeights weights({{format, bytes.data(), n, source_row_bytes(format, k)}}, k, nullptr);
        const auto x = normal(size_t(rows * k));
        char name[80];
        std::snprintf(name, sizeof name, "%s %lldx%lldx%lld", name_of(format), (long long)rows, (long long)n, (long long)k);
        check(name, format >= FileFormat::BF16 ? 0.02 : 0, [&] { return product(x, rows, weights); });
        set_isa("tiles");
        const auto found = product(x, rows, weights);
        const ExactProduct exact = exact_product(x, rows, format, bytes, n);
        check_limits(std::string(name) + " of floats", found, exact);
        if (rows * n * k > 5000000) check_slope(name, found, exact.y);
        for (const std::string& isa : available_isas()) {  // every row must be equal to the row alone
          set_isa(isa);
          const auto all = product(x, rows, weights);
          for (int64_t r = 0; r < rows; r += std::max<int64_t>(1, rows / 3)) {
            const auto one = product({x.begin() + r * k, x.begin() + (r + 1) * k}, 1, weights);
            report(std::string(name) + " row alone", isa, compare(one, {all.begin() + r * n, all.begin() + (r + 1) * n}), 0, true);
          }
        }
        set_isa("");
      }
  }
}

// Parts of several formats in one layer: each must be equal to the part alone.
void check_mixed_formats() {
  const int64_t n = 40, k = 256;
  for (const FileFormat first : {FileFormat::F16, FileFormat::BF16, FileFormat::Q4_0, FileFormat::Q6_K, FileFormat::IQ2_XXS})
    for (int64_t rows : {1, 5, 16, 35}) {
      const auto left = random_rows(first, n, k), right = random_rows(FileFormat::Q8_0, n, k);
      const SourceRows parts[] = {{first, left.data(), n, source_row_bytes(first, k)},
                                  {FileFormat::Q8_0, right.data(), n, source_row_bytes(FileFormat::Q8_0, k)}};
      const LinearWeights both({parts[0], parts[1]}, k, nullptr), one({parts[0]}, k, nullptr), other({parts[1]}, k, nullptr);
      const auto x = normal(size_t(rows * k));
      for (const std::string& isa : available_isas()) {
        set_isa(isa);
        const auto all = product(x, rows, both), a = product(x, rows, one), b = product(x, rows, other);
        std::vector<float> joined;
        for (int64_t r = 0; r < rows; ++r) {
          joined.insert(joined.end(), a.begin() + r * n, a.begin() + (r + 1) * n);
          joined.insert(joined.end(), b.begin() + r * n, b.begin() + (r + 1) * n);
        }
        report(std::string(name_of(first)) + " beside q8_0", isa, compare(all, joined), 0, true);
      }
    }
  set_isa("");
}

// Two products with a gate between them, at once and one after the other.
void check_gated() {
  const int64_t k = 256, width = 512;
  for (const FileFormat first : {FileFormat::F32, FileFormat::BF16, FileFormat::Q8_0, FileFormat::Q4_0, FileFormat::Q4_K, FileFormat::IQ4_XS, FileFormat::IQ2_S})
    for (const FileFormat last : {FileFormat::F16, FileFormat::BF16, FileFormat::Q8_0, FileFormat::Q4_1, FileFormat::Q6_K, FileFormat::Q5_K, FileFormat::Q2_K})
      for (int64_t rows : {16, 35, 530}) {
        const auto pair_rows = random_rows(first, 2 * width, k), last_rows = random_rows(last, k, width);
        const auto x = normal(size_t(rows * k)), bias = normal(size_t(2 * width));
        const LinearWeights pair({{first, pair_rows.data(), 2 * width, source_row_bytes(first, k)}}, k, bias.data());
        const LinearWeights end({{last, last_rows.data(), k, source_row_bytes(last, width)}}, width, nullptr);
        for (const std::string& isa : available_isas()) {
          set_isa(isa);
          std::vector<float> products = product(x, rows, pair), middle(size_t(rows * width)), found(size_t(rows * k));
          const Rows input{const_cast<float*>(x.data()), rows, k, k}, between{middle.data(), rows, width, width};
          Pool::instance().run([&](Member& m) { act_mul(m, {products.data(), rows, 2 * width, 2 * width}, Activation::Silu, between); });
          const auto expected = product(middle, rows, end);
          Pool::instance().run([&](Member& m) {
            activated_linear(m, input, pair, Activation::Silu, end, between, {found.data(), rows, k, k}, workspace);
          });
          report(std::string("gated ") + name_of(first) + " " + name_of(last), isa, compare(found, expected), 0, true);
        }
      }
  set_isa("");
}

void check_rows() {
  for (int64_t size : {1, 15, 16, 31, 64, 577}) {
    const auto x = normal(size_t(size), 3.0f), w = normal(size_t(size)), b = normal(size_t(size));
    std::vector<float> y(x.size());
    for (bool centered : {false, true})
      check("norm", 0, [&] {
        kernels().norm_row(x.data(), {w.data(), centered ? b.data() : nullptr, size, 1e-5f, centered}, y.data());
        return y;
      });
    for (int activation = 0; activation < 5; ++activation)
      check("act", 0, [&] { kernels().act_mul_row(x.data(), w.data(), size, Activation(activation), y.data()); return y; });
    check("gate", 0, [&] { kernels().gate_row(x.data(), w.data(), size, y.data()); return y; });
    check("softcap", 0, [&] { y = x; kernels().softcap_row(y.data(), size, 2.0f); return y; });
  }
}

void time_products(int64_t n, int64_t k) {
  for (const FileFormat format : kFormats) {
    const auto bytes = random_rows(format, n, k);
    const double start = now();
    const LinearWeights weights({{format, bytes.data(), n, source_row_bytes(format, k)}}, k, nullptr);
    std::printf("%-8s packed at %.2f G weights/s\n", name_of(format), 1e-9 * double(n * k) / (now() - start));
    for (int64_t rows : {1, 4, 16, 128, 512}) {
      const auto x = normal(size_t(rows * k));
      for (const std::string& isa : available_isas()) {
        if (isa == "generic" || isa == "tiles") continue;
        set_isa(isa);
        double best = 1e9;
        for (int repeat = 0; repeat < 5; ++repeat) {
          const double begin = now();
          product(x, rows, weights);
          best = std::min(best, now() - begin);
        }
        std::printf("%-8s %-6s rows %4lld   %8.1f Gop/s   %6.1f GB/s of weights\n", isa.c_str(), name_of(format),
                    (long long)rows, 2e-9 * double(rows * n * k) / best, 1e-9 * double(weights.num_bytes()) / best);
      }
    }
  }
  set_isa("");
}

}  // namespace

int main(int argc, char** argv) {
  bool timed = false;
  for (int i = 1; i < argc; ++i) few |= std::string(argv[i]) == "--few", timed |= std::string(argv[i]) == "--time";
  std::printf("tiles in plain C++\n");
  for (const std::string& isa : available_isas()) std::printf("instruction set %s\n", isa.c_str());
  make_grids();
  check_rows();
  check_products();
  check_mixed_formats();
  if (!few) check_gated(), check_attention();
  std::printf(failures ? "%d comparisons failed\n" : "all comparisons passed\n", failures);
  if (timed) {
    std::printf("%d threads, %.1f GB/s read from memory\n", Pool::instance().num_threads(), read_bandwidth(Pool::instance(), size_t(256) << 20) * 1e-9);
    for (const std::string& isa : available_isas()) {
      set_isa(isa);
      std::printf("%-8s at best %8.1f Gop/s of bytes, %8.1f Gop/s of floats\n", isa.c_str(), product_rate(Pool::instance(), true) * 1e-9, product_rate(Pool::instance(), false) * 1e-9);
    }
    time_products(4096, 4096);
  }
  return failures != 0;
}
