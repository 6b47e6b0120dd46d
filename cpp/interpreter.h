#pragma once
#include <vector>

#include "runner.h"

namespace pelton {

// What to fetch of the Python interpreter before it goes on: a line of each page of its code, for
// the pages' translations, and its evaluation loop whole. Empty where the loader does not tell.
std::vector<Nearby> interpreter_code();

}  // namespace pelton
