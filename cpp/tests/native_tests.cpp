// Runner, checks and loader without Python, and main(): a program that prints one line a test and
// exits with 1 if any failed. Meant to run under sanitizers (scripts/sanitize).
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "roofs.h"
#include "runner.h"
#include "testing.h"

// Counts allocations, to show that a step makes none.
static std::atomic<long> allocations{0};
void* operator new(size_t size) {
  allocations++;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

using namespace pelton;

namespace {

std::vector<std::byte> read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  std::vector<std::byte> result(bytes.size());
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

std::shared_ptr<CodeObject> tiny_code() {
  return std::make_shared<CodeObject>(read_file(TINY_KERNELS));
}

Limits limits() {
  Limits l;
  l.max_num_tokens = 8;
  l.max_batch_size = 4;
  l.max_seq_len = 64;
  l.max_logits_rows = 8;
  l.logits_chunk = 3;
  l.tokens_per_block = 16;
  l.max_logprobs = 1;
  l.vocab_size = 10;
  l.num_slots = 2;
  l.num_blocks = {8};
  l.windows = {0};
  return l;
}

// Two sequences of two tokens each, and a row for every token.
struct Step {
  std::vector<int32_t> ids{1, 2, 3, 4}, positions{0, 1, 20, 21}, starts{0, 2, 4}, slots{0, 1};
  std::vector<int32_t> rows{0, 1, 2, 3}, row_seq{0, 0, 1, 1}, blocks{0, -1, -1, -1, 1, 2, -1, -1};
  std::vector<float> zeros = std::vector<float>(4), ones = std::vector<float>(4, 1.0f);
  std::vector<int32_t> off = std::vector<int32_t>(4, -1), none = std::vector<int32_t>(4);
  std::vector<int32_t> bias_start = std::vector<int32_t>(5);
  std::vector<uint64_t> seed = std::vector<uint64_t>(4);
  std::vector<int32_t> tokens = std::vector<int32_t>(4), ranks = tokens, top_ids = tokens;
  std::vector<float> logprobs = std::vector<float>(4), top_logprobs = logprobs;

  StepArrays arrays() const {
    StepArrays a;
    a.token_ids = ids;
    a.positions = positions;
    a.query_start = starts;
    a.seq_slots = slots;
    a.logits_rows = rows;
    a.row_seq = row_seq;
    a.block_tables = {{blocks.data(), 2, 4}};
    a.temperature = a.min_p = a.presence_penalty = a.frequency_penalty = zeros;
    a.top_p = a.repetition_penalty = ones;
    a.top_k = a.prompt_len = none;
    a.num_logprobs = a.forced = off;
    a.seed = seed;
    a.bias_start = bias_start;
    return a;
  }

  StepResults results() { return {tokens, ranks, top_ids, logprobs, top_logprobs, {}}; }
};

struct Arena {
  std::vector<int32_t> log = std::vector<int32_t>(1024), cells = std::vector<int32_t>(4096);
  std::vector<int32_t> errors = std::vector<int32_t>(kMaxWorkers);
  float weight = 0.5f;

  Argument at(void* memory) const {
    return {Argument::kMemory, reinterpret_cast<uint64_t>(memory)};
  }
};

void steps_run_on_compiled_kernels() {
  for (int workers : {1, 2, 3}) {
    Arena arena;
    auto code = tiny_code();
    const auto launch = [&](const char* symbol, std::vector<Argument> arguments, bool barrier) {
      return LaunchSpec{code->kernel(symbol), std::move(arguments), barrier};
    };
    const auto cells = arena.at(arena.cells.data()), errors = arena.at(arena.errors.data());
    const auto log = arena.at(arena.log.data());
    Runner runner(make_team(workers), code,
                  {launch("bump", {cells}, true), launch("check_equal", {cells, errors}, true),
                   launch("bump_and_check", {cells, errors}, false), launch("log_a", {log}, false),
                   launch("tail", {arena.at(&arena.weight)}, false)},
                  3, limits(), {});
    Step step;
    const StepArrays arrays = step.arrays();
    runner.execute(arrays, step.results());
    const long before = allocations;
    for (int i = 0; i < 49; ++i) runner.execute(arrays, step.results());
    EXPECT(allocations == before);
    for (int32_t e : arena.errors) EXPECT(e == 0);
    for (int32_t c : arena.cells) EXPECT(c == 100);
    EXPECT(arena.log[0] == 100);
    EXPECT(arena.log[3] == 3 && arena.log[5] == 3 && arena.log[6] == 1);
    EXPECT((step.tokens == std::vector<int32_t>{2, 3, 4, 5}));
    EXPECT((step.ranks == std::vector<int32_t>{0, 0, 1, 1}));
    runner.set_timing(true);
    runner.execute(step.arrays(), step.results());
    EXPECT(runner.take_timings().size() == 3 + 2 * 2);
  }
}

// One value exchanged at a time, all over the inputs: an error, or a step that runs in bounds.
void wrong_inputs_are_caught() {
  Arena arena;
  auto code = tiny_code();
  Runner runner(make_team(1), code, {{code->kernel("tail"), {arena.at(&arena.weight)}, true}}, 0,
                limits(), {});
  int caught = 0, ran = 0;
  for (int32_t value : {INT32_MIN, -2, -1, 0, 1, 2, 3, 5, 8, 10, 64, 1 << 20, INT32_MAX}) {
    for (int field = 0; field < 8; ++field) {
      for (size_t element = 0; element < 8; ++element) {
        Step step;
        std::vector<int32_t>* fields[] = {&step.ids,    &step.positions, &step.starts,
                                          &step.slots,  &step.rows,      &step.row_seq,
                                          &step.blocks, &step.bias_start};
        auto& target = *fields[field];
        target[element % target.size()] = value;
        try {
          runner.execute(step.arrays(), step.results());
          ran++;
        } catch (const Error&) {
          caught++;
        }
      }
    }
  }
  EXPECT(caught > 500 && ran > 100);
}

void blocks_are_copied() {
  Region memory(8 * 64);
  for (size_t i = 0; i < memory.nbytes(); ++i) memory.data()[i] = std::byte(i / 64);
  Runner runner(make_team(1), tiny_code(), {}, 0, limits(), {{0, memory.data(), 64}});
  const std::vector<int32_t> source{1, 7, 3}, target{2, 7, 0}, outside{8};
  runner.copy_blocks(0, source, target);
  EXPECT(memory.data()[2 * 64] == std::byte{1} && memory.data()[63] == std::byte{3});
  EXPECT(throws([&] { runner.copy_blocks(0, outside, outside); }, "block 8 of 8"));
  EXPECT(throws([&] { runner.copy_blocks(1, source, target); }, "no KV group 1"));
}

void two_runners_at_once() {
  std::vector<std::thread> callers;
  std::atomic<int> errors{0};
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&errors] {
      Arena arena;
      auto code = tiny_code();
      const std::vector<Argument> both{arena.at(arena.cells.data()), arena.at(arena.errors.data())};
      Runner runner(make_team(2), code, {{code->kernel("bump_and_check"), both, true}}, 1, limits(),
                    {});
      Step step;
      for (int k = 0; k < 200; ++k) runner.execute(step.arrays(), step.results());
      for (int32_t e : arena.errors) errors += e;
      errors += arena.cells[17] != 200;
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT(errors == 0);
}

void damaged_code_is_refused() {
  const auto image = read_file(TINY_KERNELS);
  EXPECT(image.size() > 1000);
  for (size_t size = 0; size < 400; size += 13) {
    const std::span<const std::byte> cut(image.data(), size);
    EXPECT(throws([&] { CodeObject object(cut); }, "code object"));
  }
  auto other = image;
  other[0] = std::byte{0};
  EXPECT(throws([&] { CodeObject object(other); }, "not an ELF image"));
  EXPECT(throws([] { tiny_code()->kernel("missing"); }, "no kernel missing"));
}

void regions_are_aligned_and_zero() {
  for (size_t size : {size_t{0}, size_t{1}, size_t{5000}, size_t{3} << 20}) {
    Region region(size);
    EXPECT(reinterpret_cast<uintptr_t>(region.data()) % (size >= (2 << 20) ? 2 << 20 : 4096) == 0);
    if (size > 0) {
      EXPECT(region.data()[0] == std::byte{0} && region.data()[size - 1] == std::byte{0});
      region.data()[size - 1] = std::byte{1};
    }
  }
  EXPECT(throws([] { Region region(SIZE_MAX); }, "bytes"));
}

void roofs_are_measured_by_all_threads() {
  const Roofs roofs(3, {}, size_t{3} << 20);
  for (int passes : {1, 4}) {
    const auto read = roofs.read(passes);
    EXPECT(read.size() == static_cast<size_t>(passes));
    for (double rate : read) EXPECT(rate > 0);
  }
  for (Peak peak : {Peak::kFmaF32, Peak::kDotBf16, Peak::kDotInt8}) {
    if (peak_instruction(peak).empty()) {
      EXPECT(throws([&] { roofs.peak(peak, 1); }, "no instruction"));
    } else {
      EXPECT(roofs.peak(peak, 2).size() == 2);
    }
  }
  for (const std::vector<int>& cpus : {std::vector<int>{}, std::vector<int>{0, 0, 0}}) {
    const double trip = Roofs(3, cpus, size_t{3} << 10).round_trip();
    EXPECT(trip > 0 && trip < 1);
  }
  EXPECT(Roofs(1, {}, 1 << 20).round_trip() == 0.0);
  EXPECT(throws([] { Roofs(0, {}, 1 << 20); }, "not 0"));
  EXPECT(throws([] { Roofs(2, {}, 2047); }, "too few"));
}

std::string hex(const Digest& digest) {
  std::string text;
  for (uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

// Examples of FIPS 180-4, and both code paths against each other at every length of a tail.
void sha256_is_sha256() {
  const std::string abc = "abc";
  const std::span<const std::byte> data(reinterpret_cast<const std::byte*>(abc.data()), 3);
  const char* wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
  EXPECT(hex(sha256(data)) == wanted);
  EXPECT(hex(sha256(data, true)) == wanted);
  EXPECT(hex(sha256({})) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  std::vector<std::byte> bytes(4000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * i >> 3);
  for (size_t size = 0; size < 300; ++size) {
    const std::span<const std::byte> first(bytes.data(), size), second(bytes.data() + 999, size);
    const auto both = sha256_pair(first.data(), second.data(), size);
    EXPECT(sha256(first) == sha256(first, true));
    EXPECT(both[0] == sha256(first) && both[1] == sha256(second));
  }
}

// Steps, the background thread and the team all at once, on weights that must not change.
void weights_move_between_steps() {
  const size_t size = 5 * WeightMap::kWindow + 12345;
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  std::vector<std::byte> digests;
  for (size_t at = 0; at < size; at += WeightMap::kLeaf) {
    const Digest d = sha256({bytes.data() + at, std::min(WeightMap::kLeaf, size - at)});
    for (uint8_t byte : d) digests.push_back(static_cast<std::byte>(byte));
  }
  const int fd = memfd_create("pelton-weights", MFD_CLOEXEC);
  EXPECT(fd >= 0 && write(fd, bytes.data(), size) == static_cast<ssize_t>(size));
  for (const bool move : {true, false}) {
    auto weights = std::make_shared<WeightMap>(fd, 0, size, digests, move);
    auto team = make_team(2);
    weights->start();
    for (int step = 0; step < 200 && !weights->complete(); ++step) {
      weights->before_step(*team);
      EXPECT(std::memcmp(weights->data(), bytes.data(), size) == 0);
      weights->after_step(40'000'000);
    }
    EXPECT(weights->wait(60) && !weights->damaged());  // the thread may still have one in hand
    EXPECT(std::memcmp(weights->data(), bytes.data(), size) == 0);
  }
  digests[40] ^= std::byte{1};
  WeightMap damaged(fd, 0, size, digests, true);
  damaged.start();
  std::thread stopper([&] { damaged.stop(); });
  damaged.wait(0.01);
  stopper.join();
  auto team = make_team(3);
  damaged.finish(*team);
  const auto found = damaged.take_damage();
  EXPECT(found.size() == 1 && found[0].begin == WeightMap::kLeaf);
  close(fd);
}

// A lost wake-up would hang for ever: after this many seconds a test has failed, however busy the
// machine is.
constexpr unsigned kMostSeconds = 240;

void hangs(int) {
  constexpr char text[] = "FAIL: the test after the last line hangs\n";
  (void)!write(STDOUT_FILENO, text, sizeof text - 1);
  _exit(1);
}

}  // namespace

int main() {
  signal(SIGALRM, hangs);
  std::vector<Test> tests = team_tests();
  for (const Test& test : claims_tests()) tests.push_back(test);
  const Test others[] = {
      {"steps_run_on_compiled_kernels", steps_run_on_compiled_kernels},
      {"wrong_inputs_are_caught", wrong_inputs_are_caught},
      {"blocks_are_copied", blocks_are_copied},
      {"two_runners_at_once", two_runners_at_once},
      {"damaged_code_is_refused", damaged_code_is_refused},
      {"regions_are_aligned_and_zero", regions_are_aligned_and_zero},
      {"sha256_is_sha256", sha256_is_sha256},
      {"weights_move_between_steps", weights_move_between_steps},
      {"roofs_are_measured_by_all_threads", roofs_are_measured_by_all_threads},
  };
  tests.insert(tests.end(), std::begin(others), std::end(others));
  for (const auto& [name, test] : tests) {
    const int before = failures;
    alarm(kMostSeconds);
    test();
    std::printf("%s %s\n", failures == before ? "ok  " : "FAIL", name);
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}
