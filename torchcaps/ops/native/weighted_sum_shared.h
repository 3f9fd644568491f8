// Weighted sums for children that share weights, without votes: (pose W + b) . q = pose . (W q) + b . q, where W q and
// b . q are the same for all children of a group ("pulled" through the weights). The other way the weighted sum of the
// poses is multiplied by W, and the sum of the weights by b ("pushed"), as if every pose ended in a 1.
#pragma once
#include "weighted_sum.h"

namespace torchcaps {
namespace INSTRUCTIONS {
namespace {

constexpr int SUMMED = 1024;  // most children whose poses are summed before they are pushed

// The loop of forward and backward: over groups, in a group over samples, and in a sample over at most CHILDREN
// children and a few blocks of parents at a time, so that their logits stay in the nearest cache. A softmax over the
// parents needs all blocks at once. Lanes lie along the parents, so that a tile is a block.
// `Base` turns logits into weights or gradients. Beside the members that a Worker needs, `Self` has
//   void begin_group(count), end_group(count)   called before and after the children of a group; `count` samples
//   void visit(s, count)                        called for sample s and `count` children with the poses `pose_of`
template <class Self, class Base>
class SharedLoop : public Base {
 public:
  using T = typename Base::Number;
  using V = typename Base::V;
  using Base::a, Base::at, Base::blocks, Base::size, Base::pose_size, Base::kernel, Base::shard;
  static constexpr int BLOCK = 8;  // numbers in registers
  static constexpr bool ALONG_PARENTS = true, VOTES = false;
  // Larger than in Worker: the weights of a group are packed once for all samples of a block, and the data about the
  // parents of a sample is read only once for each group.
  static constexpr int64_t CACHE = 1 << 23;
  static constexpr int OFFSETS = CHILDREN;

  using Base::Base;

  bool children(Watch& watch, int64_t count) {
    Self& self = static_cast<Self&>(*this);
    const int64_t per_group = a.types / a.groups;
    for (int64_t type = shard.first_type; type < shard.last_type;) {
      const int64_t end = least(least(shard.last_type, (type / per_group + 1) * per_group), type + SUMMED);
      for (int64_t place = 0; place < kernel; place++) {
        this->weight.load(0, type, place);
        this->bias.load(0, type, place);
        self.begin_group(count);
        for (int64_t s = 0; s < count; s++) {
          if (watch.stopped()) return false;
          for (int64_t first = type; first < end; first += most_children) {
            const int own = static_cast<int>(least(most_children, end - first));
            for (int c = 0; c < own; c++) {
              this->index[c] = (first + c) * kernel + place;
              this->child_places[c] = this->places.of_child(first + c, place);
              this->offset.load(c, first + c, place);
              pose_of[c] = this->pose(s, c);
            }
            self.visit(s, own);
          }
        }
        self.end_group(count);
      }
      type = end;
    }
    Base::flush();
    return true;
  }
  void group(int64_t, int) {}

  void get_rows(V** rows) { Base::get_rows(rows, most_children, span); }

  // Pulls vectors x of one block of parents through the weights: (rows, h) to (rows, d).
  SEPARATE void pull(int64_t t, const V* x, V* pulled) const {
    const V *w = this->weight.row(0) + t * a.d * a.h, *b = this->bias ? this->bias.row(0) + t * a.h : nullptr;
    V sum = {};
    for (int64_t r = 0; r < a.rows; r++, x += at.row, pulled += a.d) {
      in_blocks<BLOCK>(a.d, [&](auto n, int64_t e) INLINED {
        constexpr int N = decltype(n)::value;
        V sums[N] = {};
        for (int64_t h = 0; h < a.h; h++)
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) sums[i] += w[(e + i) * a.h + h] * x[t * a.h + h];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) pulled[e + i] = sums[i];
      });
      for (int64_t h = 0; b && h < a.h; h++) sum += b[r * at.row + h] * x[t * a.h + h];
    }
    if (b) *pulled = sum;
  }
  // Pushes sums of poses, (rows, d), of one block of parents through the weights and adds them to `sums`, (rows, h).
  SEPARATE void add_pushed(int64_t t, const V* pulled, V* sums) const {
    const V *w = this->weight.row(0) + t * a.d * a.h, *b = this->bias ? this->bias.row(0) + t * a.h : nullptr;
    sums += t * a.h;
    for (int64_t r = 0; r < a.rows; r++, sums += at.row)
      in_blocks<BLOCK>(a.h, [&](auto n, int64_t h) INLINED {
        constexpr int N = decltype(n)::value;
        V own[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) own[i] = b ? sums[h + i] + b[r * at.row + h + i] * pulled[pose_size] : sums[h + i];
        for (int64_t e = 0; e < a.d; e++)
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) own[i] += w[e * a.h + h + i] * pulled[r * a.d + e];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) sums[h + i] = own[i];
      });
  }

  // Products of the poses of `count` children with pulled vectors of the parents.
  SEPARATE void products(int count, int64_t from, int64_t to, const V* pulled, V* const* out) const {
    for (int64_t t = from; t < to; t++) {
      const V *own = pulled + t * width, start = this->bias ? own[pose_size] : V{};
      in_blocks<BLOCK>(count, [&](auto n, int64_t c) INLINED {
        constexpr int N = decltype(n)::value;
        V sums[N];
        for (int i = 0; i < N; i++) sums[i] = start;
        for (int64_t k = 0; k < pose_size; k++) {
          const V x = own[k];
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) sums[i] += pose_of[c + i][k] * x;
        }
        for (int i = 0; i < N; i++) out[c + i][t - from] = sums[i];
      });
    }
  }
  // Adds the weighted poses of these children to `sums`.
  SEPARATE void add_poses(int count, int64_t from, int64_t to, V* const* weights, V* sums) const {
    for (int64_t t = from; t < to; t++) {
      V* out = sums + t * width;
      for (int c = 0; this->bias && c < count; c++) out[pose_size] += weights[c][t - from];
      in_blocks<BLOCK>(pose_size, [&](auto n, int64_t k) INLINED {
        constexpr int N = decltype(n)::value;
        V own[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) own[i] = out[k + i];
        for (int c = 0; c < count; c++) {
          const V weight = weights[c][t - from];
          const T* p = pose_of[c] + k;
#pragma GCC unroll 8
          for (int i = 0; i < N; i++) own[i] += p[i] * weight;
        }
#pragma GCC unroll 8
        for (int i = 0; i < N; i++) out[k + i] = own[i];
      });
    }
  }

  const int64_t width = pose_size + (a.bias != nullptr);             // vectors for one pose and the bias
  const int64_t span = a.over_children ? least(blocks, 4) : blocks;  // blocks processed at once
  const int most_children = a.over_children ? CHILDREN : static_cast<int>(most(1, least(8, 32 / blocks))) * CHUNK;

 protected:
  const T* pose_of[CHILDREN];
};

