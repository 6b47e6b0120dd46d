// The one exception of the native runtime. Messages name the culprit and the remedy.
#pragma once
#include <stdexcept>
#include <string>

namespace pelton {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// ": Cannot allocate memory" for an errno value.
std::string errno_text(int code);

}  // namespace pelton
