#include "attention_plan.h"

#include <algorithm>

namespace bifolio {
namespace {

constexpr int64_t kMinShared = 2 * kTile;                  // tokens that sequences must share to come into one unit
constexpr int64_t kMaxPartials = (int64_t(64) << 20) / 4;  // floats of all partial states
constexpr int64_t kFewUnits = 4, kManyUnits = 8;           // units of each thread: the least of a plan, and enough to balance any

struct Chunk {
  int64_t first, count;  // queries
};

// Neighbours that share enough of their contexts come together, at most `most`; larger groups are cut evenly.
std::vector<Chunk> cut(const std::vector<Query>& queries, int64_t most) {
  const int64_t count = int64_t(queries.size());
  std::vector<Chunk> chunks;
  for (int64_t first = 0, last; first < count; first = last) {
    for (last = first + 1; last < count && queries[size_t(last)].shared >= kMinShared;) ++last;
    const int64_t size = last - first, parts = (size + most - 1) / most;
    for (int64_t i = 0; i < parts; ++i) chunks.push_back({first + size * i / parts, size * (i + 1) / parts - size * i / parts});
  }
  return chunks;
}

void add_units(const Chunk& chunk, const std::vector<Query>& queries, const AttentionConstants& shape, AttentionPlan& plan) {
  int64_t first = INT64_MAX, last = 0;
  for (int64_t i = chunk.first; i < chunk.first + chunk.count; ++i) {
    const int64_t position = queries[size_t(i)].position;
    first = std::min(first, window_begin(shape, position) / kSpan);
    last = std::max(last, (queries[size_t(i)].end - 1) / kSpan);
  }
  if (!plan.by_spans) first = last = -1;
  for (int32_t head = 0; head < shape.num_kv_heads; ++head)
    for (int64_t span = first; span <= last; ++span)
      plan.units.push_back({int32_t(chunk.first), int32_t(chunk.count), head, int32_t(span)});
}

// Threads take units one after the other, mostly in turns. In this order the next unit of a thread follows its last one in
// memory.
std::vector<AttentionUnit> take_turns(const std::vector<AttentionUnit>& units, size_t num_threads) {
  std::vector<AttentionUnit> turns;
  turns.reserve(units.size());
  const size_t part = (units.size() + num_threads - 1) / num_threads;
  for (size_t i = 0; i < part; ++i)
    for (size_t unit = i; unit < units.size(); unit += part) turns.push_back(units[unit]);
  return turns;
}

// Whether so many units by queries keep all threads busy to the end, with no need to split contexts.
bool keep_busy(Phase phase, int64_t units, int64_t num_threads) {
  if (units >= kManyUnits * num_threads) return true;
  if (phase == Phase::Decode || units < kFewUnits * num_threads) return false;
  // Units of a prompt take about the same time: threads take turns, and some may have none in the last turn. Partial states
  // cost about as much as one place of sixteen that stays empty.
  const int64_t places = round_up(units, num_threads);
  return 16 * (places - units) <= places;
}

}  // namespace

AttentionPlan plan_attention(Phase phase, const std::vector<Query>& queries, const AttentionConstants& shape, int num_threads) {
  AttentionPlan plan;
  for (const Query& query : queries) plan.max_spans = std::max(plan.max_spans, (query.end - 1) / kSpan + 1);
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t partials = int64_t(queries.size()) * shape.num_heads * plan.max_spans * partial_state(shape);
  const bool can_split = plan.max_spans > 1 && partials < kMaxPartials;
  int64_t most = std::min(std::max<int64_t>(1, kMaxRows / group), int64_t(queries.size()));
  for (;; most /= 2) {  // the largest units that leave some for each thread
    const std::vector<Chunk> chunks = cut(queries, most);
    plan.by_spans = can_split && !keep_busy(phase, int64_t(chunks.size()) * shape.num_kv_heads, num_threads);
    plan.units.clear();
    for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) add_units(*chunk, queries, shape, plan);
    if (most <= 1 || int64_t(plan.units.size()) >= kFewUnits * num_threads) break;
  }
  if (plan.by_spans) plan.units = take_turns(plan.units, size_t(num_threads)), plan.partial_floats = size_t(partials);
  return plan;
}

}  // namespace bifolio
