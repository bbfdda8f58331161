#include "tokens.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <queue>

namespace bifolio {
namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";        // U+2581
constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ text.size();
  size_t i = 0;
  for (; i + 8 <= text.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, text.data() + i, 8);
    hash = (hash ^ word) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  uint64_t rest = 0;
  std::memcpy(&rest, text.data() + i, text.size() - i);
  hash = (hash ^ rest) * 0xc4ceb9fe1a85ec53u;
  return hash ^ hash >> 29;
}

size_t table_size(size_t count) {
  size_t size = 16;
  while (size < 2 * count) size *= 2;
  return size;
}

// Bytes of the character that begins here; the text is valid UTF-8.
size_t character_size(char first) {
  const auto byte = uint8_t(first);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

// The byte that a printable character of a byte-level vocabulary stands for, or -1.
int spelled_byte(std::string_view character) {
  if (character.size() == 1) return character[0] >= 0x21 && character[0] < 0x7f ? character[0] : -1;
  if (character.size() != 2) return -1;
  const int point = (character[0] & 0x1f) << 6 | (character[1] & 0x3f);
  if (point < 0x100) return point >= 0xa1 && point != 0xad ? point : -1;
  if (point < 0x100 + 33) return point - 0x100;           // 0x00 to 0x20
  if (point < 0x100 + 67) return point - 0x100 - 33 + 0x7f;  // 0x7f to 0xa0
  return point == 0x100 + 67 ? 0xad : -1;
}

// "<0x41>" -> 0x41, or -1.
int byte_of_name(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return -1;
  int value = 0;
  for (char c : text.substr(3, 2)) {
    const char lower = char(c | 0x20);
    const int digit = c >= '0' && c <= '9' ? c - '0' : lower >= 'a' && lower <= 'f' ? lower - 'a' + 10 : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

}  // namespace

std::string_view FileStrings::operator[](size_t index) const {
  uint64_t size;
  std::memcpy(&size, buffer + starts[index], 8);
  return {reinterpret_cast<const char*>(buffer + starts[index] + 8), size_t(size)};
}

int64_t find_strings(const uint8_t* buffer, uint64_t size, uint64_t position, size_t count, uint64_t* starts) {
  for (size_t i = 0; i < count; ++i) {
    uint64_t length;
    if (position > size || size - position < 8) return -1;
    std::memcpy(&length, buffer + position, 8);
    if (length > size - position - 8) return -1;
    starts[i] = position;
    position += 8 + length;
  }
  return int64_t(position);
}

bool is_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* end = p + text.size();
  while (p < end) {
    if (*p < 0x80) {
      ++p;
      continue;
    }
    const int more = *p >= 0xc2 && *p < 0xe0 ? 1 : *p >= 0xe0 && *p < 0xf0 ? 2 : *p >= 0xf0 && *p < 0xf5 ? 3 : 0;
    if (more == 0 || end - p <= more) return false;
    const uint8_t low = *p == 0xe0 ? 0xa0 : *p == 0xf0 ? 0x90 : 0x80, high = *p == 0xed ? 0x9f : *p == 0xf4 ? 0x8f : 0xbf;
    if (p[1] < low || p[1] > high) return false;
    for (int i = 2; i <= more; ++i)
      if ((p[i] & 0xc0) != 0x80) return false;
    p += more + 1;
  }
  return true;
}

// ---- ids by text ---------------------------------------------------------------------------------------------------

TokenIds::TokenIds(const FileStrings& tokens) : tokens_(tokens), slots_(table_size(tokens.count), -1) {
  const size_t mask = slots_.size() - 1;
  for (size_t id = 0; id < tokens.count; ++id) {
    const std::string_view text = tokens[id];
    size_t slot = hash_of(text) & mask;
    for (; slots_[slot] >= 0; slot = (slot + 1) & mask)
      if (tokens[size_t(slots_[slot])] == text) distinct_ = false;
    slots_[slot] = int32_t(id);
  }
}

int32_t TokenIds::find(std::string_view text) const {
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash_of(text) & mask; slots_[slot] >= 0; slot = (slot + 1) & mask)
    if (tokens_[size_t(slots_[slot])] == text) return slots_[slot];
  return -1;
}

// ---- added tokens --------------------------------------------------------------------------------------------------

void AddedTokens::add(std::string_view text, int32_t id) { entries_.push_back({text, id}); }

void AddedTokens::finish() {
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.text < b.text; });
  begin_.assign(257, 0);
  for (const Entry& entry : entries_) ++begin_[uint8_t(entry.text[0]) + 1];
  for (size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
}

