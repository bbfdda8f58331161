// Attention of a batch: the units of the plans of both phases (attention_plan.h), run by all threads together.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention_plan.h"
#include "isa.h"

namespace bifolio {
namespace {

std::atomic<int64_t> tokens_shared{0};

// The queries of one phase, by its plan. `partials` has room for plan.partial_floats.
class Attention {
 public:
  Attention(Rows qkv, const AttentionConstants& shape, const std::vector<Query>& queries, const KvLayer& kv, Rows out,
            const AttentionPlan& plan, float* partials)
      : qkv_(qkv), shape_(shape), queries_(queries), kv_(kv), out_(out), plan_(plan), partials_(partials),
        group_(shape.num_heads / shape.num_kv_heads), padded_(round_up(shape.head_dim, 16)) {}

  void run_unit(int64_t index, Scratch& scratch) const {
    const AttentionUnit& unit = plan_.units[size_t(index)];
    const int64_t dim = shape_.head_dim, count = unit.count * group_;
    const size_t row_floats = size_t(kMaxRows * (dim + padded_ * 2 + 5));
    uint8_t* memory = scratch.bytes(row_floats * 4 + size_t(kMaxRows) * 32 + attention_scratch_bytes(dim) + 256);
    auto* begin = reinterpret_cast<int64_t*>(memory);
    int64_t *end = begin + kMaxRows, *position = end + kMaxRows;
    auto* bias = reinterpret_cast<const float**>(position + kMaxRows);
    auto* kernel_scratch = reinterpret_cast<uint8_t*>(bias + kMaxRows);
    auto* query = reinterpret_cast<float*>(kernel_scratch + attention_scratch_bytes(dim));
    float* mixed = query + kMaxRows * dim;
    float* merged = mixed + kMaxRows * padded_;
    float *maximum = merged + kMaxRows * padded_, *total = maximum + kMaxRows, *M = total + kMaxRows, *L = M + kMaxRows, *slopes = L + kMaxRows;
    gather_rows(unit, query, begin, end, slopes);
    if (shape_.bias) gather_biases(unit, position, bias);
    const AttentionRows rows{count, query, begin, end, maximum, total, mixed, shape_.softcap, shape_.slopes ? slopes : nullptr,
                             shape_.bias ? bias : nullptr, position, shape_.reach, nullptr};
    if (unit.span >= 0) {
      attend_span(unit, unit.span, rows, kernel_scratch);
      store_partials(unit, rows);
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
    each_row(unit, [&](int64_t r, int64_t query, int64_t head) { write_out(query, head, M[r], L[r], merged + r * padded_); });
  }

  // Merges the partial states of all queries, once all units are done.
  void merge(Member& m) const {
    if (!plan_.by_spans) return;
    const int64_t piece = std::max<int64_t>(1, 32 / plan_.max_spans);
    m.split(int64_t(queries_.size()) * shape_.num_heads, piece, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) merge_spans(i / shape_.num_heads, i % shape_.num_heads);
    });
  }

 private:
  // The partial state of a span: maximum, total, mixed values.
  float* state_of(int64_t query, int64_t head, int64_t span) const {
    return partials_ + ((query * shape_.num_heads + head) * plan_.max_spans + span) * partial_state(shape_);
  }

  // The spans of one (query, head), in order.
  void merge_spans(int64_t query, int64_t head) const {
    float* states = state_of(query, head, 0);
    float M = -INFINITY, L = 0.0f;
    float* merged = states + 2;  // of the first span, which is merged first
    bool started = false;
    const Query& which = queries_[size_t(query)];
    for (int64_t span = window_begin(shape_, which.position) / kSpan; span * kSpan < window_end(shape_, which); ++span) {
      float* state = states + span * partial_state(shape_);
      if (state[1] == 0.0f) continue;
      if (!started) {
        M = state[0], L = state[1], merged = state + 2;
        started = true;
      } else {
        kernels().merge_span(&M, &L, merged, state[0], state[1], state + 2, padded_);
      }
    }
    write_out(query, head, M, L, merged);
  }

  // Calls body(row, query, head) for the rows of a unit.
  template <class Body>
  void each_row(const AttentionUnit& unit, Body body) const {
    for (int64_t i = 0, row = 0; i < unit.count; ++i)
      for (int64_t head = 0; head < group_; ++head) body(row++, unit.first + i, unit.kv_head * group_ + head);
  }

