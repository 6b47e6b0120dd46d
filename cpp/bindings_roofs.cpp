// The part of pelton._core that measures what the machine can do at most.
#include "bindings_roofs.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "error.h"
#include "roofs.h"

namespace nb = nanobind;

namespace pelton {
namespace {

constexpr Peak kPeaks[] = {Peak::kFmaF32, Peak::kDotBf16, Peak::kDotInt8};

Peak by_name(const std::string& name) {
  for (Peak peak : kPeaks) {
    if (name == peak_name(peak)) return peak;
  }
  throw Error("roofs: no peak is named " + name + "; there are fma_f32, dot_bf16, dot_int8");
}

nb::dict instructions() {
  nb::dict found;
  for (Peak peak : kPeaks) {
    const std::string instruction = peak_instruction(peak);
    if (!instruction.empty()) found[peak_name(peak)] = instruction;
  }
  return found;
}

}  // namespace

void bind_roofs(nb::module_& m) {
  nb::class_<Roofs>(m, "Roofs")
      .def(nb::init<int, std::vector<int>, size_t>(), nb::arg("threads"), nb::arg("cpus"),
           nb::arg("read_bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def_static("instructions", &instructions)
      .def("read", &Roofs::read, nb::arg("passes"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "peak",
          [](const Roofs& roofs, const std::string& name, int passes) {
            const Peak peak = by_name(name);
            nb::gil_scoped_release release;
            return roofs.peak(peak, passes);
          },
          nb::arg("name"), nb::arg("passes"))
      .def("round_trip", &Roofs::round_trip, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace pelton
