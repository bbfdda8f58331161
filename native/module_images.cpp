// Images in another size.
#include <cstdlib>
#include <vector>

#include "module.h"
#include "resample.h"

using namespace nanobind::literals;

namespace bifolio {
namespace {

constexpr int64_t kMostSum = int64_t(1) << 23;  // of the weights of one output, in size: sums of bytes have 32 bits
using Image = Array<const uint8_t, 3>;
using Weights = Array<const int32_t, 2>;

// The weights along one edge of `inputs` pixels.
struct TapArrays {
  TapArrays(const char* first_name, const char* count_name, const char* weights_name, nb::handle first, nb::handle count,
            nb::handle weights, int64_t inputs)
      : first(ints(first_name, first)), count(ints(count_name, count)), weights(array_of<const int32_t, 2>(weights_name, weights)),
        inputs(inputs) {
    const int64_t outputs = int64_t(this->first.shape(0)), most = int64_t(this->weights.shape(1));
    require_length(count_name, this->count, outputs);
    require(int64_t(this->weights.shape(0)) == outputs, weights_name, " has ", this->weights.shape(0), " rows and must have ", outputs);
    for (int64_t i = 0; i < outputs; ++i) {
      const int64_t taps = this->count.data()[i], start = this->first.data()[i];
      require(taps >= 0 && taps <= std::min(most, inputs), count_name, "[", i, "] is ", taps, " and must be at most ", std::min(most, inputs));
      require(start >= 0 && start + taps <= inputs, first_name, "[", i, "] is ", start, " and must be at most ", inputs - taps);
      int64_t sum = 0;
      for (int64_t tap = 0; tap < taps; ++tap) sum += std::abs(int64_t(this->weights.data()[i * most + tap]));
      require(sum <= kMostSum, weights_name, "[", i, "] adds up to ", sum, " and must add up to at most ", kMostSum);
    }
  }

  Taps taps() const { return {inputs, int64_t(first.shape(0)), int64_t(weights.shape(1)), first.data(), count.data(), weights.data()}; }

  Ints first, count;
  Weights weights;
  int64_t inputs;
};

// The pixels in another size; an edge without outputs stays as it is.
void resample_image(nb::handle pixels_array, nb::handle row_first, nb::handle row_count, nb::handle row_weights, nb::handle column_first,
                    nb::handle column_count, nb::handle column_weights, nb::handle out_array) {
  const Image pixels = array_of<const uint8_t, 3>("pixels", pixels_array);
  require(pixels.shape(2) == 3, "pixels is ", pixels.shape(2), " wide and must be 3 wide");
  const int64_t height = int64_t(pixels.shape(0)), width = int64_t(pixels.shape(1));
  const TapArrays rows("row_first", "row_count", "row_weights", row_first, row_count, row_weights, height);
  const TapArrays columns("column_first", "column_count", "column_weights", column_first, column_count, column_weights, width);
  const auto out = array_of<uint8_t, 3>("out", out_array);
  const Taps down = rows.taps(), along = columns.taps();
  require(down.outputs || along.outputs, "row_first and column_first are empty: one of them must have outputs");
  const int64_t tall = down.outputs ? down.outputs : height, wide = along.outputs ? along.outputs : width;
  require(int64_t(out.shape(0)) == tall && int64_t(out.shape(1)) == wide && out.shape(2) == 3, "out has ", out.shape(0), " x ",
          out.shape(1), " x ", out.shape(2), " bytes and must have ", tall, " x ", wide, " x 3");
  nb::gil_scoped_release release;
  std::vector<uint8_t> between(down.outputs && along.outputs ? size_t(height * wide * 3) : 0);
  resample(pixels.data(), down, along, between.data(), out.data());
}

}  // namespace

void bind_images(nb::module_& m) {
  m.def("resample", resample_image, array("pixels"), array("row_first"), array("row_count"), array("row_weights"), array("column_first"),
        array("column_count"), array("column_weights"), array("out"));
}

}  // namespace bifolio
