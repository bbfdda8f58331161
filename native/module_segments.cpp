// The attention segments of a batch as Python hands them over.
#include "module.h"

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
  require(nb::isinstance<nb::tuple>(item) && nb::len(item) == 5 && nb::isinstance<nb::int_>(item[0]) && nb::isinstance<nb::int_>(item[1]) &&
              nb::try_cast(item[0], phase) && nb::try_cast(item[1], token_start),
          "a segment must be a tuple (phase, token_start, query_starts, context_lens, block_tables)");
  require(phase == int(Phase::Prefill) || phase == int(Phase::Decode), "phase is ", phase, " and must be 0 (prefill) or 1 (decode)");
  const Ints& starts = arrays.emplace_back(ints("query_starts", item[2]));
  const Ints& lens = arrays.emplace_back(ints("context_lens", item[3]));
  const Tables& tables = all_tables.emplace_back(array_of<const int32_t, 2>("block_tables", item[4]));
  const int64_t count = int64_t(lens.shape(0));
  require(count > 0, "context_lens is empty and must have one element for each sequence of the segment");
  require_length("query_starts", starts, count + 1);
  require(rows_in(tables) == count, "block_tables has ", rows_in(tables), " rows and must have ", count, ", one for each sequence");
  const Segment s{Phase(phase), token_start, count, starts.data(), lens.data(), tables.data(), width_of(tables)};
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

}  // namespace bifolio
