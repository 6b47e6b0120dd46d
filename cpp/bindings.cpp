// pelton._core: the native runtime for Python. Types and meanings: pelton/_core.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <deque>
#include <string>
#include <utility>

#include "bindings_roofs.h"
#include "clock.h"
#include "error.h"
#include "interpreter.h"
#include "runner.h"
#include "tiles.h"

namespace nb = nanobind;
using namespace pelton;

namespace {

// A C-contiguous buffer of a Python object, held while the step that reads it runs.
class Buffer {
 public:
  Buffer(nb::handle object, const std::string& name, bool writable) : name_(name) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      throw Error(name + ": expected a " + (writable ? "writable, " : "") +
                  "C-contiguous array, not " + nb::cast<std::string>(nb::str(object.type())));
    }
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const Py_buffer& view() const { return view_; }

  template <typename T>
  T* data(int rank) const {
    if (view_.ndim != rank)
      fail("has " + std::to_string(view_.ndim) + " dimensions", rank, type<T>());
    if (view_.itemsize != sizeof(T) || !matches<T>()) {
      fail(std::string("has element format '") + format() + "'", rank, type<T>());
    }
    if (reinterpret_cast<uintptr_t>(view_.buf) % alignof(T) != 0) {
      fail("is not aligned", rank, type<T>());
    }
    return static_cast<T*>(view_.buf);
  }

 private:
  const char* format() const { return view_.format == nullptr ? "B" : view_.format; }

  template <typename T>
  static const char* type() {
    if (std::is_same_v<T, float>) return "float32";
    if (std::is_same_v<T, int32_t>) return "int32";
    return std::is_same_v<T, uint32_t> ? "uint32" : "uint64";
  }

  template <typename T>
  bool matches() const {
    const char* codes = std::is_same_v<T, float> ? "f" : std::is_same_v<T, int32_t> ? "il" : "ILQ";
    const char* f = format();
    if (*f == '=' || *f == '<' || *f == '@') ++f;
    return *f != '\0' && f[1] == '\0' && std::strchr(codes, *f) != nullptr;
  }

  [[noreturn]] void fail(const std::string& what, int rank, const char* type) const {
    throw Error(name_ + " " + what + "; expected " + std::to_string(rank) + " of " + type);
  }

  Py_buffer view_{};
  std::string name_;
};

// Reads the attributes of a step object as arrays and keeps their buffers.
class Fields {
 public:
  Fields(nb::handle object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  template <typename T>
  View<T> array(const char* name) {
    const Buffer& buffer = keep(object_.attr(name), name, false);
    const T* data = buffer.data<T>(1);
    return {data, static_cast<size_t>(buffer.view().shape[0])};
  }

  template <typename T>
  std::span<T> output(const char* name, int rank) {
    const Buffer& buffer = keep(object_.attr(name), name, true);
    T* data = buffer.data<T>(rank);
    return {data, static_cast<size_t>(buffer.view().len) / sizeof(T)};
  }

  template <typename T>
  Table<T> table(nb::handle object, const char* name) {
    const Buffer& buffer = keep(object, name, false);
    const T* data = buffer.data<T>(2);
    return {data, buffer.view().shape[0], buffer.view().shape[1]};
  }

  nb::object get(const char* name) const { return object_.attr(name); }

  // Whether the object alone has references to the arrays that were read here.
  bool unshared() const {
    for (const Buffer& buffer : buffers_) {
      if (Py_REFCNT(buffer.view().obj) != 2) return false;  // the object's, and the buffer's own
    }
    return true;
  }

 private:
  const Buffer& keep(nb::handle object, const char* name, bool writable) {
    return buffers_.emplace_back(object, prefix_ + name, writable);
  }

  nb::handle object_;
  std::string prefix_;
  std::deque<Buffer> buffers_;  // a deque: buffers never move
};

StepArrays step_arrays(Fields& in, Fields& sampling) {
  StepArrays step;
  step.token_ids = in.array<int32_t>("token_ids");
  step.positions = in.array<int32_t>("positions");
  step.query_start = in.array<int32_t>("query_start");
  step.seq_slots = in.array<int32_t>("seq_slots");
  step.logits_rows = in.array<int32_t>("logits_rows");
  step.row_seq = in.array<int32_t>("row_seq");
  for (nb::handle table : in.get("block_tables")) {
    step.block_tables.push_back(in.table<int32_t>(table, "block_tables"));
  }
  step.temperature = sampling.array<float>("temperature");
  step.top_k = sampling.array<int32_t>("top_k");
  step.top_p = sampling.array<float>("top_p");
  step.min_p = sampling.array<float>("min_p");
  step.repetition_penalty = sampling.array<float>("repetition_penalty");
  step.presence_penalty = sampling.array<float>("presence_penalty");
  step.frequency_penalty = sampling.array<float>("frequency_penalty");
  step.seed = sampling.array<uint64_t>("seed");
  step.num_logprobs = sampling.array<int32_t>("num_logprobs");
  step.prompt_len = sampling.array<int32_t>("prompt_len");
  step.forced = sampling.array<int32_t>("forced");
  step.bias_start = sampling.array<int32_t>("bias_start");
  step.bias_ids = sampling.array<int32_t>("bias_ids");
  step.bias_values = sampling.array<float>("bias_values");
  const nb::object mask = sampling.get("mask");
  if (!mask.is_none()) step.mask = sampling.table<uint32_t>(mask, "mask");
  return step;
}

StepResults step_results(Fields& out) {
  StepResults results;
  results.tokens = out.output<int32_t>("tokens", 1);
  results.logprobs = out.output<float>("logprobs", 1);
  results.ranks = out.output<int32_t>("ranks", 1);
  results.top_ids = out.output<int32_t>("top_ids", 2);
  results.top_logprobs = out.output<float>("top_logprobs", 2);
  if (!out.get("logits").is_none()) results.logits = out.output<float>("logits", 2);
  return results;
}

// The arrays of a step's inputs, and the object that they belong to.
struct HeldInputs {
  explicit HeldInputs(nb::handle object)
      : inputs(nb::borrow(object)),
        sampling(object.attr("sampling")),
        in(object, "step input "),
        parameters(sampling, "step input sampling."),
        step(step_arrays(in, parameters)),
        want_logits(nb::cast<bool>(object.attr("want_logits"))) {}

