// The kernels, compiled once for each instruction set: INSTRUCTIONS is its name, VECTOR_BYTES the size of its vectors.
#include "moments.h"
#include "routing_pool.h"
#include "squash.h"
#include "vote_sum.h"
#include "weighted_sum.h"
#include "weighted_sum_shared.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

// One call of a kernel, divided into shards.
template <class W, class T, int L>
struct Call {
  using V = Vec<T, L>;
  const Problem& a;
  Watch& watch;
  Division division;
  int64_t unit, total, samples_of_shard;
  SharedGradients<T> gradients;
  V* partial = nullptr;

  static void shard(void* context, int number) {
    Call& call = *static_cast<Call*>(context);
    const Shard shard = call.division.shard(call.a, call.unit, number);
    W worker(call.a, shard, call.gradients);
    if (worker.arena.failed) return call.watch.stop(NO_MEMORY);
    V* own = call.partial ? call.partial + number * call.samples_of_shard * call.total : nullptr;
    worker.run(call.watch, own, worker.state_size());
  }
  // Joins the results of the shards.
  static void join(void* context, int number) {
    Call& call = *static_cast<Call*>(context);
    const int count = call.division.count();
    call.gradients.sum(number, count, count);
    if (!call.partial) return;
    SharedGradients<T> none;
    for (int64_t i = 0; i < call.division.images; i++) {
      const int64_t first = i * call.division.types;
      const Shard shard = call.division.shard(call.a, call.unit, static_cast<int>(first));
      W worker(call.a, shard, none);
      if (worker.arena.failed) return call.watch.stop(NO_MEMORY);
      const int64_t start = shard.first_image * worker.places.windows;
      const int64_t samples = shard.last_image * worker.places.windows - start;
      for (int64_t s = samples * number / count; s < samples * (number + 1) / count; s++) {
        V* into = call.partial + (first * call.samples_of_shard + s) * call.total;
        for (int64_t t = 1; t < call.division.types; t++) worker.merge(into, into + t * call.samples_of_shard * call.total);
        worker.finish(start + s, into);
      }
    }
  }
};

// Divides the work into as many shards as threads if images and types allow, with the fewest copied numbers.
Division divide(const Problem& a, int64_t threads, int64_t unit, int64_t totals, int64_t weights) {
  Division best{1, 1};
  int64_t least_copied = 0;
  for (int64_t images = 1; images <= least(threads, a.images); images++) {
    const int64_t types = most(1, least(threads / images, a.types / unit));
    const int64_t copied = (images - 1) * weights + (types - 1) * totals;
    if (images * types > best.count() || (images * types == best.count() && copied < least_copied)) {
      best = {images, types};
      least_copied = copied;
    }
  }
  return best;
}

template <class Own, class T, int L>
void call(const Problem& a, Watch& watch) {
  using V = Vec<T, L>;
  const Places places(a);
  const Layout<T, L> layout(a, places.samples(), Own::ALONG_PARENTS);
  const int64_t features = a.rows * a.h, kernel = a.down * a.across;
  const int64_t weights = a.groups * kernel * a.parents * a.d * a.h;
  // Each thread has at least some microseconds of work.
  const int64_t work = places.samples() * a.types * kernel * layout.size * L * (a.d + 4);
  const int64_t threads = most(1, least(a.threads, work >> 19));
  // Groups of children that share weights are not divided if there are enough of them.
  const int64_t unit = a.groups >= threads ? a.types / a.groups : 1;
  const int64_t total = Own::size_of_total(a, layout);
  const Division division = divide(a, threads, unit, places.samples() * total * L, weights);
  auto aligned = [&](int64_t groups) { return division.types == 1 || (groups && unit % (a.types / groups) == 0); };
  Call<Own, T, L> run{a, watch, division, unit, total, (a.images + division.images - 1) / division.images * places.windows, {}};
  void* shared[4] = {a.into_weight, a.into_bias, a.grad_offset, a.grad_betas};
  const int64_t groups[4] = {a.groups, a.bias_groups, a.offset_groups, a.betas_groups};
  const int64_t sizes[4] = {weights, a.bias_groups * kernel * a.bias_parents * features, a.offset_groups * kernel * a.parents,
                            a.betas_groups * kernel * a.betas_parents};
  for (int i = 0; i < 4; i++) run.gradients.add(shared[i], sizes[i], aligned(groups[i]), division);
  Arena arena;
  if (division.types > 1) run.partial = arena.get<V>(division.count() * run.samples_of_shard * total);
  if (arena.failed || run.gradients.failed) return watch.stop(NO_MEMORY);
  in_parallel(division.count(), run.shard, &run);
  if (watch.status() == DONE && division.count() > 1) in_parallel(division.count(), run.join, &run);
}

template <class T, int L>
void choose(Operation operation, const Problem& a, Watch& watch) {
  // Children that share weights have kernels of their own, if they share the bias as well.
  const bool one_bias = !a.bias || (a.bias_groups <= a.groups && a.groups % a.bias_groups == 0);
  const bool shared = a.groups < a.types && !a.unit && one_bias;
  const Agreement agreement = a.precision ? GAUSSIAN : a.target ? DOT : UNIFORM;
  switch (operation) {
    case VOTE_SUM:
      return call<VoteSum<T, L>, T, L>(a, watch);
    case VOTE_SUM_BACKWARD:
      return call<VoteSumBackward<T, L>, T, L>(a, watch);
    case WEIGHTED_SUM:
      return shared ? call<WeightedSumShared<T, L>, T, L>(a, watch) : call<WeightedSum<T, L>, T, L>(a, watch);
    case WEIGHTED_SUM_BACKWARD:
      return shared ? call<WeightedSumSharedBackward<T, L>, T, L>(a, watch)
                    : call<WeightedSumBackward<T, L>, T, L>(a, watch);
    case MOMENTS:
      return agreement == UNIFORM ? call<Moments<T, L, UNIFORM>, T, L>(a, watch)
             : agreement == DOT   ? call<Moments<T, L, DOT>, T, L>(a, watch)
                                  : call<Moments<T, L, GAUSSIAN>, T, L>(a, watch);
    case MOMENTS_BACKWARD:
      return agreement == UNIFORM ? call<MomentsBackward<T, L, UNIFORM>, T, L>(a, watch)
             : agreement == DOT   ? call<MomentsBackward<T, L, DOT>, T, L>(a, watch)
                                  : call<MomentsBackward<T, L, GAUSSIAN>, T, L>(a, watch);
  }
}

}  // namespace

int run(Operation operation, int64_t bytes, const Problem& a) {
  Watch watch(a.interrupted);
  if (bytes == 8) choose<double, VECTOR_BYTES / 8>(operation, a, watch);
  if (bytes == 4) choose<float, VECTOR_BYTES / 4>(operation, a, watch);
  return watch.status();
}

}  // namespace INSTRUCTIONS
}  // namespace torchcaps