template <class T, int L>
class WeightedSumShared : public SharedLoop<WeightedSumShared<T, L>, Weighing<WeightedSumShared<T, L>, T, L>> {
 public:
  using Base = SharedLoop<WeightedSumShared<T, L>, Weighing<WeightedSumShared<T, L>, T, L>>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::blocks, Base::size, Base::width, Base::span, Base::total_size;
  using Base::Base;

  // Vectors of a sample for the group at hand: sums of poses, masses, largest logits.
  int64_t summed_size() const { return blocks * (width + 2); }
  int64_t state_size() const { return size + blocks * width + summed_size(); }

  void make_room() {
    Base::make_room();
    pulled = this->get(this->block * blocks * width);
    summed = this->get(this->block * summed_size());
    pushed = this->get(size);
    this->get_rows(rows);
  }
  void begin_group(int64_t count) {
    for (int64_t t = 0; t < blocks; t++)
      for (int64_t s = 0; s < count; s++) this->pull(t, this->query + s * size, pulled + (s * blocks + t) * width);
    for (int64_t s = 0; s < count; s++) {
      V *sums = summed + s * summed_size(), *largest = sums + blocks * (width + 1);
      memset(static_cast<void*>(sums), 0, summed_size() * sizeof(V));
      for (int64_t t = 0; t < blocks; t++) largest[t] = splat<T, L>(-INFINITY);
    }
  }
  void visit(int64_t s, int count) {
    V *sums = summed + s * summed_size(), *mass = sums + blocks * width;
    for (int64_t t = 0; t < blocks; t += span) {
      const int64_t end = least(blocks, t + span);
      this->products(count, t, end, pulled + s * blocks * width, rows);
      if (!a.over_children) {
        this->weigh_parents(s, count, count, rows);
      } else if (this->weigh_children(s, count, t, end, rows, mass)) {
        for (int64_t i = t * width; i < end * width; i++) sums[i] *= this->factors[i / width];
      }
      this->add_poses(count, t, end, rows, sums);
    }
  }
  void end_group(int64_t count) {
    for (int64_t s = 0; s < count; s++) {
      const V* sums = summed + s * summed_size();
      V *total = this->totals + s * total_size, *into = a.over_children ? pushed : total;
      if (a.over_children) memset(static_cast<void*>(pushed), 0, size * sizeof(V));
      for (int64_t t = 0; t < blocks; t++) this->add_pushed(t, sums + t * width, into);
      if (a.over_children) this->merge_children(total, pushed, sums + blocks * width);
    }
  }

 private:
  V *pulled, *summed, *pushed, *rows[CHILDREN];
};

