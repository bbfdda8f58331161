// Text to token ids and back with the vocabulary of a file, whose strings are read where they lie.
//
// Text is cut at added tokens first. The pieces between them are merged: two neighbours become the token that they spell, the best
// pair of the piece first, the leftmost of equal ones. Two kinds of vocabulary say which pair is best:
//   SentencePiece  tokens have scores: the pair whose result has the best score; of two pairs with the same result, the one with
//                  the longer left part. A piece is the whole text between added tokens, spaces spelled U+2581
//   byte-level     the file lists the pairs, best first. A piece is a word, its bytes spelled as printable characters
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio {

// Strings of a file, each behind its length (u64).
struct FileStrings {
  const uint8_t* buffer;
  const uint64_t* starts;  // byte offsets of the lengths
  size_t count;

  std::string_view operator[](size_t index) const;
};

// Byte offsets of `count` strings from `position` on; the end of the last one, or -1 if one ends after the buffer.
int64_t find_strings(const uint8_t* buffer, uint64_t size, uint64_t position, size_t count, uint64_t* starts);

bool is_utf8(std::string_view text);

// The ids of distinct strings.
class TokenIds {
 public:
  TokenIds() = default;
  explicit TokenIds(const FileStrings& tokens);

  int32_t find(std::string_view text) const;  // -1: no token
  bool are_distinct() const { return distinct_; }

 private:
  FileStrings tokens_{};
  std::vector<int32_t> slots_;  // a power of two of them, at most half in use
  bool distinct_ = true;
};

// Tokens that are found in the text before anything else: the leftmost, the longest of those.
class AddedTokens {
 public:
  void add(std::string_view text, int32_t id);
  void finish();
  // The first at or after `from`, as its place, size and id; the place is npos if there is none.
  struct Match {
    size_t place, size;
    int32_t id;
  };
  Match find(std::string_view text, size_t from) const;

 private:
  struct Entry {
    std::string_view text;
    int32_t id;
  };
  std::vector<Entry> entries_;     // sorted by their text
  std::vector<uint32_t> begin_;    // [257] the first entry of each first byte
};

enum class TokenType : int32_t { Normal = 1, Unknown, Control, UserDefined, Unused, Byte };

struct Symbol {
  uint32_t begin, size;  // bytes of the piece
  int32_t id;
  bool joins;
  int32_t previous, next;  // -1: none
};

// A vocabulary with everything that encoding and decoding need. Constant after construction.
class Codec {
 public:
  Codec(FileStrings tokens, const int32_t* types);

  // SentencePiece: the ids of tokens that pairs can become, best first.
  void set_order(const int32_t* order, size_t count, bool add_space);
  // Byte-level: "left right" strings, best first. `whole_words`: a word that is a token is not merged.
  void set_merges(const FileStrings& merges, bool whole_words);

  // Whether the strings are valid UTF-8, none is empty or there twice, and there are tokens for all bytes or for none.
  bool is_regular() const { return regular_; }
  bool is_byte_level() const { return byte_level_; }

  void encode_text(std::string_view text, std::vector<int32_t>& out) const;   // SentencePiece, with added tokens
  void encode_word(std::string_view word, std::vector<int32_t>& out) const;   // byte-level
  std::string decode(const int32_t* ids, size_t count, bool skip_special) const;  // may end inside of a character

  const FileStrings& tokens() const { return tokens_; }
  const TokenIds& ids() const { return ids_; }
  const AddedTokens& added() const { return added_; }

 private:
  struct Merge {
    uint64_t pair = UINT64_MAX;  // ids of left and right
    uint32_t rank;
    int32_t id;
  };
  struct Joint {
    uint32_t rank, order;
    int32_t id;  // -1: the pair is no token
  };

  Joint joint(std::string_view piece, const Symbol& left, const Symbol& right) const;
  const Merge* find_merge(uint64_t pair) const;
  void merge(std::string_view piece, std::vector<Symbol>& symbols, std::vector<int32_t>& out) const;
  void encode_piece(std::string_view piece, std::vector<int32_t>& out) const;
  std::string decode_spaces(const std::vector<std::string_view>& texts) const;

  FileStrings tokens_;
  const int32_t* types_;
  TokenIds ids_;
  AddedTokens added_;
  std::vector<int32_t> ranks_;   // by id; -1: no pair becomes this token
  std::vector<Merge> merges_;    // a hash table
  int32_t bytes_[256];           // tokens of single bytes, if there are any
  int32_t unknown_ = -1;
  bool regular_ = true, byte_level_ = false, has_bytes_ = false, add_space_ = false, whole_words_ = false;
};

}  // namespace bifolio
