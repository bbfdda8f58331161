// How attention is cut into units of work. A unit is some queries, one kv head, and one or all spans of the context:
//
//   by queries   (queries, kv head): walks over all its spans, merging as it goes
//   by spans     (queries, kv head, span): leaves a partial state, merged in order after a barrier; for few queries over
//                a long context, where there would be too few units otherwise
//
// Queries of several sequences come into one unit where their contexts begin with the same blocks: those are read once
// for all of them. Every query goes over its positions in the same order whatever its company, so all of this computes
// the same numbers, bit for bit.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "ops.h"

namespace bifolio {
namespace {

constexpr int64_t kMinShared = 2 * kTile;  // tokens that sequences must have in common to come into one unit

std::atomic<int64_t> tokens_shared{0};

struct Unit {
  int32_t first, count;  // queries
  int32_t kv_head;
  int32_t span;  // -1: all of them
};

struct Plan {
  std::vector<Unit> units;
  bool by_spans = false;
  int64_t max_spans = 1;
};

struct Chunk {
  int64_t first, count;  // queries
};

class Attention {
 public:
  Attention(Rows qkv, const AttentionConstants& shape, const std::vector<Query>& queries, const KvLayer& kv, Rows out)
      : qkv_(qkv), shape_(shape), queries_(queries), kv_(kv), out_(out), group_(shape.num_heads / shape.num_kv_heads),
        padded_(round_up(shape.head_dim, 16)) {}

  Plan plan(int num_threads) const {
    Plan plan;
    for (const Query& query : queries_) plan.max_spans = std::max(plan.max_spans, query.position / kSpan + 1);
    const int64_t partial_bytes = int64_t(partial_floats(plan)) * 4;
    int64_t most = std::min<int64_t>(std::max<int64_t>(1, kMaxRows / group_), int64_t(queries_.size()));
    for (;; most /= 2) {  // large units share most; but every thread needs some
      const std::vector<Chunk> chunks = cut(most);
      const int64_t units = int64_t(chunks.size()) * shape_.num_kv_heads;
      plan.by_spans = plan.max_spans > 1 && partial_bytes < (int64_t(64) << 20) && units < 8 * num_threads;
      plan.units.clear();
      for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) add_units(*chunk, plan);
      if (most <= 1 || int64_t(plan.units.size()) >= 4 * num_threads) break;
    }
    if (plan.by_spans) plan.units = take_turns(plan.units, size_t(num_threads));
    return plan;
  }

  void run_unit(const Unit& unit, const Plan& plan, float* partials, Scratch& scratch) const {
    const int64_t dim = shape_.head_dim, count = unit.count * group_;
    const size_t row_floats = size_t(kMaxRows * (dim + padded_ * 2 + 4));
    uint8_t* memory = scratch.bytes(row_floats * 4 + size_t(kMaxRows) * 16 + attention_scratch_bytes(dim) + 256);
    auto* begin = reinterpret_cast<int64_t*>(memory);
    int64_t* end = begin + kMaxRows;
    auto* kernel_scratch = reinterpret_cast<uint8_t*>(end + kMaxRows);
    auto* query = reinterpret_cast<float*>(kernel_scratch + attention_scratch_bytes(dim));
    float* mixed = query + kMaxRows * dim;
    float* merged = mixed + kMaxRows * padded_;
    float *maximum = merged + kMaxRows * padded_, *total = maximum + kMaxRows, *M = total + kMaxRows, *L = M + kMaxRows;
    gather_rows(unit, query, begin, end);
    const AttentionRows rows{count, query, begin, end, maximum, total, mixed};
    if (unit.span >= 0) {
      attend_span(unit, unit.span, rows, kernel_scratch);
      store_partials(unit, rows, plan, partials);
      return;
    }
    const int64_t first = *std::min_element(begin, begin + count), last = *std::max_element(end, end + count);
    for (int64_t span = first / kSpan; span * kSpan < last; ++span) {
      attend_span(unit, span, rows, kernel_scratch);
      if (span == first / kSpan) {
        std::memcpy(M, maximum, size_t(count) * 4);
        std::memcpy(L, total, size_t(count) * 4);
        std::memcpy(merged, mixed, size_t(count * padded_) * 4);
      } else {
        for (int64_t r = 0; r < count; ++r)
          kernels().merge_span(M + r, L + r, merged + r * padded_, maximum[r], total[r], mixed + r * padded_, padded_);
      }
    }
    each_row(unit, [&](int64_t r, int64_t query, int64_t head) { write_out(query, head, L[r], merged + r * padded_); });
  }

