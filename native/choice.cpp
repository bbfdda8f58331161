// The choice of positions by an indexer. Scores are computed in pieces of contexts by all threads, then each query's largest ones are found.
// Neither depends on the pieces: a score is that of one query and one position.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "ops.h"

namespace bifolio {
namespace {

constexpr int64_t kPiece = 2 * kSpan;             // positions of a unit of work
constexpr int64_t kMostScores = int64_t(1) << 22;  // that are computed before the largest are found: they stay in caches

// Neighbouring queries of a sequence.
struct Chunk {
  const Query* first;
  int64_t count;
  int64_t length;  // positions that the last of them sees
  float* scores;   // [count][stride()]

  int64_t stride() const { return round_up(length, kTile); }
};

struct Unit {
  const Chunk* chunk;
  int64_t begin;  // position
};

// All queries that see more than top_k positions, in chunks of at most `most`.
std::vector<Chunk> chunks_of(const std::vector<Query>& queries, int64_t top_k, int64_t most) {
  std::vector<Chunk> chunks;
  for (const Query& query : queries) {
    if (query.position < top_k) continue;
    const bool follows = !chunks.empty() && chunks.back().first->table == query.table && chunks.back().first + chunks.back().count == &query;
    if (!follows || chunks.back().count == most) chunks.push_back({&query, 0, 0, nullptr});
    ++chunks.back().count;
    chunks.back().length = query.position + 1;
  }
  return chunks;
}

// A number that is the larger, the larger the score is. NaN is the least; the zeros of both signs are equal.
uint32_t rank_of(float score) {
  const float value = std::isnan(score) ? -INFINITY : score + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The `count`-th largest of the ranks, and of those equal to it how many belong to the largest: found by their leading bits, among
// those that have them by the next ones, and by the last. `rest` has room for all of them.
struct Threshold {
  uint32_t rank = 0;
  int64_t equal = 0;
};

Threshold find_threshold(const uint32_t* ranks, int64_t size, int64_t count, uint32_t* rest) {
  constexpr int kBits = 11;
  std::array<int32_t, 1 << kBits> places;
  Threshold found;
  for (int shift : {21, 10, 0}) {
    places.fill(0);
    const uint32_t mask = shift ? (1u << kBits) - 1 : (1u << 10) - 1;
    for (int64_t i = 0; i < size; ++i) ++places[ranks[i] >> shift & mask];
    uint32_t place = mask;
    for (; places[place] < count; --place) count -= places[place];
    int64_t kept = 0;
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t rank = ranks[i];
      rest[kept] = rank;
      kept += (rank >> shift & mask) == place;
    }
    found.rank |= place << shift;
    ranks = rest, size = kept;
  }
  found.equal = count;
  return found;
}

// The places of the `count` largest of more scores, ascending; of equal ones the first.
void find_largest(const float* scores, int64_t size, int64_t count, uint32_t* scratch, int32_t* out) {
  uint32_t *ranks = scratch, *rest = scratch + size;
  for (int64_t i = 0; i < size; ++i) ranks[i] = rank_of(scores[i]);
  Threshold least = find_threshold(ranks, size, count, rest);
  for (int64_t i = 0, found = 0; found < count; ++i) {
    const bool is_equal = ranks[i] == least.rank && least.equal > 0;
    out[found] = int32_t(i);
    found += is_equal || ranks[i] > least.rank;
    least.equal -= is_equal;
  }
}

class Choice {
 public:
  Choice(Rows query, Rows weights, const AttentionConstants& shape, const KvLayer& kv, Rows out)
      : query_(query), weights_(weights), shape_(shape), kv_(kv), out_(out) {}

  // Chunks whose scores fit into the memory.
  void run(Member& m, std::vector<Chunk>& chunks, Workspace& workspace) const {
    for (size_t first = 0, last; first < chunks.size(); first = last) {
      int64_t scores = 0;
      for (last = first; last < chunks.size() && (last == first || scores < kMostScores); ++last)
        scores += chunks[last].count * chunks[last].stride();
      float* memory = workspace.partials.array<float>(size_t(scores));
      for (size_t i = first; i < last; memory += chunks[i].count * chunks[i].stride(), ++i) chunks[i].scores = memory;
      run_some(m, chunks.data() + first, chunks.data() + last);
    }
  }

 private:
  void run_some(Member& m, const Chunk* first, const Chunk* last) const {
    std::vector<Unit> units;
    std::vector<std::pair<const Chunk*, int64_t>> queries;
    for (const Chunk* chunk = first; chunk < last; ++chunk) {
      for (int64_t begin = 0; begin < chunk->length; begin += kPiece) units.push_back({chunk, begin});
      for (int64_t i = 0; i < chunk->count; ++i) queries.emplace_back(chunk, i);
    }
    m.split(int64_t(units.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) score(units[size_t(i)], m.scratch());
    });
    m.split(int64_t(queries.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) take_largest(*queries[size_t(i)].first, queries[size_t(i)].second, m.scratch());
    });
  }

  void score(const Unit& unit, Scratch& scratch) const {
    const Chunk& chunk = *unit.chunk;
    const int64_t heads = shape_.num_heads, width = shape_.query_width();
    const size_t kernel_bytes = attention_scratch_bytes(shape_.head_dim);
    uint8_t* memory = scratch.bytes(kernel_bytes + size_t(kMaxRows * (shape_.head_dim + 1)) * sizeof(float));
    auto* query = reinterpret_cast<float*>(memory + kernel_bytes);
    float* weights = query + kMaxRows * shape_.head_dim;
    for (int64_t i = 0; i < chunk.count; ++i) {
      const float* source = query_.row(chunk.first[i].token);
      for (int64_t d = 0; d < width; ++d) query[i * width + d] = source[d] * shape_.scale;
      std::memcpy(weights + i * heads, weights_.row(chunk.first[i].token), size_t(heads) * sizeof(float));
    }
    const IndexRows rows{chunk.count, heads, query, weights, chunk.scores, chunk.stride()};
    kernels().score_index(kv_, chunk.first->table, unit.begin, std::min(unit.begin + kPiece, chunk.length), rows, memory);
  }

  void take_largest(const Chunk& chunk, int64_t i, Scratch& scratch) const {
    const Query& query = chunk.first[i];
    const int64_t seen = query.position + 1;
    auto* ranks = scratch.array<uint32_t>(size_t(2 * seen + 1));
    find_largest(chunk.scores + i * chunk.stride(), seen, shape_.top_k, ranks, reinterpret_cast<int32_t*>(out_.row(query.token)));
  }

  const Rows query_, weights_;
  const AttentionConstants& shape_;
  const KvLayer& kv_;
  const Rows out_;
};

}  // namespace

void choose(Member& m, Rows query, Rows weights, const AttentionConstants& shape, const Queries& queries, const KvLayer& kv, Rows out,
            Workspace& workspace) {
  const Choice choice(query, weights, shape, kv, out);
  for (const std::vector<Query>* phase : {&queries.prefill, &queries.decode}) {
    for (const Query& each : *phase)
      if (each.position < shape.top_k) std::memset(out.row(each.token), -1, size_t(shape.top_k) * sizeof(int32_t));
    std::vector<Chunk> chunks = chunks_of(*phase, shape.top_k, std::max<int64_t>(1, kMaxRows / shape.num_heads));
    choice.run(m, chunks, workspace);
  }
}

}  // namespace bifolio
