// Arguments of the kernels: sizes, options and addresses.
#pragma once
#include <cstdint>

namespace torchcaps {

using Numbers = int64_t[4];
using Constants = const void* [4];
using Tensors = void* [4];
using Interrupted = int (*)();  // called now and then; not 0: give up

// The fields of the structs, which those of __init__.py have too. Python compares the names and the places when it loads
// the library.
// - poses (images, types, height, width, rows, d), weight (groups, down, across, parents, d, h)
// - bias (bias_groups, down, across, bias_parents, rows, h), offset (offset_groups, down, across, parents),
//   betas (betas_groups, down, across, betas_parents), gates (samples, types, down, across)
// - target is the query of a dot agreement
// - results are written, and backward functions read them; gradients are added to into_*, and grad_* of target,
//   precision and prior are written, those of offset and betas added. Null: not needed
#define PROBLEM_FIELDS(X)                                                                                    \
  X(int64_t, images) X(int64_t, types) X(int64_t, height) X(int64_t, width) X(int64_t, rows) X(int64_t, d)   \
  X(int64_t, groups) X(int64_t, down) X(int64_t, across) X(int64_t, parents) X(int64_t, h)                   \
  X(int64_t, stride_down) X(int64_t, stride_across) X(int64_t, dilation_down) X(int64_t, dilation_across)    \
  X(int64_t, bias_groups) X(int64_t, bias_parents)                                                           \
  X(int64_t, offset_groups) X(int64_t, betas_groups) X(int64_t, betas_parents)                               \
  X(int64_t, over_children) X(int64_t, unit) X(int64_t, leaky) X(int64_t, threads) X(double, eps)            \
  X(const void*, poses) X(const void*, weight) X(const void*, bias) X(const void*, gates)                    \
  X(const void*, target) X(const void*, precision) X(const void*, prior)                                     \
  X(const void*, offset) X(const void*, betas) X(Tensors, results) X(Constants, grads)                       \
  X(void*, into_poses) X(void*, into_weight) X(void*, into_bias) X(void*, into_gates)                        \
  X(void*, grad_target) X(void*, grad_precision) X(void*, grad_prior) X(void*, grad_offset)                  \
  X(void*, grad_betas) X(Interrupted, interrupted)

// The same for the routing pool. Strides are those of the poses, (batch, groups, features, children), and of their
// gradient; present is (batch * groups, children), null for all, and grad (batch * groups, features), null for the
// forward pass. total and grad_poses are written, grad_sharpness is added to; null: not needed.
#define POOL_PROBLEM_FIELDS(X)                                                                          \
  X(int64_t, batch) X(int64_t, groups) X(int64_t, features) X(int64_t, children) X(int64_t, iterations) \
  X(int64_t, threads) X(Numbers, strides) X(Numbers, grad_strides) X(double, sharpness)                 \
  X(const void*, poses) X(const uint8_t*, present) X(const void*, grad)                                 \
  X(void*, total) X(void*, grad_poses) X(double*, grad_sharpness) X(Interrupted, interrupted)

// The same for squash: of x (outer, middle, inner, size), `strides` are those of x, of which the third or the fourth is 1.
// The results and `grad` are contiguous, the gradient of x lies in memory as x does.
#define SQUASH_PROBLEM_FIELDS(X)                                           \
  X(Numbers, sizes) X(Numbers, strides) X(int64_t, threads) X(const void*, x) \
  X(const void*, grad) X(void*, out)

#define FIELD(type, name) type name;
struct Problem {
  PROBLEM_FIELDS(FIELD)
};
struct PoolProblem {
  POOL_PROBLEM_FIELDS(FIELD)
};
struct SquashProblem {
  SQUASH_PROBLEM_FIELDS(FIELD)
};
#undef FIELD

enum Operation : int64_t {
  VOTE_SUM,
  VOTE_SUM_BACKWARD,
  WEIGHTED_SUM,
  WEIGHTED_SUM_BACKWARD,
  MOMENTS,
  MOMENTS_BACKWARD
};
enum Status : int { DONE, NO_MEMORY, INTERRUPTED };

// Calls work(context, i) for each i < count on several threads, the calling one among them, and waits for all.
// It is in library.cpp, once for all instruction sets.
void in_parallel(int count, void (*work)(void*, int), void* context);

// Tells the threads of a call to stop. Only the thread that made the call asks Python, ten times a second.
class Watch {
 public:
  explicit Watch(int (*interrupted)());
  bool stopped() {
    ask();
    return status() != DONE;
  }
  void stop(Status why) { __atomic_store_n(&status_, static_cast<int>(why), __ATOMIC_RELAXED); }
  int status() const { return __atomic_load_n(&status_, __ATOMIC_RELAXED); }

 private:
  void ask();
  int (*interrupted_)();
  unsigned long owner_;
  int64_t next_;
  int status_ = DONE;
};

}  // namespace torchcaps