  static void scale_row(const float* __restrict x, float factor, int64_t size, float* __restrict out) {
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor;
  }

  void gather_rows(const AttentionUnit& unit, float* query, int64_t* begin, int64_t* end, float* slopes) const {
    const int64_t dim = shape_.head_dim;
    each_row(unit, [&](int64_t r, int64_t index, int64_t head) {
      const Query& which = queries_[size_t(index)];
      begin[r] = window_begin(shape_, which.position);
      end[r] = window_end(shape_, which);
      slopes[r] = shape_.slopes ? shape_.slopes[head] : 0.0f;
      scale_row(qkv_.row(which.token) + head * dim, shape_.scale_at(which.position), dim, query + r * dim);
    });
  }

  void gather_biases(const AttentionUnit& unit, int64_t* position, const float** bias) const {
    each_row(unit, [&](int64_t r, int64_t index, int64_t head) {
      position[r] = queries_[size_t(index)].position;
      bias[r] = shape_.bias + head * (2 * shape_.reach + 1) + shape_.reach;
    });
  }

  void attend_span(const AttentionUnit& unit, int64_t span, const AttentionRows& rows, uint8_t* scratch) const {
    rows.clear(padded_);
    attend_between(unit, 0, unit.count, span * kSpan, (span + 1) * kSpan, rows, scratch);
  }

  // Queries [first, last) of a unit over the positions [begin, end): neighbours together as far as they share blocks,
  // then the smaller groups that share more, and finally each sequence by itself.
  void attend_between(const AttentionUnit& unit, int64_t first, int64_t last, int64_t begin, int64_t end, const AttentionRows& rows,
                      uint8_t* scratch) const {
    const Query* queries = queries_.data() + unit.first;
    for (int64_t i = first, next; i < last; i = next) {
      int64_t shared = end;
      for (next = i + 1; next < last && queries[next].shared >= begin + kTile; ++next)
        shared = std::min(shared, queries[next].shared / kTile * kTile);
      const int64_t row = i * group_;
      const AttentionRows part{(next - i) * group_, rows.query + row * shape_.head_dim, rows.begin + row, rows.end + row,
                               rows.maximum + row, rows.total + row, rows.mixed + row * padded_, rows.softcap,
                               rows.slopes ? rows.slopes + row : nullptr, rows.bias ? rows.bias + row : nullptr,
                               rows.position + row, rows.reach, queries[i].chosen};
      if (unit.kv_head == 0) count_shared(queries + i, queries + next, begin, shared, part);
      kernels().attend_part(kv_, unit.kv_head, queries[i].table, begin, shared, part, scratch);
      if (shared < end) attend_between(unit, i, next, shared, end, rows, scratch);
    }
  }

  // Counts the tokens in [begin, end) that are read once instead of once for each sequence.
  static void count_shared(const Query* first, const Query* last, int64_t begin, int64_t end, const AttentionRows& rows) {
    int64_t others = 0;
    for (const Query* query = first + 1; query < last; ++query) others += query->table != query[-1].table;
    if (others == 0) return;
    const int64_t seen_from = std::max(begin, *std::min_element(rows.begin, rows.begin + rows.count));
    const int64_t seen_to = std::min(end, *std::max_element(rows.end, rows.end + rows.count));
    tokens_shared.fetch_add(others * std::max<int64_t>(0, seen_to - seen_from), std::memory_order_relaxed);
  }

  void store_partials(const AttentionUnit& unit, const AttentionRows& rows) const {
    each_row(unit, [&](int64_t r, int64_t query, int64_t head) {
      float* state = state_of(query, head, unit.span);
      state[0] = rows.maximum[r];
      state[1] = rows.total[r];
      std::memcpy(state + 2, rows.mixed + r * padded_, size_t(padded_) * 4);
    });
  }

  void write_out(int64_t query, int64_t head, float maximum, float total, const float* mixed) const {
    if (shape_.sinks) total += std::exp(shape_.sinks[head] - maximum);
    scale_row(mixed, 1.0f / total, shape_.head_dim, out_.row(queries_[size_t(query)].token) + head * shape_.head_dim);
  }

