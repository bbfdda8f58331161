// A test of the kernels without Python: every instruction set of this machine against plain C++, then how fast each is.
//
//   scripts/native-selftest          builds this for the machine it runs on, and runs it
//   scripts/native-selftest --few    products of a few sizes alone: enough for an emulator
//
// Results must be equal bit for bit, except where tiles have an arithmetic of their own (bfloat16 caches, bfloat16 and
// quantised weights).
// "tiles" is the code of AMX on tile registers in plain C++: these two must be equal everywhere. Plain C++ is compiled with a
// fused multiply-add here, which it does not have on x86 otherwise.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "isa.h"
#include "limits.h"
#include "matrix.h"
#include "ops.h"

using namespace bifolio;

namespace {

std::mt19937 rng(1);
bool few = false;  // some sizes alone
int failures = 0;

std::vector<float> normal(size_t count, float scale = 1.0f) {
  std::normal_distribution<float> distribution(0.0f, scale);
  std::vector<float> values(count);
  for (float& value : values) value = distribution(rng);
  return values;
}

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
    const size_t place = format == FileFormat::Q6_K ? 208 : format == FileFormat::Q3_K ? 108 : format == FileFormat::Q2_K ? 80 : 0;
    half(at + place, uint16_t(0x2000 + rng() % 0x400));
    const bool minima = coding(file_block(format).packed).minima, positive = format >= FileFormat::Q2_K;
    if (minima) half(at + place + 2, uint16_t((positive ? 0x2000 : 0xa000) + rng() % 0x400));
  }
  return bytes;
}

struct Comparison {
  double difference = 0;  // relative to the largest
  bool equal = true;
};

Comparison compare(const std::vector<float>& a, const std::vector<float>& b) {
  Comparison result;
  double largest = 1e-30;
  for (float value : b) largest = std::max(largest, double(std::fabs(value)));
  for (size_t i = 0; i < a.size(); ++i) {
    result.equal = result.equal && std::memcmp(&a[i], &b[i], 4) == 0;
    const double error = std::fabs(double(a[i]) - double(b[i])) / largest;
    result.difference = std::isnan(error) ? 1e30 : std::max(result.difference, error);
  }
  return result;
}

void report(const std::string& what, const std::string& isa, const Comparison& found, double tolerance, bool exact) {
  const bool good = exact ? found.equal : found.difference <= tolerance;
  failures += !good;
  if (!good) std::printf("FAILED %-34s %-8s differs by %.2e%s\n", what.c_str(), isa.c_str(), found.difference, exact ? " (must be equal)" : "");
}

// The result of each instruction set against that of plain C++; of tiles within a tolerance, where that is not 0.
template <class Work>
void check(const std::string& what, double tolerance_of_tiles, Work work) {
  set_isa("generic");
  const std::vector<float> expected = work();
  set_isa("tiles");
  const std::vector<float> on_tiles = work();
  report(what, "tiles", compare(on_tiles, expected), tolerance_of_tiles, tolerance_of_tiles == 0);
  for (const std::string& isa : available_isas()) {
    if (isa == "generic" || isa == "tiles") continue;
    set_isa(isa);
    report(what, isa, compare(work(), isa == "amx" ? on_tiles : expected), 0, true);
  }
  set_isa("");
}

// Every packed format once or more.
using enum FileFormat;
const FileFormat kFormats[] = {F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, Q5_0, Q5_K, Q2_K, Q3_K, IQ4_NL, MXFP4};
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

// The product with the weights of the file, summed in double precision.
std::vector<float> exact_product(const std::vector<float>& x, int64_t rows, FileFormat format, const std::vector<uint8_t>& bytes, int64_t n) {
  const int64_t k = int64_t(x.size()) / rows;
  std::vector<float> y(size_t(rows * n)), w(static_cast<size_t>(k));
  for (int64_t column = 0; column < n; ++column) {
    dequantize_row(format, bytes.data() + size_t(column) * source_row_bytes(format, k), k, w.data());
    for (int64_t row = 0; row < rows; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += double(x[size_t(row * k + i)]) * double(w[size_t(i)]);
      y[size_t(row * n + column)] = float(sum);
    }
  }
  return y;
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
        const auto found = product(x, rows, weights), exact = exact_product(x, rows, format, bytes, n);
        report(std::string(name) + " of floats", "tiles", compare(found, exact), 0.006, false);
        if (rows * n * k > 5000000) check_slope(name, found, exact);
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
  for (const FileFormat first : {FileFormat::F16, FileFormat::BF16, FileFormat::Q4_0, FileFormat::Q6_K})
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
  for (const FileFormat first : {FileFormat::F32, FileFormat::BF16, FileFormat::Q8_0, FileFormat::Q4_0, FileFormat::Q4_K, FileFormat::IQ4_XS})
    for (const FileFormat last : {FileFormat::F16, FileFormat::BF16, FileFormat::Q8_0, FileFormat::Q4_1, FileFormat::Q6_K, FileFormat::Q5_K})
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
            gated_linear(m, input, pair, Activation::Silu, end, between, {found.data(), rows, k, k}, workspace);
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
    check("argmax", 0, [&] { return std::vector<float>{float(kernels().argmax_row(x.data(), size))}; });
  }
}

