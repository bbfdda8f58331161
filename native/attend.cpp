// How attention is cut into units of work. A unit is some query rows that share a kv head and read one or all spans:
//
//   by queries   (sequence, tile of queries, kv head): walks over all its spans, merging as it goes
//   by spans     (sequence, kv head, span): leaves a partial state, merged in order after a barrier; for few queries over
//                a long context, where there would be too few units otherwise. Leading blocks that all sequences of the
//                segment share are read once for all of them.
//
// Both compute the same numbers, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "ops.h"

namespace bifolio {
namespace {

struct Unit {
  const Segment* segment;
  int32_t sequence;      // the first one
  int32_t num_sequences; // more than one only in a shared span
  int32_t first_query, num_queries;  // of each sequence
  int32_t kv_head;
  int32_t span;          // -1: all of them
};

struct Plan {
  std::vector<Unit> units;
  bool by_spans = false;
  int64_t max_spans = 1;
};

int64_t query_count(const Segment& s, int64_t sequence) { return s.query_starts[sequence + 1] - s.query_starts[sequence]; }

// Position of the first query of a sequence in its context.
int64_t first_position(const Segment& s, int64_t sequence) { return s.context_lens[sequence] - query_count(s, sequence); }

int64_t window_begin(int64_t position, int64_t window) { return window ? std::max<int64_t>(0, position + 1 - window) : 0; }

class Attention {
 public:
  Attention(Rows qkv, const AttentionConstants& shape, const std::vector<Segment>& segments, const KvLayer& kv, Rows out)
      : qkv_(qkv), shape_(shape), segments_(segments), kv_(kv), out_(out), group_(shape.num_heads / shape.num_kv_heads),
        padded_(round_up(shape.head_dim, 16)), queries_per_unit_(std::max<int64_t>(1, kMaxRows / group_)) {}

  Plan plan(int num_threads) const {
    Plan plan;
    int64_t units = 0, tokens = 0;
    for (const Segment& s : segments_)
      for (int64_t i = 0; i < s.num_sequences; ++i) {
        const int64_t queries = query_count(s, i);
        tokens += queries;
        units += (queries + queries_per_unit_ - 1) / queries_per_unit_ * shape_.num_kv_heads;
        plan.max_spans = std::max<int64_t>(plan.max_spans, (s.context_lens[i] + kSpan - 1) / kSpan);
      }
    const bool shares = std::any_of(segments_.begin(), segments_.end(), [&](const Segment& s) {
      return s.num_sequences > 1 && s.shared_blocks * kv_.block_size >= kSpan;
    });
    const int64_t partial_bytes = tokens * shape_.num_heads * plan.max_spans * (padded_ + 2) * 4;
    plan.by_spans = plan.max_spans > 1 && partial_bytes < (int64_t(64) << 20) && (shares || units < 8 * num_threads);
    for (const Segment& s : segments_) plan.by_spans ? add_span_units(s, plan) : add_query_units(s, plan);
    return plan;
  }