  // Merge the spans of one (query, head) in order.
  void merge(int64_t query, int64_t head, const Plan& plan, float* partials) const {
    float* states = partials + (query * shape_.num_heads + head) * plan.max_spans * (padded_ + 2);
    float M = -INFINITY, L = 0.0f;
    float* merged = states + 2;  // of the first span, which is merged first
    bool started = false;
    const int64_t position = queries_[size_t(query)].position;
    for (int64_t span = window_begin(position) / kSpan; span <= position / kSpan; ++span) {
      float* state = states + span * (padded_ + 2);
      if (state[1] == 0.0f) continue;
      if (!started) {
        M = state[0], L = state[1], merged = state + 2;
        started = true;
      } else {
        kernels().merge_span(&M, &L, merged, state[0], state[1], state + 2, padded_);
      }
    }
    write_out(query, head, L, merged);
  }

  size_t partial_floats(const Plan& plan) const {
    return queries_.size() * size_t(shape_.num_heads * plan.max_spans * (padded_ + 2));
  }

 private:
  int64_t window_begin(int64_t position) const { return shape_.window ? std::max<int64_t>(0, position + 1 - shape_.window) : 0; }

  // Neighbours that share enough come together, at most `most`.
  std::vector<Chunk> cut(int64_t most) const {
    std::vector<Chunk> chunks;
    for (int64_t i = 0; i < int64_t(queries_.size()); ++i) {
      if (i > 0 && chunks.back().count < most && queries_[size_t(i)].shared >= kMinShared) {
        ++chunks.back().count;
      } else {
        chunks.push_back({i, 1});
      }
    }
    return chunks;
  }

  void add_units(const Chunk& chunk, Plan& plan) const {
    int64_t first = INT64_MAX, last = 0;
    for (int64_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
      first = std::min(first, window_begin(queries_[size_t(i)].position) / kSpan);
      last = std::max(last, queries_[size_t(i)].position / kSpan);
    }
    if (!plan.by_spans) first = last = -1;
    for (int32_t head = 0; head < shape_.num_kv_heads; ++head)
      for (int64_t span = first; span <= last; ++span)
        plan.units.push_back({int32_t(chunk.first), int32_t(chunk.count), head, int32_t(span)});
  }

  // Threads take units one after the other, mostly in turns: so ordered, what a thread takes next is what follows in memory
  // on what it had before.
  static std::vector<Unit> take_turns(const std::vector<Unit>& units, size_t num_threads) {
    std::vector<Unit> turns;
    turns.reserve(units.size());
    const size_t part = (units.size() + num_threads - 1) / num_threads;
    for (size_t i = 0; i < part; ++i)
      for (size_t unit = i; unit < units.size(); unit += part) turns.push_back(units[unit]);
    return turns;
  }

  // Calls body(row, query, head) for the rows of a unit.
  template <class Body>
  void each_row(const Unit& unit, Body body) const {
    for (int64_t i = 0, row = 0; i < unit.count; ++i)
      for (int64_t head = 0; head < group_; ++head) body(row++, unit.first + i, unit.kv_head * group_ + head);
  }

  static void scale_row(const float* __restrict x, float factor, int64_t size, float* __restrict out) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor;
  }

  void gather_rows(const Unit& unit, float* query, int64_t* begin, int64_t* end) const {
    const int64_t dim = shape_.head_dim;
    each_row(unit, [&](int64_t r, int64_t index, int64_t head) {
      const Query& which = queries_[size_t(index)];
      begin[r] = window_begin(which.position);
      end[r] = which.position + 1;
      scale_row(qkv_.row(which.token) + head * dim, shape_.scale, dim, query + r * dim);
    });
  }

  void attend_span(const Unit& unit, int64_t span, const AttentionRows& rows, uint8_t* scratch) const {
    rows.clear(padded_);
    attend_between(unit, 0, unit.count, span * kSpan, (span + 1) * kSpan, rows, scratch);
  }

  // Queries [first, last) of a unit over the positions [begin, end): neighbours together as far as they share blocks,
  // then those of them that share more, and in the end each sequence by itself.
  void attend_between(const Unit& unit, int64_t first, int64_t last, int64_t begin, int64_t end, const AttentionRows& rows,
                      uint8_t* scratch) const {
    const Query* queries = queries_.data() + unit.first;
    for (int64_t i = first, next; i < last; i = next) {
      int64_t shared = end;
      for (next = i + 1; next < last && queries[next].shared >= begin + kTile; ++next)
        shared = std::min(shared, queries[next].shared / kTile * kTile);
      const int64_t row = i * group_;
      const AttentionRows part{(next - i) * group_, rows.query + row * shape_.head_dim, rows.begin + row, rows.end + row,
                               rows.maximum + row, rows.total + row, rows.mixed + row * padded_};
      if (unit.kv_head == 0) count_shared(queries + i, queries + next, begin, shared, part);
      kernels().attend_part(kv_, unit.kv_head, queries[i].table, begin, shared, part, scratch);
      if (shared < end) attend_between(unit, i, next, shared, end, rows, scratch);
    }
  }