void check_attention() {
  for (int type = 0; type < 4; ++type)
    for (int64_t dim : {32, 40, 64, 80, 96, 128, 256})
      for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 128})
        for (int64_t context : {1, 30, 64, 201}) {
          if (type == 3 && dim % kQuantBlock) continue;
          const size_t row_bytes = type == 3 ? size_t(dim + dim / 32 * 2) : size_t(dim) * (type == 0 ? 4 : 2);
          const int64_t block_size = dim == 96 ? 8 : 16, blocks = 256 / block_size;
          std::vector<uint8_t> keys(size_t(blocks * block_size) * row_bytes), values(keys.size());
          for (int64_t i = 0; i < blocks * block_size; ++i) {
            kGenericKernels.store_kv_row(normal(size_t(dim)).data(), dim, KvType(type), keys.data() + size_t(i) * row_bytes);
            kGenericKernels.store_kv_row(normal(size_t(dim)).data(), dim, KvType(type), values.data() + size_t(i) * row_bytes);
          }
          const KvLayer kv{KvType(type), keys.data(), values.data(), block_size, 1, dim, row_bytes};
          std::vector<int32_t> table;
          for (int32_t i = 0; i < blocks; ++i) table.push_back((i * 5 + 3) % int32_t(blocks));
          const auto query = normal(size_t(rows * dim), 2.4f / std::sqrt(float(dim)));
          std::vector<int64_t> begin, end;
          for (int64_t r = 0; r < rows; ++r) {
            end.push_back(std::max<int64_t>(1, context - r % 9));
            begin.push_back(std::max<int64_t>(0, end.back() - 150));
          }
          char name[80];
          std::snprintf(name, sizeof name, "attention kv%d dim %lld rows %lld ctx %lld", type, (long long)dim, (long long)rows, (long long)context);
          const int64_t padded = round_up(dim, 16);
          const auto attend_rows = [&](int64_t first, int64_t count) {
            std::vector<float> maximum(count), total(count), mixed(count * padded);
            std::vector<uint8_t> scratch(attention_scratch_bytes(dim));
            const AttentionRows state{count, query.data() + first * dim, begin.data() + first, end.data() + first,
                                      maximum.data(), total.data(), mixed.data(), (rows + context) % 3 ? 0.0f : 3.0f};
            state.clear(padded);
            kernels().attend_part(kv, 0, table.data(), 0, kSpan, state, scratch.data());
            mixed.insert(mixed.end(), total.begin(), total.end());
            return mixed;
          };
          check(name, type == 2 ? 0.015 : 0, [&] { return attend_rows(0, rows); });
          for (const std::string& isa : available_isas()) {  // every row must be equal to the row alone
            set_isa(isa);
            const auto all = attend_rows(0, rows);
            for (int64_t r = 0; r < rows; r += std::max<int64_t>(1, rows / 3)) {
              const auto alone = attend_rows(r, 1);
              const Comparison found = compare({alone.begin(), alone.begin() + padded}, {all.begin() + r * padded, all.begin() + (r + 1) * padded});
              report(std::string(name) + " row alone", isa, found, 0, true);
            }
          }
          set_isa("");
        }
}

// A NaN in a query must stay NaN.
void check_nan() {
  const int64_t dim = 64;
  std::vector<uint8_t> cache(size_t(kTile * dim) * 2, 0x3c);
  const KvLayer kv{KvType::BF16, cache.data(), cache.data(), kTile, 1, dim, size_t(dim) * 2};
  const int32_t table[] = {0};
  const uint32_t bits = 0x7fffffff;
  set_isa("tiles");
  for (int64_t rows : {1, 5, 20}) {
    std::vector<float> query(size_t(rows * dim), 0.5f), maximum(rows), total(rows), mixed(rows * dim);
    std::memcpy(&query[3], &bits, 4);
    std::vector<int64_t> begin(rows, 0), end(rows, kTile);
    std::vector<uint8_t> scratch(attention_scratch_bytes(dim));
    const AttentionRows state{rows, query.data(), begin.data(), end.data(), maximum.data(), total.data(), mixed.data()};
    state.clear(dim);
    kernels().attend_part(kv, 0, table, 0, kSpan, state, scratch.data());
    for (int64_t r = 0; r < rows; ++r) {
      failures += std::isnan(total[r]) != (r == 0);
      if (std::isnan(total[r]) != (r == 0)) std::printf("FAILED attention: row %lld of %lld with one NaN\n", (long long)r, (long long)rows);
    }
  }
  set_isa("");
}