  const Rows qkv_;
  const AttentionConstants& shape_;
  const std::vector<Query>& queries_;
  const KvLayer& kv_;
  const Rows out_;
  const AttentionPlan& plan_;
  float* const partials_;
  const int64_t group_, padded_;
};

// A sequence of a segment that has queries.
struct Context {
  const int32_t* table;
  int64_t num_blocks;
  int64_t first_token, first_position, num_queries;
  bool causal;

  // An order in which tables with a common prefix are neighbours.
  bool operator<(const Context& other) const {
    const int order = std::memcmp(table, other.table, size_t(std::min(num_blocks, other.num_blocks)) * sizeof(int32_t));
    return order ? order < 0 : num_blocks < other.num_blocks;
  }

  int64_t shared_blocks(const Context& other) const {
    return std::mismatch(table, table + std::min(num_blocks, other.num_blocks), other.table).first - table;
  }
};

std::vector<Query> order_queries(Phase phase, const std::vector<Segment>& segments, int64_t block_size, bool share) {
  std::vector<Context> contexts;
  for (const Segment& s : segments)
    for (int64_t i = 0; i < s.num_sequences && s.phase == phase; ++i) {
      const int64_t length = s.context_lens[i], count = s.query_starts[i + 1] - s.query_starts[i];
      if (count > 0)
        contexts.push_back({s.block_tables + i * s.table_stride, (length + block_size - 1) / block_size,
                            s.token_start + s.query_starts[i], length - count, count, s.causal});
    }
  if (share) std::stable_sort(contexts.begin(), contexts.end());
  std::vector<Query> queries;
  for (size_t i = 0; i < contexts.size(); ++i) {
    const Context& c = contexts[i];
    int64_t shared = share && i > 0 ? c.shared_blocks(contexts[i - 1]) * block_size : 0;
    const int64_t length = c.first_position + c.num_queries;
    for (int64_t q = 0; q < c.num_queries; ++q, shared = INT64_MAX)
      queries.push_back({c.first_token + q, c.first_position + q, c.causal ? c.first_position + q + 1 : length, c.table, shared, length});
  }
  return queries;
}

}  // namespace

int64_t shared_tokens() { return tokens_shared.load(std::memory_order_relaxed); }

namespace {

std::vector<Query> over_chosen(std::vector<Query> queries, Rows chosen, int64_t top_k) {
  bool was_chosen = false;  // the context of the query before, which then has no blocks to share
  for (Query& query : queries) {
    const bool chooses = query.position >= top_k;
    if (chooses || was_chosen) query.shared = 0;
    if (chooses) query.position = top_k - 1, query.end = query.length = top_k, query.chosen = chosen_row(chosen, query.token);
    was_chosen = chooses;
  }
  return queries;
}

}  // namespace

Queries Queries::over(Rows chosen, int64_t top_k) const {
  Queries found = *this;
  found.prefill = over_chosen(prefill, chosen, top_k), found.decode = over_chosen(decode, chosen, top_k);
  return found;
}

Queries::Queries(const std::vector<Segment>& segments, int64_t block_size, bool share)
    : prefill(order_queries(Phase::Prefill, segments, block_size, share)),
      decode(order_queries(Phase::Decode, segments, block_size, share)) {}

void attend(Member& m, Rows qkv, const AttentionConstants& shape, const Queries& queries, const KvLayer& kv, Rows out,
            Workspace& workspace) {
  const AttentionPlan prefill = plan_attention(Phase::Prefill, queries.prefill, shape, m.size);
  const AttentionPlan decode = plan_attention(Phase::Decode, queries.decode, shape, m.size);
  float* partials = workspace.partials.array<float>(prefill.partial_floats + decode.partial_floats);
  const Attention prompts(qkv, shape, queries.prefill, kv, out, prefill, partials);
  const Attention tokens(qkv, shape, queries.decode, kv, out, decode, partials + prefill.partial_floats);
  const int64_t border = int64_t(prefill.units.size());  // the larger units come first
  m.split(border + int64_t(decode.units.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) i < border ? prompts.run_unit(i, m.scratch()) : tokens.run_unit(i - border, m.scratch());
  });
  prompts.merge(m);
  tokens.merge(m);
}

}  // namespace bifolio
