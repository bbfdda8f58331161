// Vocabularies of files: text to token ids and back, and the merges of a vocabulary that comes with scores alone.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string_view>
#include <unordered_map>

#include "module.h"
#include "tokens.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

std::string_view utf8(PyObject* text) {
  Py_ssize_t size = 0;
  const char* data = PyUnicode_AsUTF8AndSize(text, &size);
  if (!data) throw nb::python_error();
  return {data, size_t(size)};
}

// For each token that `order` numbers, every way to cut it into two others of these, the longest left part first.
nb::list join_pairs(const nb::list& tokens, nb::handle order_array) {
  const Ints order = array_of<const int32_t, 1>("order", order_array);
  const size_t count = order.shape(0);
  std::unordered_map<std::string_view, PyObject*> known;
  known.reserve(2 * count);
  for (size_t i = 0; i < count; ++i) {
    require_between("a number in order", order.data()[i], 0, int64_t(tokens.size()) - 1);
    PyObject* token = PyList_GET_ITEM(tokens.ptr(), order.data()[i]);
    require(PyUnicode_Check(token), "tokens must be strings");
    known.emplace(utf8(token), token);
  }
  nb::list pairs;
  for (size_t i = 0; i < count; ++i) {
    const std::string_view text = utf8(PyList_GET_ITEM(tokens.ptr(), order.data()[i]));
    for (size_t cut = text.size(); cut-- > 1;) {
      if ((uint8_t(text[cut]) & 0xc0) == 0x80) continue;  // inside of a character
      const auto left = known.find(text.substr(0, cut));
      if (left == known.end()) continue;
      const auto right = known.find(text.substr(cut));
      if (right != known.end()) pairs.append(nb::make_tuple(nb::handle(left->second), nb::handle(right->second)));
    }
  }
  return pairs;
}

using Offsets = Array<const uint64_t, 1>;
using Text = Array<const uint8_t, 1>;

int64_t string_starts(const Text& buffer, int64_t position, const Array<uint64_t, 1>& starts) {
  require_between("position", position, 0, int64_t(buffer.shape(0)));
  return find_strings(buffer.data(), buffer.shape(0), uint64_t(position), starts.shape(0), starts.data());
}

FileStrings strings_of(const char* name, const Text& buffer, const Offsets& starts) {
  for (size_t i = 0; i < starts.shape(0); ++i) {
    uint64_t begin = starts.data()[i], size = 0;
    require(begin <= buffer.shape(0) && buffer.shape(0) - begin >= 8, name, "[", i, "] is ", begin, " and must lie inside of the bytes");
    std::memcpy(&size, buffer.data() + begin, 8);
    require(size <= buffer.shape(0) - begin - 8, name, "[", i, "] is the place of a string that ends after the bytes and must end before");
  }
  return {buffer.data(), starts.data(), starts.shape(0)};
}

// A codec with the arrays that it points into.
struct CodecHolder {
  CodecHolder(nb::handle buffer, nb::handle starts, nb::handle types)
      : buffer(array_of<const uint8_t, 1>("bytes", buffer)), starts(array_of<const uint64_t, 1>("starts", starts)),
        types(ints("types", types)), codec(checked(*this), this->types.data()) {}

  static FileStrings checked(const CodecHolder& self) {
    require(self.starts.shape(0) < size_t(INT32_MAX) / 2, "starts has ", self.starts.shape(0), " elements and must have fewer than 2^30");
    require_length("types", self.types, int64_t(self.starts.shape(0)));
    return strings_of("starts", self.buffer, self.starts);
  }

  void set_order(nb::handle order_array, bool add_space) {
    const Ints order = ints("order", order_array);
    require_elements("order", order.data(), order.shape(0), int64_t(starts.shape(0)), "the vocabulary");
    codec.set_order(order.data(), order.shape(0), add_space);
    ready = true;
  }

