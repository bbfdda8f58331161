// The attention segments of a batch as Python hands them over, and the operations of attention.
#include "isa.h"
#include "module_program.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

// The context of sequence i, whose last token is its last query, lies in blocks that exist.
void require_context(const Segment& s, int64_t i, const CacheHolder& cache) {
  const int64_t block_size = cache.layer(0).block_size, length = s.context_lens[i];
  const int64_t queries = int64_t(s.query_starts[i + 1]) - s.query_starts[i];
  require(queries >= 0, "query_starts must not decrease, but [", i, "] is ", s.query_starts[i], " and [", i + 1, "] is ",
          s.query_starts[i + 1]);
  require(length >= queries, "context_lens[", i, "] is ", length, " and must be at least ", queries, ", the queries of the sequence");
  require(length <= s.table_stride * block_size, "context_lens[", i, "] is ", length, ", which does not fit its block table of ",
          s.table_stride, " blocks of ", block_size, " tokens");
  const int32_t* blocks = s.block_tables + i * s.table_stride;
  for (int64_t b = 0; b * block_size < length; ++b)
    require(blocks[b] >= 0 && blocks[b] < cache.num_blocks, "block_tables[", i, ", ", b, "] names block ", blocks[b],
            ", which does not exist: the cache has ", cache.num_blocks, " blocks");
}

// `first_token`: the one after the last token of the segment before.
Segment segment_of(nb::handle item, int64_t first_token, int64_t num_tokens, const CacheHolder& cache, std::vector<Ints>& arrays,
                   std::vector<Tables>& all_tables) {
  int phase = 0;
  int64_t token_start = 0;
  require(nb::isinstance<nb::tuple>(item) && nb::len(item) == 6 && nb::isinstance<nb::int_>(item[0]) && nb::isinstance<nb::int_>(item[1]) &&
              nb::isinstance<nb::bool_>(item[5]) && nb::try_cast(item[0], phase) && nb::try_cast(item[1], token_start),
          "a segment must be a tuple (phase, token_start, query_starts, context_lens, block_tables, causal)");
  require(phase == int(Phase::Prefill) || phase == int(Phase::Decode), "phase is ", phase, " and must be 0 (prefill) or 1 (decode)");
  const Ints& starts = arrays.emplace_back(ints("query_starts", item[2]));
  const Ints& lens = arrays.emplace_back(ints("context_lens", item[3]));
  const Tables& tables = all_tables.emplace_back(array_of<const int32_t, 2>("block_tables", item[4]));
  const int64_t count = int64_t(lens.shape(0));
  require(count > 0, "context_lens is empty and must have one element for each sequence of the segment");
  require_length("query_starts", starts, count + 1);
  require(rows_in(tables) == count, "block_tables has ", rows_in(tables), " rows and must have ", count, ", one for each sequence");
  const Segment s{Phase(phase), nb::cast<bool>(item[5]), token_start, count, starts.data(), lens.data(), tables.data(), width_of(tables)};
  require(token_start == first_token, "token_start is ", token_start, " and must be ", first_token,
          ": segments follow each other without gaps");
  require(s.query_starts[0] == 0, "query_starts[0] is ", s.query_starts[0], " and must be 0");
  for (int64_t i = 0; i < count; ++i) require_context(s, i, cache);
  require(token_start + s.query_starts[count] <= num_tokens, "query_starts[", count, "] is ", s.query_starts[count],
          ", which ends the segment behind the last of ", num_tokens, " tokens");
  return s;
}

}  // namespace

Queries queries_of(const nb::list& segments, int64_t num_tokens, const CacheHolder& cache, bool share, std::vector<Tables>& tables) {
  require(num_tokens <= INT32_MAX, "the batch has ", num_tokens, " tokens and must have at most ", INT32_MAX);
  std::vector<Segment> parsed;
  std::vector<Ints> arrays;
  arrays.reserve(2 * segments.size()), tables.reserve(segments.size());  // references into them stay valid
  int64_t covered = 0;
  for (nb::handle item : segments) {
    const Segment& s = parsed.emplace_back(segment_of(item, covered, num_tokens, cache, arrays, tables));
    covered += s.query_starts[s.num_sequences];
  }
  require(covered == num_tokens, "the segments cover ", covered, " tokens and must cover ", num_tokens);
  return Queries(parsed, cache.layer(0).block_size, share);
}