AddedTokens::Match AddedTokens::find(std::string_view text, size_t from) const {
  for (size_t place = from; place < text.size() && !entries_.empty(); ++place) {
    const auto first = uint8_t(text[place]);
    auto low = entries_.begin() + begin_[first], high = entries_.begin() + begin_[first + 1u];
    const Entry* longest = nullptr;
    // All entries in [low, high) share the first `size` bytes with the text; the shortest is the first of them.
    for (size_t size = 1; low < high; ++size) {
      if (low->text.size() == size) longest = &*low, ++low;
      if (place + size == text.size()) break;
      const auto byte = uint8_t(text[place + size]);
      low = std::lower_bound(low, high, byte, [&](const Entry& entry, uint8_t b) { return uint8_t(entry.text[size]) < b; });
      high = std::upper_bound(low, high, byte, [&](uint8_t b, const Entry& entry) { return b < uint8_t(entry.text[size]); });
    }
    if (longest) return {place, longest->text.size(), longest->id};
  }
  return {std::string_view::npos, 0, -1};
}

// ---- the vocabulary ------------------------------------------------------------------------------------------------

Codec::Codec(FileStrings tokens, const int32_t* types) : tokens_(tokens), types_(types), ids_(tokens) {
  regular_ = ids_.are_distinct();
  for (size_t id = 0; id < tokens.count && regular_; ++id) {
    regular_ = !tokens[id].empty() && is_utf8(tokens[id]);
    const auto type = TokenType(types[id]);
    if (regular_ && (type == TokenType::Control || type == TokenType::Unknown || type == TokenType::UserDefined)) added_.add(tokens[id], int32_t(id));
    if (type == TokenType::Unknown && unknown_ < 0) unknown_ = int32_t(id);
    has_bytes_ = has_bytes_ || type == TokenType::Byte;
  }
  if (!regular_) return;
  added_.finish();
  for (int byte = 0; byte < 256 && has_bytes_; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", unsigned(byte));
    bytes_[byte] = ids_.find(name);
    regular_ = regular_ && bytes_[byte] >= 0;
  }
}

void Codec::set_order(const int32_t* order, size_t count, bool add_space) {
  ranks_.assign(tokens_.count, -1);
  for (size_t i = 0; i < count; ++i) ranks_[size_t(order[i])] = int32_t(i);
  add_space_ = add_space;
}

void Codec::set_merges(const FileStrings& merges, bool whole_words) {
  byte_level_ = true, whole_words_ = whole_words, has_bytes_ = false;
  merges_.assign(table_size(merges.count), {});
  const size_t mask = merges_.size() - 1;
  std::string joined;
  uint32_t rank = 0;
  for (size_t i = 0; i < merges.count; ++i) {
    const std::string_view text = merges[i];
    const size_t space = text.find(' ', 1);
    if (!is_utf8(text)) regular_ = false;
    if (space == std::string_view::npos) continue;
    const std::string_view left = text.substr(0, space), right = text.substr(space + 1);
    joined.assign(left).append(right);
    const int32_t first = ids_.find(left), second = ids_.find(right), id = ids_.find(joined);
    if (first < 0 || second < 0 || id < 0) continue;
    const uint64_t pair = uint64_t(first) << 32 | uint32_t(second);
    size_t slot = pair * 0x9e3779b97f4a7c15u >> 32 & mask;
    while (merges_[slot].pair != UINT64_MAX && merges_[slot].pair != pair) slot = (slot + 1) & mask;
    merges_[slot] = {pair, rank++, id};
  }
}

const Codec::Merge* Codec::find_merge(uint64_t pair) const {
  const size_t mask = merges_.size() - 1;
  for (size_t slot = pair * 0x9e3779b97f4a7c15u >> 32 & mask; merges_[slot].pair != UINT64_MAX; slot = (slot + 1) & mask)
    if (merges_[slot].pair == pair) return &merges_[slot];
  return nullptr;
}

// ---- encoding ------------------------------------------------------------------------------------------------------

Codec::Joint Codec::joint(std::string_view piece, const Symbol& left, const Symbol& right) const {
  if (!left.joins || !right.joins) return {0, 0, -1};
  if (byte_level_) {
    const Merge* found = find_merge(uint64_t(left.id) << 32 | uint32_t(right.id));
    return found ? Joint{found->rank, 0, found->id} : Joint{0, 0, -1};
  }
  const int32_t id = ids_.find(piece.substr(left.begin, left.size + right.size));
  if (id < 0 || ranks_[size_t(id)] < 0) return {0, 0, -1};
  return {uint32_t(ranks_[size_t(id)]), ~left.size, id};
}