  void set_merges(nb::handle merges_array, bool whole_words) {
    const Offsets merges = array_of<const uint64_t, 1>("merges", merges_array);
    codec.set_merges(strings_of("merges", buffer, merges), whole_words);
    ready = true;
  }

  void require_ready() const { require(ready && codec.is_regular(), "the vocabulary has no order and no merges, or it is not regular"); }

  Text buffer;
  Offsets starts;
  Ints types;
  Codec codec;
  bool ready = false;
};

std::vector<std::string_view> views(const nb::list& texts) {
  std::vector<std::string_view> result;
  for (nb::handle text : texts) {
    require(PyUnicode_Check(text.ptr()), "texts must hold strings");
    result.push_back(utf8(text.ptr()));
  }
  return result;
}

std::vector<std::vector<int32_t>> encode_texts(const CodecHolder& self, const nb::list& texts) {
  self.require_ready();
  require(!self.codec.is_byte_level(), "a byte-level vocabulary encodes words: use encode_words");
  const std::vector<std::string_view> given = views(texts);
  std::vector<std::vector<int32_t>> result(given.size());
  nb::gil_scoped_release release;
  for (size_t i = 0; i < given.size(); ++i) self.codec.encode_text(given[i], result[i]);
  return result;
}

std::vector<int32_t> encode_words(const CodecHolder& self, const nb::list& words) {
  self.require_ready();
  require(self.codec.is_byte_level(), "a vocabulary of scores encodes texts: use encode_texts");
  const std::vector<std::string_view> given = views(words);
  std::vector<int32_t> result;
  nb::gil_scoped_release release;
  for (std::string_view word : given) self.codec.encode_word(word, result);
  return result;
}

// The parts of a text, in order: added tokens as ids, the text between them as strings.
nb::list cut_at_added(const CodecHolder& self, const nb::str& text) {
  self.require_ready();
  const std::string_view whole = utf8(text.ptr());
  nb::list parts;
  const auto put = [&](std::string_view part) {
    if (!part.empty()) parts.append(nb::str(part.data(), part.size()));
  };
  for (size_t at = 0;;) {
    const AddedTokens::Match match = self.codec.added().find(whole, at);
    put(whole.substr(at, match.size ? match.place - at : std::string_view::npos));
    if (match.size == 0) return parts;
    parts.append(match.id);
    at = match.place + match.size;
  }
}

nb::object decode_ids(const CodecHolder& self, const std::vector<int32_t>& ids, bool skip_special) {
  self.require_ready();
  const std::string text = self.codec.decode(ids.data(), ids.size(), skip_special);
  PyObject* decoded = PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace");
  if (!decoded) throw nb::python_error();
  return nb::steal(decoded);
}

void bind_codec(nb::module_& m) {
  nb::class_<CodecHolder>(m, "Codec")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), array("bytes"), array("starts"), array("types"))
      .def("set_order", &CodecHolder::set_order, array("order"), "add_space"_a)
      .def("set_merges", &CodecHolder::set_merges, array("merges"), "whole_words"_a)
      .def_prop_ro("is_regular", [](const CodecHolder& self) { return self.codec.is_regular(); })
      .def("encode_texts", &encode_texts, "texts"_a)
      .def("encode_words", &encode_words, "words"_a)
      .def("cut_at_added", &cut_at_added, "text"_a)
      .def("decode", &decode_ids, "ids"_a, "skip_special"_a)
      .def("find", [](const CodecHolder& self, const nb::str& text) { return self.codec.ids().find(utf8(text.ptr())); }, "text"_a);
}

}  // namespace

void bind_tokens(nb::module_& m) {
  m.def("join_pairs", &join_pairs, "tokens"_a, array("order"));
  m.def("string_starts", [](nb::handle buffer, int64_t position, nb::handle starts) {
    return string_starts(array_of<const uint8_t, 1>("bytes", buffer), position, array_of<uint64_t, 1>("out", starts));
  }, array("bytes"), "position"_a, array("out"));
  bind_codec(m);
}

}  // namespace bifolio
