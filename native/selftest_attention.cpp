// The self-test of attention: parts of contexts in every instruction set, and the plans of both phases.
#include "attention_plan.h"
#include "limits.h"
#include "ops.h"
#include "selftest.h"

namespace bifolio::selftest {
namespace {

// Every type of cache: each row must be equal to the row alone.
void check_parts() {
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

// A cache of one head whose values are its keys, in blocks of mixed order.
struct SharedCache {
  SharedCache(KvType type, int64_t dim, int64_t blocks, int64_t block_size) : bytes(size_t(blocks * block_size) * row_bytes(type, dim)) {
    for (int64_t i = 0; i < blocks * block_size; ++i)
      kGenericKernels.store_kv_row(normal(size_t(dim)).data(), dim, type, bytes.data() + size_t(i) * row_bytes(type, dim));
    for (int32_t i = 0; i < blocks; ++i) table.push_back((i * 5 + 3) % int32_t(blocks));
    layer = {type, bytes.data(), bytes.data(), block_size, 1, dim, row_bytes(type, dim)};
  }
  static size_t row_bytes(KvType type, int64_t dim) {
    return type == KvType::Q8_0 ? size_t(dim + dim / 32 * 2) : size_t(dim) * (type == KvType::F32 ? 4 : 2);
  }
  std::vector<uint8_t> bytes;
  std::vector<int32_t> table;
  KvLayer layer{};
};

// Scores of an indexer in every instruction set, and each query's alone.
void check_index(const SharedCache& cache, int64_t queries, int64_t heads) {
  const int64_t dim = cache.layer.head_dim, context = 201, stride = round_up(context, kTile);
  const auto query = normal(size_t(queries * heads * dim)), weights = normal(size_t(queries * heads));
  const auto score = [&](int64_t first, int64_t count, int64_t begin) {
    std::vector<float> scores(size_t(count * stride)), found;
    std::vector<uint8_t> scratch(attention_scratch_bytes(dim));
    const IndexRows rows{count, heads, query.data() + first * heads * dim, weights.data() + first * heads, scores.data(), stride};
    kernels().score_index(cache.layer, cache.table.data(), begin, context, rows, scratch.data());
    for (int64_t i = 0; i < count; ++i) found.insert(found.end(), scores.begin() + i * stride + begin, scores.begin() + i * stride + context);
    return found;
  };
  char name[80];
  std::snprintf(name, sizeof name, "index kv%d queries %lld heads %lld", int(cache.layer.type), (long long)queries, (long long)heads);
  check(name, 0, [&] { return score(0, queries, 0); });
  for (const std::string& isa : available_isas()) {
    set_isa(isa);
    const auto all = score(0, queries, 0), last = score(queries - 1, 1, 64);
    report(std::string(name) + " alone", isa, compare(last, {all.end() - (context - 64), all.end()}), 0, true);
  }
  set_isa("");
}

// Attention to chosen positions in every instruction set: equal to that to a cache of these alone.
void check_chosen(const SharedCache& cache, int64_t rows) {
  const KvLayer& kv = cache.layer;
  const int64_t dim = kv.head_dim, padded = round_up(dim, 16), count = 77;
  std::vector<uint8_t> own(size_t(96) * kv.row_bytes);
  std::vector<int32_t> chosen, blocks = {0, 1, 2};
  for (int32_t i = 0; i < count; ++i) {
    chosen.push_back(i * 3 + i % 2);
    const int64_t row = cache.table[size_t(chosen.back() / kv.block_size)] * kv.block_size + chosen.back() % kv.block_size;
    std::memcpy(own.data() + size_t(i) * kv.row_bytes, kv.keys + size_t(row) * kv.row_bytes, kv.row_bytes);
  }
  const KvLayer few{kv.type, own.data(), own.data(), 32, 1, dim, kv.row_bytes};
  const auto query = normal(size_t(rows * dim), 2.4f / std::sqrt(float(dim)));
  const std::vector<int64_t> begin(size_t(rows), 0), end(size_t(rows), count);
  const auto attend_rows = [&](const KvLayer& layer, const int32_t* table, const int32_t* positions) {
    std::vector<float> maximum(rows), total(rows), mixed(rows * padded);
    std::vector<uint8_t> scratch(attention_scratch_bytes(dim));
    AttentionRows state{rows, query.data(), begin.data(), end.data(), maximum.data(), total.data(), mixed.data()};
    state.chosen = positions;
    state.clear(padded);
    kernels().attend_part(layer, 0, table, 0, kSpan, state, scratch.data());
    mixed.insert(mixed.end(), total.begin(), total.end());
    return mixed;
  };
  char name[80];
  std::snprintf(name, sizeof name, "chosen kv%d rows %lld", int(kv.type), (long long)rows);
  for (const std::string& isa : available_isas()) {
    set_isa(isa);
    report(name, isa, compare(attend_rows(kv, cache.table.data(), chosen.data()), attend_rows(few, blocks.data(), nullptr)), 0, true);
  }
  set_isa("");
}

void check_choices() {
  for (int type = 0; type < 4; ++type)
    for (int64_t block_size : {16, 5}) {
      const SharedCache cache(KvType(type), 96, 256 / block_size + 1, block_size);
      for (int64_t heads : {1, 4, 7, 32}) check_index(cache, 4, heads);
      for (int64_t rows : {1, 3, 4, 20, 64}) check_chosen(cache, rows);
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
std::vector<Query> some_queries(int64_t sequences, int64_t count, int64_t length, bool causal = true) {
  std::vector<Query> queries;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t q = 0; q < count; ++q) queries.push_back({s * count + q, length - count + q, causal ? length - count + q + 1 : length, nullptr, q ? INT64_MAX : 0, length});
  return queries;
}

// The phase selects the plan, and each plan has every visible span of every (query, kv head) exactly once.
void check_plan(const char* name, Phase phase, const std::vector<Query>& queries, int threads, bool by_spans, int64_t window = 0,
                bool bidirectional = false) {
  AttentionConstants shape{9, 3, 64, 1.0f, window, false, nullptr, nullptr};
  shape.bidirectional = bidirectional;
  const AttentionPlan plan = plan_attention(phase, queries, shape, threads);
  std::vector<int> seen(queries.size() * 3 * size_t(plan.max_spans));
  for (const AttentionUnit& unit : plan.units)
    for (int64_t i = unit.first; i < unit.first + unit.count; ++i)
      for (int64_t span = 0; span < plan.max_spans; ++span)
        seen[size_t((i * 3 + unit.kv_head) * plan.max_spans + span)] += unit.span < 0 || unit.span == span;
  bool good = plan.by_spans == by_spans && (plan.partial_floats > 0) == by_spans;
  for (size_t i = 0; i < seen.size(); ++i) {
    const Query& query = queries[i / size_t(3 * plan.max_spans)];
    const int64_t span = int64_t(i) % plan.max_spans;
    const bool visible = span >= window_begin(shape, query.position) / kSpan && span * kSpan < window_end(shape, query);
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
  check_plan("a text", Phase::Prefill, some_queries(1, 700, 700), 2, false, 0, true);
  check_plan("short texts with a window", Phase::Prefill, some_queries(9, 600, 600), 2, false, 128, true);
  check_plan("an image", Phase::Prefill, some_queries(2, 300, 3000, false), 2, false);
  check_plan("an image behind a prefix", Phase::Prefill, some_queries(1, 8, 4096, false), 2, true);
  check_plan("no queries", Phase::Prefill, {}, 2, false);
}

}  // namespace

void check_attention() {
  check_parts();
  check_choices();
  check_nan();
  check_plans();
}

}  // namespace bifolio::selftest