  // Sequences beyond the first are spared the reading of what the rows see in [begin, end).
  static void count_shared(const Query* first, const Query* last, int64_t begin, int64_t end, const AttentionRows& rows) {
    int64_t others = 0;
    for (const Query* query = first + 1; query < last; ++query) others += query->table != query[-1].table;
    if (others == 0) return;
    const int64_t seen_from = std::max(begin, *std::min_element(rows.begin, rows.begin + rows.count));
    const int64_t seen_to = std::min(end, *std::max_element(rows.end, rows.end + rows.count));
    tokens_shared.fetch_add(others * std::max<int64_t>(0, seen_to - seen_from), std::memory_order_relaxed);
  }

  void store_partials(const Unit& unit, const AttentionRows& rows, const Plan& plan, float* partials) const {
    each_row(unit, [&](int64_t r, int64_t query, int64_t head) {
      float* state = partials + ((query * shape_.num_heads + head) * plan.max_spans + unit.span) * (padded_ + 2);
      state[0] = rows.maximum[r];
      state[1] = rows.total[r];
      std::memcpy(state + 2, rows.mixed + r * padded_, size_t(padded_) * 4);
    });
  }

  void write_out(int64_t query, int64_t head, float total, const float* mixed) const {
    scale_row(mixed, 1.0f / total, shape_.head_dim, out_.row(queries_[size_t(query)].token) + head * shape_.head_dim);
  }

  const Rows qkv_;
  const AttentionConstants& shape_;
  const std::vector<Query>& queries_;
  const KvLayer& kv_;
  const Rows out_;
  const int64_t group_, padded_;
};

// A sequence of a segment that has queries.
struct Context {
  const int32_t* table;
  int64_t num_blocks;
  int64_t first_token, first_position, num_queries;

  // Any order that makes neighbours of tables with a common beginning.
  bool operator<(const Context& other) const {
    const int order = std::memcmp(table, other.table, size_t(std::min(num_blocks, other.num_blocks)) * sizeof(int32_t));
    return order ? order < 0 : num_blocks < other.num_blocks;
  }

  int64_t shared_blocks(const Context& other) const {
    return std::mismatch(table, table + std::min(num_blocks, other.num_blocks), other.table).first - table;
  }
};

}  // namespace

int64_t shared_tokens() { return tokens_shared.load(std::memory_order_relaxed); }

std::vector<Query> order_queries(const std::vector<Segment>& segments, int64_t block_size, bool share) {
  std::vector<Context> contexts;
  for (const Segment& s : segments)
    for (int64_t i = 0; i < s.num_sequences; ++i) {
      const int64_t length = s.context_lens[i], count = s.query_starts[i + 1] - s.query_starts[i];
      if (count > 0)
        contexts.push_back({s.block_tables + i * s.table_stride, (length + block_size - 1) / block_size,
                            s.token_start + s.query_starts[i], length - count, count});
    }
  if (share) std::stable_sort(contexts.begin(), contexts.end());
  std::vector<Query> queries;
  for (size_t i = 0; i < contexts.size(); ++i) {
    const Context& c = contexts[i];
    int64_t shared = share && i > 0 ? c.shared_blocks(contexts[i - 1]) * block_size : 0;
    for (int64_t q = 0; q < c.num_queries; ++q, shared = INT64_MAX)
      queries.push_back({c.first_token + q, c.first_position + q, c.table, shared});
  }
  return queries;
}

void attend(Member& m, Rows qkv, const AttentionConstants& shape, const std::vector<Query>& queries, const KvLayer& kv,
            Rows out, Workspace& workspace) {
  const Attention attention(qkv, shape, queries, kv, out);
  const Plan plan = attention.plan(m.size);  // every member makes the same one
  if (m.rank == 0 && plan.by_spans) workspace.partials.array<float>(attention.partial_floats(plan));
  m.barrier();
  auto* partials = workspace.partials.array<float>(0);
  m.split(int64_t(plan.units.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) attention.run_unit(plan.units[size_t(i)], plan, partials, m.scratch());
  });
  if (plan.by_spans)
    m.split(int64_t(queries.size()) * shape.num_heads, std::max<int64_t>(1, 32 / plan.max_spans), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) attention.merge(i / shape.num_heads, i % shape.num_heads, plan, partials);
    });
}

}  // namespace bifolio