  void run_unit(const Unit& unit, const Plan& plan, float* partials, Scratch& scratch) const {
    const int64_t dim = shape_.head_dim, most = std::max(kMaxRows, group_);
    const size_t row_floats = size_t(most * dim + most * padded_ * 2 + most * 4);
    uint8_t* memory = scratch.bytes(row_floats * 4 + size_t(most) * 16 + attention_scratch_bytes(dim) + 256);
    auto* begin = reinterpret_cast<int64_t*>(memory);
    int64_t* end = begin + most;
    auto* kernel_scratch = reinterpret_cast<uint8_t*>(end + most);
    auto* query = reinterpret_cast<float*>(kernel_scratch + attention_scratch_bytes(dim));
    float* mixed = query + most * dim;
    float* merged = mixed + most * padded_;
    float *maximum = merged + most * padded_, *total = maximum + most, *M = total + most, *L = M + most;
    gather_rows(unit, query, begin, end);
    const Segment& s = *unit.segment;
    const int32_t* table = s.block_tables + unit.sequence * s.table_stride;
    const int64_t count = int64_t(unit.num_sequences) * unit.num_queries * group_;
    AttentionRows rows{count, query, begin, end, maximum, total, mixed};
    const KernelTable& isa = kernels();
    if (unit.span >= 0) {
      isa.attend_span(kv_, unit.kv_head, table, unit.span * kSpan, rows, kernel_scratch);
      store_partials(unit, rows, plan, partials);
      return;
    }
    const int64_t first = *std::min_element(begin, begin + count), last = *std::max_element(end, end + count);
    for (int64_t span = first / kSpan; span * kSpan < last; ++span) {
      isa.attend_span(kv_, unit.kv_head, table, span * kSpan, rows, kernel_scratch);
      if (span == first / kSpan) {
        std::memcpy(M, maximum, size_t(count) * 4);
        std::memcpy(L, total, size_t(count) * 4);
        std::memcpy(merged, mixed, size_t(count * padded_) * 4);
      } else {
        for (int64_t r = 0; r < count; ++r)
          isa.merge_span(M + r, L + r, merged + r * padded_, maximum[r], total[r], mixed + r * padded_, padded_);
      }
    }
    for (int64_t r = 0; r < count; ++r) finish(unit, r, L[r], merged + r * padded_);
  }

  // Merge the spans of one (token, head) in order.
  void merge(int64_t token, int64_t head, const Plan& plan, float* partials) const {
    float* states = partials + (token * shape_.num_heads + head) * plan.max_spans * (padded_ + 2);
    float M = -INFINITY, L = 0.0f;
    float* merged = states + 2;  // of the first span, which is merged first
    bool started = false;
    for (int64_t span = 0; span < plan.max_spans; ++span) {
      float* state = states + span * (padded_ + 2);
      if (state[1] == 0.0f) continue;
      if (!started) {
        M = state[0], L = state[1], merged = state + 2;
        started = true;
      } else {
        kernels().merge_span(&M, &L, merged, state[0], state[1], state + 2, padded_);
      }
    }
    write_out(token, head, L, merged);
  }

  void clear_partials(int64_t token, const Plan& plan, float* partials) const {
    float* states = partials + token * shape_.num_heads * plan.max_spans * (padded_ + 2);
    for (int64_t i = 0; i < shape_.num_heads * plan.max_spans; ++i) states[i * (padded_ + 2) + 1] = 0.0f;
  }

  size_t partial_floats(const Plan& plan) const {
    return size_t(qkv_.count * shape_.num_heads * plan.max_spans * (padded_ + 2));
  }

 private:
  void add_query_units(const Segment& s, Plan& plan) const {
    for (int32_t i = 0; i < s.num_sequences; ++i)
      for (int64_t q = query_count(s, i); q > 0;) {  // the last queries see most: hand them out first
        const int64_t first = (q - 1) / queries_per_unit_ * queries_per_unit_;
        for (int32_t h = 0; h < shape_.num_kv_heads; ++h)
          plan.units.push_back({&s, i, 1, int32_t(first), int32_t(q - first), h, -1});
        q = first;
      }
  }

  void add_span_units(const Segment& s, Plan& plan) const {
    int32_t shared_spans = s.num_sequences > 1 ? int32_t(s.shared_blocks * kv_.block_size / kSpan) : 0;
    for (int32_t i = 0; i < s.num_sequences; ++i)  // all sequences must have their queries after what is shared
      if (query_count(s, i) != 1) shared_spans = 0;
    for (int32_t span = 0; span < shared_spans; ++span)
      for (int32_t i = 0; i < s.num_sequences; i += int32_t(queries_per_unit_))
        for (int32_t h = 0; h < shape_.num_kv_heads; ++h)
          plan.units.push_back({&s, i, int32_t(std::min<int64_t>(queries_per_unit_, s.num_sequences - i)), 0, 1, h, span});
    for (int32_t i = 0; i < s.num_sequences; ++i) {
      const int64_t queries = query_count(s, i);
      for (int64_t q = 0; q < queries; q += queries_per_unit_) {
        const int64_t count = std::min(queries_per_unit_, queries - q);
        const int64_t first = window_begin(first_position(s, i) + q, shape_.window) / kSpan;
        const int64_t last = first_position(s, i) + q + count;
        for (int64_t span = std::max<int64_t>(first, shared_spans); span * kSpan < last; ++span)
          for (int32_t h = 0; h < shape_.num_kv_heads; ++h)
            plan.units.push_back({&s, i, 1, int32_t(q), int32_t(count), h, int32_t(span)});
      }
    }
  }

