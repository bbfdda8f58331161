// A program while it is recorded from Python: its checks, shared by the files that bind its operations.
#pragma once

#include <set>
#include <tuple>

#include "module.h"
#include "program.h"

namespace bifolio {

using Register = Program::Register;
using Call = Program::Call;

constexpr int32_t kLongRope = 1 << 28;  // LONG_ROPE of bifolio/long_rope.py

struct ProgramHolder {
  Program program;
  nb::list keep;  // the objects that the operations point into
  int64_t vocab_rows = INT64_MAX, position_rows = INT64_MAX, type_rows = INT64_MAX;  // of the smallest tables of each kind; INT64_MAX: they are not read
  bool writes_cache = false, attends = false;
  std::vector<std::pair<int64_t, AttentionConstants>> attentions;  // the layer and shape of each
  std::vector<std::pair<int64_t, const RecurrenceWeights*>> recurrences;
  std::map<Register, int64_t> routings;  // registers of route, and the number of experts
  std::vector<std::pair<Register, int64_t>> given_routings;  // given registers that name experts, and their number
  std::set<Register> choices;           // registers of choose
  std::vector<Register> given_choices;  // given registers that hold chosen positions
  std::vector<std::tuple<int64_t, int64_t, int64_t>> adapted;                  // site, inputs and outputs of each product
  std::vector<std::pair<int64_t, const ExpertWeights*>> adapted_experts;     // by site
  std::vector<int64_t> adapted_tables;                                       // width of each embedding that adapters change
  std::set<uint64_t> fitting;                                                // numbers of adapters that were checked
  size_t num_given = 0;    // registers that are rows of the caller
  int64_t taps_width = 0;  // of the widest array that the taps fill; 0: there are none

  // -- checks -------------------------------------------------------------------------------------------------------------
  void require_open() const { require(!program.is_complete(), "the program is complete: record nothing after finish"); }

  void require_register(const char* name, Register x) const {
    require(x >= 0 && x < program.num_registers(), name, " is register ", x, " and must be one of the ", program.num_registers(),
            " recorded so far");
  }
  void require_register(const char* name, Register x, int64_t width) const {
    require_register(name, x);
    require(program.width(x) == width, name, " is ", program.width(x), " wide and must be ", width, " wide");
  }
  void require_tokens(const char* name, Register x) const {
    require_register(name, x);
    require(!program.of_logit_rows(x), name, " has one row for each logit row and must have one for each token");
  }
  void require_queries(Register query, const AttentionConstants& shape) const {  // in the leading columns of a row
    require_tokens("query", query);
    if (program.width(query) != shape.query_width()) require_register("query", query, shape.qkv_width());
  }
  void require_rows_alike(const char* name, Register x, const char* other, Register y) const {
    require_register(name, x);
    require_register(other, y);
    require(program.of_logit_rows(x) == program.of_logit_rows(y), name, " and ", other,
            " must both have one row for each token or both one for each logit row");
  }
  void require_alike(const char* name, Register x, const char* other, Register y) const {
    require_register(name, x);
    require_register(other, y, program.width(x));
    require_rows_alike(name, x, other, y);
  }

  void require_adapter(const AdapterHolder& adapter);  // it fits the products of the program

  // -- recording ------------------------------------------------------------------------------------------------------------
  template <class T>
  const T& hold(const T& object) {  // alive as long as the program
    keep.append(nb::find(object));
    return object;
  }
  Register record(const char* name, std::vector<Register> reads, Register out, Program::Work work) {
    program.record(name, std::move(reads), {out}, std::move(work));
    return out;
  }
  void add_attention(int64_t layer, const AttentionConstants& shape) {
    require_between("layer", layer, 0, kMaxLayers);
    attentions.emplace_back(layer, hold(shape));  // with its norms
  }
};

// A method that records an operation: refused once the program is complete.
template <class Result, class... Arguments>
auto recording(Result (*record)(ProgramHolder&, Arguments...)) {
  return [record](ProgramHolder& self, Arguments... arguments) -> Result {
    self.require_open();
    return record(self, static_cast<Arguments>(arguments)...);
  };
}

// Positions that were chosen for queries are ones that the queries see.
void require_choices(const Queries& queries, Rows chosen);

// Adds the changes of the adapters of rows at a site.
void add_changes(const Call& c, Rows y, Rows x, int64_t site, bool of_logit_rows);

using ProgramClass = nb::class_<ProgramHolder>;
void bind_operations(ProgramClass& program);
void bind_attention(ProgramClass& program);
void bind_latent(nb::module_& m, ProgramClass& program);
void bind_experts(nb::module_& m, ProgramClass& program);
void bind_recurrence(nb::module_& m, ProgramClass& program);
void bind_adapters(nb::module_& m, ProgramClass& program);

}  // namespace bifolio