void Codec::merge(std::string_view piece, std::vector<Symbol>& symbols, std::vector<int32_t>& out) const {
  struct Candidate {
    uint32_t rank, order;
    int32_t left, right, id;
    uint32_t size;
    bool operator<(const Candidate& other) const {  // the largest of a queue is taken first
      if (rank != other.rank) return rank > other.rank;
      return order != other.order ? order > other.order : left > other.left;
    }
  };
  std::priority_queue<Candidate> queue;
  const auto consider = [&](int32_t left, int32_t right) {
    if (left < 0 || right < 0) return;
    const Symbol &a = symbols[size_t(left)], &b = symbols[size_t(right)];
    const Joint found = joint(piece, a, b);
    if (found.id >= 0) queue.push({found.rank, found.order, left, right, found.id, a.size + b.size});
  };
  const auto count = int32_t(symbols.size());
  for (int32_t i = 0; i < count; ++i) symbols[size_t(i)].previous = i - 1, symbols[size_t(i)].next = i + 1 < count ? i + 1 : -1;
  for (int32_t i = 0; i + 1 < count; ++i) consider(i, i + 1);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol &left = symbols[size_t(best.left)], &right = symbols[size_t(best.right)];
    if (left.size == 0 || left.next != best.right || left.size + right.size != best.size) continue;  // one of them has been merged since
    left.size = best.size, left.id = best.id, left.next = right.next;
    right.size = 0;
    if (left.next >= 0) symbols[size_t(left.next)].previous = best.left;
    consider(left.previous, best.left);
    consider(best.left, left.next);
  }
  for (const Symbol& symbol : symbols)
    if (symbol.size > 0) out.push_back(symbol.id);
}

// The characters of a piece, merged. A character without a token becomes its bytes, or the unknown token: one for a run of them.
void Codec::encode_piece(std::string_view piece, std::vector<int32_t>& out) const {
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  bool after_unknown = false;
  for (size_t at = 0; at < piece.size();) {
    const size_t size = std::min(character_size(piece[at]), piece.size() - at);
    const int32_t id = ids_.find(piece.substr(at, size));
    const bool is_unknown = id < 0 && !has_bytes_;
    if (id >= 0) {
      symbols.push_back({uint32_t(at), uint32_t(size), id, byte_level_ || ranks_[size_t(id)] >= 0, -1, -1});
    } else if (has_bytes_) {
      for (size_t i = 0; i < size; ++i) symbols.push_back({uint32_t(at + i), 1, bytes_[uint8_t(piece[at + i])], false, -1, -1});
    } else if (unknown_ >= 0 && !byte_level_ && !after_unknown) {
      symbols.push_back({uint32_t(at), uint32_t(size), unknown_, false, -1, -1});
    }
    after_unknown = is_unknown;
    at += size;
  }
  merge(piece, symbols, out);
}

void Codec::encode_word(std::string_view word, std::vector<int32_t>& out) const {
  if (whole_words_) {
    const int32_t id = ids_.find(word);
    if (id >= 0) return out.push_back(id);
  }
  encode_piece(word, out);
}

void Codec::encode_text(std::string_view text, std::vector<int32_t>& out) const {
  std::string piece;
  const auto put = [&](std::string_view part) {
    if (part.empty()) return;
    piece.assign(add_space_ ? kSpace : std::string_view());
    for (char c : part) c == ' ' ? piece.append(kSpace) : piece.append(1, c);
    encode_piece(piece, out);
  };
  for (size_t at = 0;;) {
    const AddedTokens::Match match = added_.find(text, at);
    if (match.size == 0) return put(text.substr(at));
    put(text.substr(at, match.place - at));
    out.push_back(match.id);
    at = match.place + match.size;
  }
}

// ---- decoding ------------------------------------------------------------------------------------------------------

// Bytes that are no characters become a replacement character each.
std::string Codec::decode_spaces(const std::vector<std::string_view>& texts) const {
  std::string out, bytes;
  const auto flush = [&] {
    if (is_utf8(bytes)) out += bytes;
    else
      for (size_t i = 0; i < bytes.size(); ++i) out += kReplacement;
    bytes.clear();
  };
  for (std::string_view text : texts) {
    const int byte = byte_of_name(text);
    if (byte >= 0) {
      bytes.push_back(char(byte));
      continue;
    }
    flush();
    for (size_t at = 0; at < text.size();) {
      const bool is_space = text.substr(at, kSpace.size()) == kSpace;
      out.push_back(is_space ? ' ' : text[at]);
      at += is_space ? kSpace.size() : 1;
    }
  }
  flush();
  if (add_space_ && !out.empty() && out[0] == ' ') out.erase(0, 1);
  return out;
}

std::string Codec::decode(const int32_t* ids, size_t count, bool skip_special) const {
  std::vector<std::string_view> texts;
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || size_t(ids[i]) >= tokens_.count) continue;
    const auto type = TokenType(types_[ids[i]]);
    if (!skip_special || (type != TokenType::Control && type != TokenType::Unknown)) texts.push_back(tokens_[size_t(ids[i])]);
  }
  if (!byte_level_) return decode_spaces(texts);
  std::string out;
  for (std::string_view text : texts) {
    std::string bytes;
    size_t at = 0;
    for (; at < text.size(); at += character_size(text[at])) {
      const int byte = spelled_byte(text.substr(at, character_size(text[at])));
      if (byte < 0) break;
      bytes.push_back(char(byte));
    }
    out += at < text.size() ? std::string(text) : bytes;
  }
  return out;
}

}  // namespace bifolio