  int64_t token_of(const Unit& unit, int64_t row) const {
    const int64_t query = row / group_;
    const Segment& s = *unit.segment;
    return s.token_start + s.query_starts[unit.sequence + query / unit.num_queries] + unit.first_query + query % unit.num_queries;
  }

  void gather_rows(const Unit& unit, float* query, int64_t* begin, int64_t* end) const {
    const Segment& s = *unit.segment;
    const int64_t count = int64_t(unit.num_sequences) * unit.num_queries * group_, dim = shape_.head_dim;
    for (int64_t r = 0; r < count; ++r) {
      const int64_t sequence = unit.sequence + r / group_ / unit.num_queries;
      const int64_t position = first_position(s, sequence) + unit.first_query + r / group_ % unit.num_queries;
      begin[r] = window_begin(position, shape_.window);
      end[r] = position + 1;
      const float* source = qkv_.row(token_of(unit, r)) + (unit.kv_head * group_ + r % group_) * dim;
      for (int64_t d = 0; d < dim; ++d) query[r * dim + d] = source[d] * shape_.scale;
    }
  }

  void store_partials(const Unit& unit, const AttentionRows& rows, const Plan& plan, float* partials) const {
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t head = unit.kv_head * group_ + r % group_;
      float* state = partials + ((token_of(unit, r) * shape_.num_heads + head) * plan.max_spans + unit.span) * (padded_ + 2);
      state[0] = rows.maximum[r];
      state[1] = rows.total[r];
      std::memcpy(state + 2, rows.mixed + r * padded_, size_t(padded_) * 4);
    }
  }

  void finish(const Unit& unit, int64_t r, float total, const float* mixed) const {
    write_out(token_of(unit, r), unit.kv_head * group_ + r % group_, total, mixed);
  }

  void write_out(int64_t token, int64_t head, float total, const float* mixed) const {
    const float inverse = 1.0f / total;
    float* target = out_.row(token) + head * shape_.head_dim;
    for (int64_t d = 0; d < shape_.head_dim; ++d) target[d] = mixed[d] * inverse;
  }

  const Rows qkv_;
  const AttentionConstants& shape_;
  const std::vector<Segment>& segments_;
  const KvLayer& kv_;
  const Rows out_;
  const int64_t group_, padded_, queries_per_unit_;
};

}  // namespace

void attend(Member& m, Rows qkv, const AttentionConstants& shape, const std::vector<Segment>& segments,
            const KvLayer& kv, Rows out, Workspace& workspace) {
  const Attention attention(qkv, shape, segments, kv, out);
  const Plan plan = attention.plan(m.size);  // every member makes the same one
  if (m.rank == 0 && plan.by_spans) workspace.partials.array<float>(attention.partial_floats(plan));
  m.barrier();
  auto* partials = workspace.partials.array<float>(0);
  if (plan.by_spans)
    m.split(qkv.count, 64, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) attention.clear_partials(token, plan, partials);
    });
  m.split(int64_t(plan.units.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) attention.run_unit(plan.units[size_t(i)], plan, partials, m.scratch());
  });
  if (plan.by_spans)
    m.split(qkv.count * shape.num_heads, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) attention.merge(i / shape.num_heads, i % shape.num_heads, plan, partials);
    });
}

}  // namespace bifolio
