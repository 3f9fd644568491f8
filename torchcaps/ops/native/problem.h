// Arguments of the kernels: sizes, options and addresses. `_Problem` in __init__.py has the same fields in order.
#pragma once
#include <cstdint>

namespace torchcaps {

struct Problem {
  // poses (images, types, height, width, rows, d), weight (groups, down, across, parents, d, h)
  int64_t images, types, height, width, rows, d;
  int64_t groups, down, across, parents, h;
  int64_t stride_down, stride_across, dilation_down, dilation_across;
  // bias (bias_groups, down, across, bias_parents, rows, h), offset (offset_groups, down, across, parents),
  // betas (betas_groups, down, across, betas_parents)
  int64_t bias_groups, bias_parents, offset_groups, betas_groups, betas_parents;
  int64_t over_children, unit, leaky, threads;
  double eps;
  const void *poses, *weight, *bias, *gates;                     // gates (samples, types, down, across)
  const void *target, *precision, *prior, *offset, *betas;       // target is the query of a dot agreement
  void *results[4];                                              // written; backward functions read them
  const void *grads[4];
  void *into_poses, *into_weight, *into_bias, *into_gates;       // gradients are added; null: not needed
  void *grad_target, *grad_precision, *grad_prior, *grad_offset, *grad_betas;  // written
  int (*interrupted)();                                          // called now and then; not 0: give up
};

// The same for the routing pool: `_PoolProblem`. A null `grad` asks for the forward pass.
struct PoolProblem {
  int64_t batch, groups, features, children, iterations, threads;
  int64_t strides[4], grad_strides[4];  // of the poses, (batch, groups, features, children), and of their gradient
  double sharpness;
  const void* poses;
  const uint8_t* present;      // (batch * groups, children); null: all
  const void* grad;            // (batch * groups, features)
  void *total, *grad_poses;    // written; null: not needed
  double* grad_sharpness;      // added to; null: not needed
  int (*interrupted)();
};

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