// Queries of sequences that have nothing in common: `count` each, the last at the end of a context of `length` tokens.
std::vector<Query> some_queries(int64_t sequences, int64_t count, int64_t length) {
  std::vector<Query> queries;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t q = 0; q < count; ++q) queries.push_back({s * count + q, length - count + q, nullptr, q ? INT64_MAX : 0});
  return queries;
}

// The phase selects the plan, and each plan has every visible span of every (query, kv head) exactly once.
void check_plan(const char* name, Phase phase, const std::vector<Query>& queries, int threads, bool by_spans, int64_t window = 0) {
  const AttentionConstants shape{9, 3, 64, 1.0f, window, false, nullptr, nullptr};
  const AttentionPlan plan = plan_attention(phase, queries, shape, threads);
  std::vector<int> seen(queries.size() * 3 * size_t(plan.max_spans));
  for (const AttentionUnit& unit : plan.units)
    for (int64_t i = unit.first; i < unit.first + unit.count; ++i)
      for (int64_t span = 0; span < plan.max_spans; ++span)
        seen[size_t((i * 3 + unit.kv_head) * plan.max_spans + span)] += unit.span < 0 || unit.span == span;
  bool good = plan.by_spans == by_spans && (plan.partial_floats > 0) == by_spans;
  for (size_t i = 0; i < seen.size(); ++i) {
    const int64_t position = queries[i / size_t(3 * plan.max_spans)].position, span = int64_t(i) % plan.max_spans;
    const bool visible = span >= window_begin(shape, position) / kSpan && span <= position / kSpan;
    good = good && seen[i] <= 1 && (!visible || seen[i] == 1);
  }
  failures += !good;
  if (!good) std::printf("FAILED plan of %s\n", name);
}

void check_plans() {
  check_plan("one decode behind a long context", Phase::Decode, some_queries(1, 1, 4096), 2, true);
  check_plan("one decode behind a short context", Phase::Decode, some_queries(1, 1, 256), 2, false);
  check_plan("many decodes", Phase::Decode, some_queries(64, 1, 4096), 2, false);
  check_plan("decodes on many threads", Phase::Decode, some_queries(64, 1, 4096), 64, true);
  check_plan("a decode with a window", Phase::Decode, some_queries(1, 3, 4000), 2, true, 700);
  check_plan("a prompt", Phase::Prefill, some_queries(1, 512, 512), 2, false);
  check_plan("a prompt behind a prefix", Phase::Prefill, some_queries(1, 128, 4096), 2, false);
  check_plan("the same as decodes", Phase::Decode, some_queries(1, 128, 4096), 2, true);
  check_plan("a short prompt behind a prefix", Phase::Prefill, some_queries(1, 8, 4096), 2, true);
  check_plan("a prompt that does not come out even", Phase::Prefill, some_queries(1, 512, 4096), 7, true);
  check_plan("a prompt with a window", Phase::Prefill, some_queries(2, 300, 3000), 2, false, 400);
  check_plan("no queries", Phase::Prefill, {}, 2, false);
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
        if (isa == "generic") continue;
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
  few = argc > 1 && std::string(argv[1]) == "--few";
  std::printf("tiles in plain C++\n");
  for (const std::string& isa : available_isas()) std::printf("instruction set %s\n", isa.c_str());
  check_rows();
  check_products();
  check_mixed_formats();
  if (!few) check_gated(), check_attention(), check_nan(), check_plans();
  std::printf(failures ? "%d comparisons failed\n" : "all comparisons passed\n", failures);
  if (argc > 1 && std::string(argv[1]) == "--time") {
    std::printf("%d threads, %.1f GB/s read from memory\n", Pool::instance().num_threads(), read_bandwidth(Pool::instance(), size_t(256) << 20) * 1e-9);
    for (const std::string& isa : available_isas()) {
      set_isa(isa);
      std::printf("%-8s at best %8.1f Gop/s of bytes, %8.1f Gop/s of floats\n", isa.c_str(), product_rate(Pool::instance(), true) * 1e-9, product_rate(Pool::instance(), false) * 1e-9);
    }
    time_products(4096, 4096);
  }
  return failures != 0;
}