  nb::object inputs, sampling;
  Fields in, parameters;
  StepArrays step;
  bool want_logits;
};

// And of its outcome: a FinishedStep, whose outputs and tokens are written.
struct HeldOutcome {
  explicit HeldOutcome(nb::handle object)
      : finished(nb::borrow(object)),
        outputs(object.attr("outputs")),
        tokens(object.attr("tokens")),
        out(outputs, "step output "),
        results(step_results(out)) {
    if (!PyList_CheckExact(tokens.ptr()) || !has_all_tokens()) {
      throw Error("step output tokens: expected a list of " +
                  std::to_string(results.tokens.size()) + " integers besides the array");
    }
  }

  // Whether it may be written again: nobody but this has the object, its outputs, or an array.
  bool unshared() const {
    return Py_REFCNT(finished.ptr()) == 1 && Py_REFCNT(outputs.ptr()) == 2 &&
           Py_REFCNT(tokens.ptr()) == 2 && has_all_tokens() && out.unshared();
  }

  // A list can be changed by whoever had it.
  bool has_all_tokens() const {
    return static_cast<size_t>(PyList_GET_SIZE(tokens.ptr())) == results.tokens.size();
  }

  // What the step has written to the array goes to the list too.
  void list_tokens() {
    for (size_t r = 0; r < results.tokens.size(); ++r) {
      PyObject* token = PyLong_FromLong(results.tokens[r]);
      if (token == nullptr || PyList_SetItem(tokens.ptr(), static_cast<Py_ssize_t>(r), token) < 0) {
        throw nb::python_error();
      }
    }
  }

  nb::object finished, outputs, tokens;
  Fields out;
  StepResults results;
};

// A runner, and inputs and outcome of its last step. Step loops hand the same (immutable) inputs
// over again with new numbers in their arrays; finding the arrays anew takes longer than many a
// check.
class PythonRunner {
 public:
  PythonRunner(std::shared_ptr<Team> team, std::shared_ptr<CodeObject> code,
               const std::vector<LaunchSpec>& launches, size_t tail_start, const Limits& limits,
               std::vector<PagedState> paged, std::shared_ptr<WeightMap> weights)
      : runner(std::move(team), std::move(code), launches, tail_start, limits, std::move(paged),
               std::move(weights)) {}
  PythonRunner(const PythonRunner&) = delete;
  PythonRunner& operator=(const PythonRunner&) = delete;

