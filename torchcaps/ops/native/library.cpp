// The functions that Python calls: choice of the instruction set, threads, and signals.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cstddef>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "problem.h"

namespace torchcaps {

#define DECLARE(name) \
  namespace name {    \
  int run(Operation operation, int64_t bytes, const Problem& a); \
  int routing_pool(int64_t bytes, const PoolProblem& a);         \
  void squash(int64_t bytes, const SquashProblem& a);            \
  }
DECLARE(baseline)
#ifdef HAS_AVX2
DECLARE(avx2)
#endif
#ifdef HAS_AVX512
DECLARE(avx512)
#endif

namespace {

int64_t nanoseconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

struct Team {
  void (*work)(void*, int);
  void* context;
  int count;
  int next;
  int disturbed;  // a thread started late, or waited for a core for much of its time
  int64_t called;
};

void work_on(void* x) {
  Team& team = *static_cast<Team*>(x);
  const int64_t start = nanoseconds(CLOCK_MONOTONIC), own_start = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
  for (int i; (i = __atomic_fetch_add(&team.next, 1, __ATOMIC_RELAXED)) < team.count;) team.work(team.context, i);
  const int64_t taken = nanoseconds(CLOCK_MONOTONIC) - start;
  const int64_t own = nanoseconds(CLOCK_THREAD_CPUTIME_ID) - own_start;
  const bool late = start - team.called > 300000, interrupted = taken > 1000000 && own < taken * 7 / 10;
  if (late || interrupted) __atomic_store_n(&team.disturbed, 1, __ATOMIC_RELAXED);
}

// On an idle machine the threads of the OpenMP runtime that PyTorch has loaded are the fastest: they still spin after
// PyTorch's last operator, and other threads would have to share the cores with them. Beside other processes, spinning
// takes cores from threads that work: then threads made here are better, because they sleep while they wait. The OpenMP
// runtime does not work in a forked process.
using OpenMP = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
constexpr int CALLS = 50;                                             // calls until OpenMP is tried again
OpenMP openmp = nullptr;
pid_t openmp_process = 0;
int calls_without = 0;

bool use_openmp() {
  if (!openmp || getpid() != openmp_process) return false;
  const int left = __atomic_load_n(&calls_without, __ATOMIC_RELAXED);
  if (left > 0) __atomic_store_n(&calls_without, left - 1, __ATOMIC_RELAXED);
  return left == 0;
}

}  // namespace

void in_parallel(int count, void (*work)(void*, int), void* context) {
  Team team{work, context, count, 0, 0, nanoseconds(CLOCK_MONOTONIC)};
  if (count == 1) return work_on(&team);
  if (use_openmp()) {
    openmp(work_on, &team, static_cast<unsigned>(count), 0);
    if (team.disturbed) __atomic_store_n(&calls_without, CALLS, __ATOMIC_RELAXED);
    return;
  }
  std::vector<std::thread> others;
  try {
    while (static_cast<int>(others.size()) < count - 1) others.emplace_back(work_on, &team);
  } catch (const std::exception&) {
    // No more threads can be started: those that exist do the work.
  }
  work_on(&team);
  for (auto& thread : others) thread.join();
}

namespace {

constexpr int64_t BETWEEN = 100000000;  // nanoseconds between two calls of interrupted
unsigned long this_thread() { return (unsigned long)pthread_self(); }

}  // namespace

Watch::Watch(int (*interrupted)())
    : interrupted_(interrupted), owner_(this_thread()), next_(nanoseconds(CLOCK_MONOTONIC) + BETWEEN) {}

void Watch::ask() {
  if (this_thread() != owner_) return;
  const int64_t now = nanoseconds(CLOCK_MONOTONIC);
  if (now < next_) return;
  next_ = now + BETWEEN;
  if (interrupted_()) stop(INTERRUPTED);
}

namespace {

using Run = int (*)(Operation, int64_t, const Problem&);

struct Instructions {
  const char* name;
  Run run;
  int (*routing_pool)(int64_t, const PoolProblem&);
  void (*squash)(int64_t, const SquashProblem&);
};

// Returns the sets that this machine has, the best first.
std::vector<Instructions> available() {
  std::vector<Instructions> sets;
#if defined(HAS_AVX512) || defined(HAS_AVX2)
  __builtin_cpu_init();
  // Virtual machines may mask single extensions of those that the compiler was allowed to use.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#endif
#ifdef HAS_AVX512
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    sets.push_back({"AVX-512", avx512::run, avx512::routing_pool, avx512::squash});
#endif
#ifdef HAS_AVX2
  if (has_avx2) sets.push_back({"AVX2", avx2::run, avx2::routing_pool, avx2::squash});
#endif
  sets.push_back({"baseline", baseline::run, baseline::routing_pool, baseline::squash});
  return sets;
}

const std::vector<Instructions> sets = available();
Instructions chosen = sets.front();

// Returns a line for each field, with its name, its place and its size.
std::string described() {
  std::string text;
#define DESCRIBE(name, place, size) \
  text += #name " " + std::to_string(place) + " " + std::to_string(size) + "\n";
#define DESCRIBE_PROBLEM(type, name) DESCRIBE(name, offsetof(Problem, name), sizeof(Problem::name))
#define DESCRIBE_POOL_PROBLEM(type, name) DESCRIBE(name, offsetof(PoolProblem, name), sizeof(PoolProblem::name))
#define DESCRIBE_SQUASH_PROBLEM(type, name) \
  DESCRIBE(name, offsetof(SquashProblem, name), sizeof(SquashProblem::name))
  PROBLEM_FIELDS(DESCRIBE_PROBLEM)
  POOL_PROBLEM_FIELDS(DESCRIBE_POOL_PROBLEM)
  SQUASH_PROBLEM_FIELDS(DESCRIBE_SQUASH_PROBLEM)
  return text;
}

// Returns the names of the sets, with commas.
std::string names() {
  std::string text;
  for (const Instructions& own : sets) text += (text.empty() ? "" : ", ") + std::string(own.name);
  return text;
}

}  // namespace
}  // namespace torchcaps

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

EXPORTED const char* torchcaps_instructions() { return torchcaps::chosen.name; }

EXPORTED const char* torchcaps_available() {
  static const std::string names = torchcaps::names();
  return names.c_str();
}

// Chooses another set than the best. Returns false if this machine has no set of that name.
EXPORTED bool torchcaps_choose(const char* name) {
  for (const torchcaps::Instructions& own : torchcaps::sets) {
    if (std::string(own.name) != name) continue;
    torchcaps::chosen = own;
    return true;
  }
  return false;
}

EXPORTED void torchcaps_use_openmp(torchcaps::OpenMP parallel) {
  torchcaps::openmp = parallel;
  torchcaps::openmp_process = getpid();
}

EXPORTED const char* torchcaps_fields() {
  static const std::string fields = torchcaps::described();
  return fields.c_str();
}

EXPORTED int torchcaps_run(int64_t operation, int64_t bytes, const torchcaps::Problem* problem) {
  try {
    return torchcaps::chosen.run(static_cast<torchcaps::Operation>(operation), bytes, *problem);
  } catch (const std::exception&) {
    return torchcaps::NO_MEMORY;
  }
}
EXPORTED void torchcaps_squash(int64_t bytes, const torchcaps::SquashProblem* problem) {
  torchcaps::chosen.squash(bytes, *problem);
}
EXPORTED int torchcaps_routing_pool(int64_t bytes, const torchcaps::PoolProblem* problem) {
  return torchcaps::chosen.routing_pool(bytes, *problem);
}
}