namespace {

void rotate(float* head, const float* cosine, const float* sine, int64_t half, bool interleaved) {
  const int64_t apart = interleaved ? 1 : half, step = interleaved ? 2 : 1;
  for (int64_t i = 0; i < half; ++i) {
    float& first = head[i * step];
    float& second = head[i * step + apart];
    const float a = first, b = second;
    first = a * cosine[i] - b * sine[i];
    second = b * cosine[i] + a * sine[i];
  }
}

// Norm each head, or all of them together.
void norm_heads(float* heads, int64_t count, int64_t dim, const NormWeights* norm) {
  if (!norm) return;
  for (int64_t at = 0; at < count * dim; at += norm->size) kernels().norm_row(heads + at, *norm, heads + at);
}

// Norms and rotates the queries and keys of [t, (heads + 2 kv_heads) * head_dim] in place, and writes keys and values to the
// cache, if there is one. Registers -1: no rotation.
Register rope_and_write(ProgramHolder& self, Register qkv, Register cosine, Register sine, int64_t layer, const AttentionConstants& shape) {
  self.require_register("qkv", qkv, shape.qkv_width());
  self.require_tokens("qkv", qkv);
  require((cosine == -1) == (sine == -1), "cosine and sine must both be registers or both be -1");
  std::vector<Register> reads = {qkv};
  if (cosine != -1) {
    self.require_alike("cosine", cosine, "sine", sine);
    self.require_tokens("cosine", cosine);
    require_between("the width of cosine", self.program.width(cosine), 1, shape.head_dim / 2);
    reads.insert(reads.end(), {cosine, sine});
  }
  self.add_attention(layer, shape);
  self.writes_cache = true;
  return self.record("rope_and_write", reads, qkv, [=, is_rotated = cosine != -1](const Call& c) {
    const Rows rows = c.in(), cosines = is_rotated ? c.in(1) : Rows{}, sines = is_rotated ? c.in(2) : Rows{};
    const KvLayer* kv = c.step.layers && !shape.queries_only ? &(*c.step.layers)[size_t(layer)] : nullptr;
    const int64_t dim = shape.head_dim, rotated = shape.num_heads + (shape.queries_only ? 0 : shape.num_kv_heads);
    each_row(c.m, rows.count, rows.width, [&](int64_t row) {
      float* heads = rows.row(row);
      const auto norm = [&] {
        norm_heads(heads, shape.num_heads, dim, shape.query_norm);
        norm_heads(heads + shape.query_width(), rotated - shape.num_heads, dim, shape.key_norm);
      };
      norm_heads(heads + rotated * dim, rotated - shape.num_heads, dim, shape.value_norm);
      if (!shape.norm_after_rope) norm();
      for (int64_t h = 0; h < rotated && is_rotated; ++h) rotate(heads + h * dim, cosines.row(row), sines.row(row), cosines.width, shape.interleaved);
      if (shape.norm_after_rope) norm();
      if (!kv) return;
      const int64_t block = c.step.slots[row] / kv->block_size, offset = c.step.slots[row] % kv->block_size;
      for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
        const size_t at = size_t((block * kv->num_kv_heads + h) * kv->block_size + offset) * kv->row_bytes;
        kernels().store_kv_row(heads + (shape.num_heads + h) * dim, dim, kv->type, kv->keys + at);
        if (kv->values != kv->keys) kernels().store_kv_row(heads + (rotated + h) * dim, dim, kv->type, kv->values + at);
      }
    });
  });
}

// Queries are the leading columns of a row; keys and values of all tokens are already in the cache.
Register record_attend(ProgramHolder& self, Register query, int64_t layer, const AttentionConstants& shape) {
  self.require_queries(query, shape);
  self.add_attention(layer, shape);
  self.attends = true;
  return self.record("attend", {query}, self.program.like(query, shape.query_width()), [=](const Call& c) {
    attend(c.m, c.in(), shape, *c.step.queries, (*c.step.layers)[size_t(layer)], c.out(), c.workspace);
  });
}

// Of chosen positions there is no distance from the query.
void require_choosing(const AttentionConstants& shape) {
  require(shape.top_k > 0, "the shape chooses no positions and must be made with choosing");
  require(shape.num_kv_heads == 1, "the shape has ", shape.num_kv_heads, " kv heads and must have 1, as it chooses positions");
  require(shape.window == 0 && !shape.bidirectional && !shape.slopes && !shape.bias && shape.temperature == 0.0f,
          "the shape chooses positions and must have no window, slopes, bias or temperature, and not look both ways");
}

// Queries are the leading columns of a row, weights one for each head; the keys of all tokens are already in the cache. A row of the
// result holds positions as bits of floats.
Register record_choose(ProgramHolder& self, Register query, Register weights, int64_t layer, const AttentionConstants& shape) {
  require_choosing(shape);
  self.require_queries(query, shape);
  self.require_tokens("weights", weights);
  self.require_register("weights", weights, shape.num_heads);
  self.add_attention(layer, shape);
  self.attends = true;
  const Register chosen = self.program.like(query, shape.top_k);
  self.choices.insert(chosen);
  return self.record("choose", {query, weights}, chosen, [=](const Call& c) {
    choose(c.m, c.in(0), c.in(1), shape, *c.step.queries, (*c.step.layers)[size_t(layer)], c.out(), c.workspace);
  });
}

// `chosen` is of choose, or rows of the caller that are checked when the program runs.
Register record_attend_chosen(ProgramHolder& self, Register query, Register chosen, int64_t layer, const AttentionConstants& shape) {
  require_choosing(shape);
  self.require_queries(query, shape);
  self.require_tokens("chosen", chosen);
  self.require_register("chosen", chosen, shape.top_k);
  if (!self.choices.count(chosen)) {
    require(self.program.array(chosen) >= 0, "chosen is register ", chosen, " and must be one that choose or given returned");
    self.given_choices.push_back(chosen);
  }
  self.add_attention(layer, shape);
  self.attends = true;
  return self.record("attend_chosen", {query, chosen}, self.program.like(query, shape.query_width()), [=](const Call& c) {
    attend(c.m, c.in(0), shape, c.step.queries->over(c.in(1), shape.top_k), (*c.step.layers)[size_t(layer)], c.out(), c.workspace);
  });
}

}  // namespace

void require_choices(const Queries& queries, Rows chosen) {
  for (const std::vector<Query>* phase : {&queries.prefill, &queries.decode})
    for (const Query& query : *phase)
      if (query.position >= chosen.width)
        require_elements("chosen", chosen_row(chosen, query.token), size_t(chosen.width), query.position + 1, "the positions that the query sees");
}

void bind_attention(ProgramClass& program) {
  program.def("rope_and_write", recording(&rope_and_write), "qkv"_a, "cosine"_a, "sine"_a, "layer"_a, "shape"_a)
      .def("attend", recording(&record_attend), "query"_a, "layer"_a, "shape"_a)
      .def("choose", recording(&record_choose), "query"_a, "weights"_a, "layer"_a, "shape"_a)
      .def("attend_chosen", recording(&record_attend_chosen), "query"_a, "chosen"_a, "layer"_a, "shape"_a);
}

}  // namespace bifolio
