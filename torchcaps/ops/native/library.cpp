// What Python calls: the choice of the instruction set, threads, and signals.
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "problem.h"

namespace torchcaps {

#define DECLARE(name) \
  namespace name {    \
  int run(Operation operation, int64_t bytes, const Problem& a); \
  }
DECLARE(baseline)
#ifdef HAS_AVX2
DECLARE(avx2)
#endif
#ifdef HAS_AVX512
DECLARE(avx512)
#endif

void in_parallel(int count, void (*work)(void*, int), void* context) {
  std::vector<std::thread> others;
  int started = 1;
  try {
    for (; started < count; started++) others.emplace_back(work, context, started);
  } catch (const std::exception&) {
    // No more threads are to be had: the rest is done here.
  }
  work(context, 0);
  for (int i = started; i < count; i++) work(context, i);
  for (auto& thread : others) thread.join();
}

void Watch::ask() {
  const int64_t now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::milliseconds(1);
  if (next_ == 0) next_ = now + 100;
  if (now < next_ || !interrupted_) return;
  next_ = now + 100;
  if (interrupted_()) stop(INTERRUPTED);
}

namespace {

using Run = int (*)(Operation, int64_t, const Problem&);

struct Instructions {
  const char* name;
  Run run;
};

Instructions best() {
#if defined(HAS_AVX512) || defined(HAS_AVX2)
  __builtin_cpu_init();
#endif
#ifdef HAS_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma"))
    return {"AVX-512", avx512::run};
#endif
#ifdef HAS_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return {"AVX2", avx2::run};
#endif
  return {"baseline", baseline::run};
}

Instructions chosen = best();

}  // namespace
}  // namespace torchcaps

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED const char* torchcaps_instructions() { return torchcaps::chosen.name; }

// Another set than the best, for tests: false if there is none of that name.
EXPORTED bool torchcaps_choose(const char* name) {
  using namespace torchcaps;
  const Instructions all[] = {
#ifdef HAS_AVX512
      {"AVX-512", avx512::run},
#endif
#ifdef HAS_AVX2
      {"AVX2", avx2::run},
#endif
      {"baseline", baseline::run}};
  const Instructions most = best();
  bool available = false;
  for (const Instructions& own : all) {
    available = available || own.run == most.run;  // the better ones come first
    if (available && std::string(own.name) == name) {
      chosen = own;
      return true;
    }
  }
  return false;
}

EXPORTED int64_t torchcaps_problem_size() { return sizeof(torchcaps::Problem); }

EXPORTED int torchcaps_run(int64_t operation, int64_t bytes, const torchcaps::Problem* problem) {
  return torchcaps::chosen.run(static_cast<torchcaps::Operation>(operation), bytes, *problem);
}
}