  nb::object execute(nb::handle inputs, nb::handle finished) {
    const int64_t entered = now_ns();
    if (!held_ || !held_->inputs.is(inputs)) held_ = std::make_shared<HeldInputs>(inputs);
    if (!finished.is_none()) {
      outcome_ = std::make_shared<HeldOutcome>(finished);
    } else if (!again()) {
      return nb::none();
    }
    const auto held = held_;  // another thread may call meanwhile, to learn that it may not
    const auto outcome = outcome_;
    nb::object result = outcome->finished;  // now, so that to others it is somebody's
    {
      nb::gil_scoped_release release;
      runner.execute(held->step, outcome->results);
      entered_ = entered;
      left_ = now_ns();
    }
    outcome->list_tokens();
    return result;
  }

  std::pair<int64_t, int64_t> last_span() const { return {entered_, left_}; }

  Runner runner;

 private:
  // Whether the last outcome fits these inputs, and nobody else has it any more.
  bool again() const {
    return outcome_ && !held_->want_logits && outcome_->results.logits.data() == nullptr &&
           outcome_->results.tokens.size() == held_->step.logits_rows.size() &&
           outcome_->unshared();
  }

  std::shared_ptr<HeldInputs> held_;
  std::shared_ptr<HeldOutcome> outcome_;
  int64_t entered_ = 0, left_ = 0;  // of the last step
};

using LaunchTuple = std::tuple<std::string, std::vector<std::tuple<int32_t, uint64_t>>, bool>;

std::vector<LaunchSpec> launch_specs(const CodeObject& code,
                                     const std::vector<LaunchTuple>& launches) {
  std::vector<LaunchSpec> specs;
  for (const auto& [symbol, arguments, barrier] : launches) {
    LaunchSpec spec{code.kernel(symbol), {}, barrier};
    for (const auto& [kind, address] : arguments) {
      if (kind < Argument::kMemory || kind > Argument::kPositions) {
        throw Error("launch of " + symbol + ": argument kind " + std::to_string(kind));
      }
      spec.arguments.push_back({static_cast<Argument::Kind>(kind), address});
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

nb::object timings_array(PythonRunner& self) {
  auto* timings = new std::vector<Timing>(self.runner.take_timings());
  nb::capsule owner(timings, [](void* p) noexcept { delete static_cast<std::vector<Timing>*>(p); });
  using Array = nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 5>>;
  return nb::cast(Array(timings->data(), {timings->size(), 5}, owner));
}

void bind_weight_map(nb::module_& m) {
  nb::class_<WeightMap>(m, "WeightMap")
      .def(
          "__init__",
          [](WeightMap* self, int fd, uint64_t offset, size_t nbytes, nb::bytes digests,
             bool move) {
            const auto* data = static_cast<const std::byte*>(digests.data());
            new (self) WeightMap(fd, offset, nbytes, {data, digests.size()}, move);
          },
          nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("digests"), nb::arg("move"))
      .def_prop_ro("address",
                   [](const WeightMap& w) { return reinterpret_cast<uint64_t>(w.data()); })
      .def_prop_ro("complete", &WeightMap::complete)
      .def_prop_ro("moves", &WeightMap::moves)
      .def_prop_ro("moved_bytes", &WeightMap::moved_bytes)
      .def_prop_ro("damaged", &WeightMap::damaged)
      .def("start", &WeightMap::start)
      .def("stop", &WeightMap::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("finish", &WeightMap::finish, nb::arg("team"), nb::call_guard<nb::gil_scoped_release>())
      .def("wait", &WeightMap::wait, nb::arg("seconds"), nb::call_guard<nb::gil_scoped_release>())
      .def("take_damage", [](WeightMap& w) {
        std::vector<std::tuple<uint64_t, uint64_t>> ranges;
        for (const auto& range : w.take_damage()) ranges.emplace_back(range.begin, range.end);
        return ranges;
      });
}

// With what a runner is made of: code and limits.
void bind_runner(nb::module_& m) {
  nb::class_<CodeObject>(m, "CodeObject")
      .def(
          "__init__",
          [](CodeObject* self, nb::handle image) {
            const Buffer buffer(image, "code object", false);
            const auto* data = static_cast<const std::byte*>(buffer.view().buf);
            new (self) CodeObject({data, static_cast<size_t>(buffer.view().len)});
          },
          nb::arg("image"))
      .def(
          "kernel",
          [](const CodeObject& code, const std::string& symbol) {
            return reinterpret_cast<uint64_t>(code.kernel(symbol));
          },
          nb::arg("symbol"));

  nb::class_<Limits>(m, "Limits")
      .def(nb::init<>())
      .def_rw("max_num_tokens", &Limits::max_num_tokens)
      .def_rw("max_batch_size", &Limits::max_batch_size)
      .def_rw("max_seq_len", &Limits::max_seq_len)
      .def_rw("max_logits_rows", &Limits::max_logits_rows)
      .def_rw("logits_chunk", &Limits::logits_chunk)
      .def_rw("tokens_per_block", &Limits::tokens_per_block)
      .def_rw("max_logprobs", &Limits::max_logprobs)
      .def_rw("vocab_size", &Limits::vocab_size)
      .def_rw("num_slots", &Limits::num_slots)
      .def_rw("num_blocks", &Limits::num_blocks)
      .def_rw("windows", &Limits::windows);

  nb::class_<PythonRunner>(m, "Runner")
      .def(
          "__init__",
          [](PythonRunner* self, std::shared_ptr<Team> team, std::shared_ptr<CodeObject> code,
             const std::vector<LaunchTuple>& launches, size_t tail_start, const Limits& limits,
             const std::vector<std::tuple<size_t, uint64_t, size_t>>& paged,
             std::shared_ptr<WeightMap> weights) {
            std::vector<PagedState> states;
            for (const auto& [group, address, block_bytes] : paged) {
              states.push_back({group, reinterpret_cast<std::byte*>(address), block_bytes});
            }
            const auto specs = launch_specs(*code, launches);
            new (self) PythonRunner(std::move(team), std::move(code), specs, tail_start, limits,
                                    std::move(states), std::move(weights));
          },
          nb::arg("team"), nb::arg("code"), nb::arg("launches"), nb::arg("tail_start"),
          nb::arg("limits"), nb::arg("paged"), nb::arg("weights").none() = nb::none())
      .def("execute", &PythonRunner::execute, nb::arg("inputs"),
           nb::arg("finished").none() = nb::none())
      .def_prop_ro("last_span", &PythonRunner::last_span)
      .def(
          "fetch_at_end",
          [](PythonRunner& self, const std::vector<std::tuple<uint64_t, size_t>>& memory) {
            std::vector<Nearby> parts = interpreter_code();
            for (const auto& [address, size] : memory) {
              parts.push_back({reinterpret_cast<const std::byte*>(address), size});
            }
            return self.runner.fetch_at_end(std::move(parts));
          },
          nb::arg("memory"))
      .def(
          "copy_blocks",
          [](PythonRunner& self, size_t group, const std::vector<int32_t>& source,
             const std::vector<int32_t>& target) {
            self.runner.copy_blocks(group, source, target);
          },
          nb::arg("group"), nb::arg("source"), nb::arg("target"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_timing", [](PythonRunner& self, bool on) { self.runner.set_timing(on); },
          nb::arg("on"))
      .def("take_timings", &timings_array);
}

}  // namespace

NB_MODULE(_core, m) {
  m.attr("ABI_VERSION") = PELTON_ABI_VERSION;
  m.attr("MAX_WORKERS") = kMaxWorkers;
  nb::exception<Error>(m, "NativeError", PyExc_RuntimeError);
  m.def("request_tile_permission", &request_tile_permission);

  nb::class_<Region>(m, "Region")
      .def(nb::init<size_t>(), nb::arg("nbytes"))
      .def_prop_ro("address", [](const Region& r) { return reinterpret_cast<uint64_t>(r.data()); })
      .def_prop_ro("nbytes", &Region::nbytes)
      .def("bytes", [](nb::handle_t<Region> self) {
        const auto& region = nb::cast<const Region&>(self);
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(
            reinterpret_cast<uint8_t*>(region.data()), {region.nbytes()}, self);
      });

  nb::class_<Team>(m, "Team")
      .def(
          "__init__",
          [](Team* self, int workers, const std::vector<int>& cpus, double spin_us) {
            new (self) Team(workers, cpus, static_cast<int64_t>(spin_us * 1000));
          },
          nb::arg("workers"), nb::arg("cpus") = std::vector<int>(), nb::arg("spin_us") = 50.0)
      .def_prop_ro("size", &Team::size);

  bind_weight_map(m);
  bind_runner(m);
  bind_roofs(m);
}