template <class T, int L>
class WeightedSumSharedBackward
    : public SharedLoop<WeightedSumSharedBackward<T, L>, WeighingBackward<WeightedSumSharedBackward<T, L>, T, L>> {
 public:
  using Base = SharedLoop<WeightedSumSharedBackward<T, L>, WeighingBackward<WeightedSumSharedBackward<T, L>, T, L>>;
  using V = typename Base::V;
  using Base::a, Base::at, Base::blocks, Base::pose_size, Base::size, Base::width, Base::span;
  using Base::Base;

  // A sample also has, (blocks, width) each: the pulled query, the pulled gradient of the sums, and the sums of the poses
  // weighted by the gradients of the logits and by the weights.
  int64_t state_size() const { return Base::state_size() + 4 * blocks * width; }

  void make_room() {
    Base::make_room();
    for (V** x : {&query_pulled, &grad_pulled, &sloped, &weighted}) *x = this->get(this->block * blocks * width);
    for (V** x : {slopes, shares, gains}) this->get_rows(x);
  }
  void begin_group(int64_t count) {
    for (int64_t t = 0; t < blocks; t++)
      for (int64_t s = 0; s < count; s++) {
        const int64_t to = (s * blocks + t) * width;
        this->pull(t, this->query + s * size, query_pulled + to);
        this->pull(t, this->grad + s * size, grad_pulled + to);
      }
    for (V* x : {sloped, weighted}) memset(static_cast<void*>(x), 0, count * blocks * width * sizeof(V));
  }
  void visit(int64_t s, int count) {
    const int64_t of_sample = s * blocks * width;
    for (int64_t t = 0; t < blocks; t += span) {
      const int64_t end = least(blocks, t + span);
      this->products(count, t, end, query_pulled + of_sample, slopes);
      this->products(count, t, end, grad_pulled + of_sample, gains);
      if (a.over_children) {
        this->of_logits_of_children(s, count, t, end, slopes, shares, gains, nullptr);
      } else {
        this->of_logits_of_parents(s, count, count, slopes, shares, gains, nullptr);
      }
      this->add_poses(count, t, end, slopes, sloped + of_sample);
      this->add_poses(count, t, end, shares, weighted + of_sample);
      if (this->grad_poses) add_of_poses(count, t, end, of_sample);
    }
  }
  // Adds to the gradients of these poses what these blocks of parents give.
  SEPARATE void add_of_poses(int count, int64_t from, int64_t to, int64_t of_sample) {
    in_blocks<2>(count, [&](auto m, int64_t c) INLINED {
      constexpr int C = decltype(m)::value;
      in_blocks<4>(pose_size, [&](auto n, int64_t k) INLINED {
        constexpr int N = decltype(n)::value;
        V sums[C * N] = {};
        for (int64_t t = from; t < to; t++) {
          const V *q = query_pulled + of_sample + t * width + k, *g = grad_pulled + of_sample + t * width + k;
#pragma GCC unroll 16
          for (int i = 0; i < C * N; i++)
            sums[i] += slopes[c + i / N][t - from] * q[i % N] + shares[c + i / N][t - from] * g[i % N];
        }
        T joined[C * N];
        join_lanes<Sum, T, L, C * N>(sums, joined);
        for (int i = 0; i < C * N; i++)
          this->grad_poses[this->pose_of[c + i / N] - this->poses + k + i % N] += joined[i];
      });
    });
  }
  void end_group(int64_t count) {
    V *of_weight = this->weight.grad(0), *of_bias = this->bias.grad(0);
    for (int64_t t = 0; t < blocks; t++) {
      for (int64_t s = 0; s < count; s++)
        this->add_pushed(t, sloped + (s * blocks + t) * width, this->totals + s * size);
      if (of_weight) add_of_weight(t, count, of_weight + t * a.d * a.h);
      for (int64_t s = 0; of_bias && s < count; s++) {
        const V *q = this->query + s * size, *g = this->grad + s * size;
        const V slope = sloped[(s * blocks + t) * width + pose_size], share = weighted[(s * blocks + t) * width + pose_size];
        for (int64_t r = 0; r < a.rows; r++)
          for (int64_t f = r * at.row + t * a.h, end = f + a.h; f < end; f++) of_bias[f] += slope * q[f] + share * g[f];
      }
    }
  }
  SEPARATE void add_of_weight(int64_t t, int64_t count, V* out) {
    in_blocks<4>(a.h, [&](auto n, int64_t h) INLINED {
      constexpr int N = decltype(n)::value;
      in_blocks<2>(a.d, [&](auto m, int64_t e) INLINED {
        constexpr int D = decltype(m)::value;
        V sums[D * N];
#pragma GCC unroll 8
        for (int i = 0; i < D * N; i++) sums[i] = out[(e + i / N) * a.h + h + i % N];
        for (int64_t s = 0; s < count; s++)
          for (int64_t r = 0; r < a.rows; r++) {
            const V *q = this->query + s * size + r * at.row + t * a.h + h;
            const V *g = this->grad + s * size + r * at.row + t * a.h + h;
            const V *slope = sloped + (s * blocks + t) * width + r * a.d + e;
            const V *share = weighted + (s * blocks + t) * width + r * a.d + e;
#pragma GCC unroll 8
            for (int i = 0; i < D * N; i++) sums[i] += slope[i / N] * q[i % N] + share[i / N] * g[i % N];
          }
#pragma GCC unroll 8
        for (int i = 0; i < D * N; i++) out[(e + i / N) * a.h + h + i % N] = sums[i];
      });
    });
  }

 private:
  V *query_pulled, *grad_pulled, *sloped, *weighted;
  V *slopes[CHILDREN], *shares[CHILDREN], *gains[CHILDREN];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
