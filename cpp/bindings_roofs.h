#pragma once
#include <nanobind/nanobind.h>

namespace pelton {

// Adds class Roofs to the module.
void bind_roofs(nanobind::module_& m);

}  // namespace pelton
