// A program while it is recorded from Python: its checks, shared by the files that bind its methods.
#pragma once

#include "module.h"

namespace bifolio {

struct ProgramHolder {
  Program program;
  nb::list keep;  // the objects that the operations point into
  int64_t vocab_rows = INT32_MAX, position_rows = INT32_MAX;  // of the smallest tables of each kind
  std::map<Program::Register, int64_t> routings;  // registers of route, and the number of experts
  std::vector<std::pair<int64_t, AttentionConstants>> attentions;  // the layer and shape of each
  std::vector<std::pair<int64_t, const RecurrenceWeights*>> recurrences;
  int64_t given_width = 0;  // 0: the program reads no given rows
  int64_t taps_width = 0;  // of the widest array that the taps fill; 0: there are none

  void require_open() const { require(!program.is_complete(), "the program is complete: record nothing after logits"); }

  void require_register(const char* name, Program::Register x) const {
    require(x >= 0 && x < program.num_registers(), name, " is register ", x, " and must be one of the ", program.num_registers(),
            " recorded so far");
  }
  void require_register(const char* name, Program::Register x, int64_t width) const {
    require_register(name, x);
    require(program.width(x) == width, name, " is ", program.width(x), " wide and must be ", width, " wide");
  }
  void require_tokens(const char* name, Program::Register x) const {
    require(!program.of_logit_rows(x), name, " has one row for each logit row and must have one for each token");
  }
  void require_alike(const char* name, Program::Register x, const char* other, Program::Register y) const {
    require_register(name, x);
    require_register(other, y, program.width(x));
    require(program.of_logit_rows(x) == program.of_logit_rows(y), name, " and ", other,
            " must both have one row for each token or both one for each logit row");
  }
  void add_attention(int64_t layer, const AttentionConstants& shape) {
    require_between("layer", layer, 0, kMaxLayers);
    attentions.emplace_back(layer, shape);
    keep.append(nb::find(shape));  // its norms
  }
};

// Adds the methods that record the operations of streams.h.
void bind_stream_recording(nb::class_<ProgramHolder>& program);

}  // namespace bifolio
