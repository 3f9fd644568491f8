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
// children and a few tiles of parents at a time, so that their logits stay in the nearest cache. A softmax over the
// parents needs all tiles at once.
// `Base` turns logits into weights or gradients. Beside the members that a Worker needs, `Self` has
//   void begin_group(count), end_group(count)   called before and after the children of a group; `count` samples
//   void visit(s, count)                        called for sample s and `count` children with the poses `pose_of`
template <class Self, class Base>
class SharedLoop : public Base {
 public:
  using T = typename Base::Number;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::features, Base::shape, Base::pose_size, Base::arena, Base::kernel, Base::shard,
      Base::chunk, Base::total_size, Base::totals;
  static constexpr int KNOWN = Base::KNOWN_POSE;
  // Larger than in Worker: the weights of a group are packed once for all samples of a block, and the data about the
  // parents of a sample is read only once for each group.
  static constexpr int64_t CACHE = 1 << 23;
  static constexpr int OFFSETS = CHILDREN;

  SharedLoop(const Problem& a, const Shard& shard, SharedGradients& shared)
      : Base(a, shard, shared), width(pose_size + (a.bias != nullptr)), span(a.over_children ? least(tiles, 4) : tiles),
        most_children(a.over_children ? CHILDREN : static_cast<int>(most(1, least(8, 32 / tiles))) * CHUNK) {}

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
  template <int N>
  void group(int64_t) {}

  V* get(int64_t count) { return arena.template get<V>(count); }
  // Allocates `most_children` rows of `span` vectors.
  void get_rows(V** rows) {
    V* all = get(most_children * span);
    for (int c = 0; c < most_children; c++) rows[c] = all + c * span;
  }

  // Pulls vectors x of one tile of parents through the weights: (rows, h) to (rows, d).
  INLINE void pull(int64_t t, const V* x, V* pulled) const {
    const int64_t D = shape.d(), H = shape.h();
    const V* w = this->weight.row(0) + t * H * D;
    if constexpr (KNOWN > 0) {
      V sums[KNOWN] = {};
      for (int64_t h = 0; h < H; h++)
#pragma GCC unroll 16
        for (int i = 0; i < KNOWN; i++) sums[i] += w[h * D + i % D] * x[i / D * H + h];
#pragma GCC unroll 16
      for (int i = 0; i < KNOWN; i++) pulled[i] = sums[i];
    } else {
      for (int64_t r = 0; r < shape.rows(); r++)
        for (int64_t d = 0; d < D; d++) {
          V sum = {};
          for (int64_t h = 0; h < H; h++) sum += w[h * D + d] * x[r * H + h];
          pulled[r * D + d] = sum;
        }
    }
    if (!this->bias) return;
    const V* b = this->bias.row(0) + t * features;
    V sum = {};
    for (int64_t f = 0; f < features; f++) sum += b[f] * x[f];
    pulled[pose_size] = sum;
  }
  // Pushes sums of poses, (rows, d), of one tile of parents through the weights and adds them to `sums`, (rows, h).
  INLINE void add_pushed(int64_t t, const V* pulled, V* sums) const {
    const int64_t D = shape.d(), H = shape.h();
    const V* w = this->weight.row(0) + t * H * D;
    for (int64_t r = 0; r < shape.rows(); r++)
      for (int64_t h = 0; h < H; h++) {
        V sum = sums[r * H + h];
        for (int64_t d = 0; d < D; d++) sum += w[h * D + d] * pulled[r * D + d];
        sums[r * H + h] = sum;
      }
    if (!this->bias) return;
    const V* b = this->bias.row(0) + t * features;
    for (int64_t f = 0; f < features; f++) sums[f] += b[f] * pulled[pose_size];
  }

  // Products of the poses of `count` children with pulled vectors of the parents.
  INLINE void products(int count, int64_t first_tile, int64_t last_tile, const V* pulled, V* const* out) const {
    for (int64_t t = first_tile; t < last_tile; t++) {
      int c = 0;
      for (; c + 8 <= count; c += 8) products<8>(c, pulled + t * width, out, t - first_tile);
      for (; c < count; c++) products<1>(c, pulled + t * width, out, t - first_tile);
    }
  }
  template <int C>
  INLINE void products(int first, const V* pulled, V* const* out, int64_t i) const {
    const V start = this->bias ? pulled[pose_size] : V{};
    V sums[C];
    for (int c = 0; c < C; c++) sums[c] = start;
    const int64_t P = shape.pose();
#pragma GCC unroll 16
    for (int64_t n = 0; n < P; n++) {
      const V x = pulled[n];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[c] += pose_of[first + c][n] * x;
    }
    for (int c = 0; c < C; c++) out[first + c][i] = sums[c];
  }
  // Adds the weighted poses of these children to `sums`.
  INLINE void add_poses(int count, int64_t first_tile, int64_t last_tile, V* const* weights, V* sums) const {
    for (int64_t t = first_tile, i = 0; t < last_tile; t++, i++) {
      V* out = sums + t * width;
      for (int c = 0; this->bias && c < count; c++) out[pose_size] += weights[c][i];
      if constexpr (KNOWN > 0) {
        V own[KNOWN];
#pragma GCC unroll 16
        for (int n = 0; n < KNOWN; n++) own[n] = out[n];
        for (int c = 0; c < count; c++) {
          const V weight = weights[c][i];
          const T* p = pose_of[c];
#pragma GCC unroll 16
          for (int n = 0; n < KNOWN; n++) own[n] += p[n] * weight;
        }
#pragma GCC unroll 16
        for (int n = 0; n < KNOWN; n++) out[n] = own[n];
      } else {
        for (int64_t n = 0; n < pose_size; n++) {
          V own = out[n];
          for (int c = 0; c < count; c++) own += pose_of[c][n] * weights[c][i];
          out[n] = own;
        }
      }
    }
  }

  const int64_t width, span;  // vectors for one pose and the bias; tiles processed at once
  const int most_children;

 protected:
  const T* pose_of[CHILDREN];
};

template <class T, int L, class S>
class WeightedSumShared : public SharedLoop<WeightedSumShared<T, L, S>, Weighing<WeightedSumShared<T, L, S>, T, L, S>> {
 public:
  using Base = SharedLoop<WeightedSumShared<T, L, S>, Weighing<WeightedSumShared<T, L, S>, T, L, S>>;
  using V = typename Base::V;
  using Base::a, Base::tiles, Base::size, Base::features, Base::pose_size, Base::width, Base::span, Base::chunk,
      Base::total_size;
  using Base::Base;

  // Vectors of a sample for the group at hand: sums of poses, masses, largest logits.
  int64_t summed_size() const { return tiles * (width + 2); }
  int64_t state_size() const { return size + tiles * width + summed_size(); }

  void make_room() {
    Base::make_room();
    pulled = this->get(this->block * tiles * width);
    summed = this->get(this->block * summed_size());
    pushed = this->get(features);
    this->get_rows(rows);
  }
  void begin_group(int64_t count) {
    for (int64_t t = 0; t < tiles; t++)
      for (int64_t s = 0; s < count; s++)
        this->pull(t, this->query + s * size + t * features, pulled + (s * tiles + t) * width);
    for (int64_t s = 0; s < count; s++) {
      V *sums = summed + s * summed_size(), *largest = sums + tiles * (width + 1);
      memset(static_cast<void*>(sums), 0, summed_size() * sizeof(V));
      for (int64_t t = 0; t < tiles; t++) largest[t] = splat<T, L>(-INFINITY);
    }
  }
  void visit(int64_t s, int count) {
    V* sums = summed + s * summed_size();
    for (int64_t t = 0; t < tiles; t += span) {
      const int64_t end = least(tiles, t + span);
      this->products(count, t, end, pulled + s * tiles * width, rows);
      if (a.over_children) {
        this->weigh_children(s, count, t, end, rows, sums, width, sums + tiles * width);
      } else {
        for (int first = 0; first < count; first += CHUNK) {
          chunk = static_cast<int>(least(CHUNK, count - first));
          this->template weigh_parents<1>(s, first, rows + first);
        }
      }
      this->add_poses(count, t, end, rows, sums);
    }
  }
  void end_group(int64_t count) {
    for (int64_t t = 0; t < tiles; t++)
      for (int64_t s = 0; s < count; s++) {
        const V *sums = summed + s * summed_size(), *mass = sums + tiles * width;
        V* total = this->totals + s * total_size;
        if (!a.over_children) {
          this->add_pushed(t, sums + t * width, total + t * features);
          continue;
        }
        for (int64_t f = 0; f < features; f++) pushed[f] = V{};
        this->add_pushed(t, sums + t * width, pushed);
        this->merge_tile(t, total, pushed, mass[t], mass[tiles + t]);
      }
  }

 private:
  V *pulled, *summed, *pushed, *rows[CHILDREN];
};

template <class T, int L, class S>
class WeightedSumSharedBackward : public SharedLoop<WeightedSumSharedBackward<T, L, S>,
                                                    WeighingBackward<WeightedSumSharedBackward<T, L, S>, T, L, S>> {
 public:
  using Base =
      SharedLoop<WeightedSumSharedBackward<T, L, S>, WeighingBackward<WeightedSumSharedBackward<T, L, S>, T, L, S>>;
  using V = typename Base::V;
  using Base::tiles, Base::pose_size, Base::size, Base::features, Base::chunk, Base::width, Base::span,
      Base::KNOWN;
  using Base::Base;

  // A sample also has, (tiles, width) each: the pulled query, the pulled gradient of the sums, and the sums of the poses
  // weighted by the gradients of the logits and by the weights.
  int64_t state_size() const { return Base::state_size() + 4 * tiles * width; }

  void make_room() {
    Base::make_room();
    for (V** x : {&query_pulled, &grad_pulled, &sloped, &weighted})
      *x = this->get(this->block * tiles * width);
    for (V** x : {slopes, shares, gains}) this->get_rows(x);
    of_poses = this->get(this->most_children * pose_size);
  }
  void begin_group(int64_t count) {
    for (int64_t t = 0; t < tiles; t++)
      for (int64_t s = 0; s < count; s++) {
        const int64_t from = s * size + t * features, to = (s * tiles + t) * width;
        this->pull(t, this->query + from, query_pulled + to);
        this->pull(t, this->grad + from, grad_pulled + to);
      }
    for (V* x : {sloped, weighted}) memset(static_cast<void*>(x), 0, count * tiles * width * sizeof(V));
  }
  void visit(int64_t s, int count) {
    const int64_t at = s * tiles * width;
    memset(static_cast<void*>(of_poses), 0, count * pose_size * sizeof(V));
    for (int64_t t = 0; t < tiles; t += span) {
      const int64_t end = least(tiles, t + span);
      this->products(count, t, end, query_pulled + at, slopes);
      this->products(count, t, end, grad_pulled + at, gains);
      if (this->a.over_children) {
        this->of_logits_of_children(s, count, t, end, slopes, shares, gains, nullptr);
      } else {
        for (int first = 0; first < count; first += CHUNK) {
          chunk = static_cast<int>(least(CHUNK, count - first));
          for (int c = 0; c < chunk; c++) {
            this->logits[c] = slopes[first + c];
            this->weights[c] = shares[first + c];
            this->benefits[c] = gains[first + c];
          }
          this->template of_logits_of_parents<1>(s, first);
        }
      }
      this->add_poses(count, t, end, slopes, sloped + at);
      this->add_poses(count, t, end, shares, weighted + at);
      if (!this->grad_poses) continue;
      int c = 0;
      for (; c + CHUNK <= count; c += CHUNK) add_of_poses<CHUNK>(c, t, end, at);
      for (; c < count; c++) add_of_poses<1>(c, t, end, at);
    }
    if (!this->grad_poses) return;
    for (int c = 0; c < count; c++) {
      T* out = this->grad_poses + (this->pose_of[c] - this->poses);
      if constexpr (KNOWN > 0) {
        join_lanes<Sum, T, L, KNOWN>(of_poses + c * KNOWN, this->found);
        for (int n = 0; n < KNOWN; n++) out[n] += this->found[n];
      } else {
        for (int64_t n = 0; n < pose_size; n++) out[n] += sum_of_lanes<T, L>(of_poses[c * pose_size + n]);
      }
    }
  }
  template <int C>
  INLINE void add_of_poses(int first, int64_t t, int64_t end, int64_t at) {
    constexpr int N = KNOWN > 0 ? 4 : 1;  // numbers of a pose at once
    const int64_t span = end - t;
    for (int64_t n = 0; n < pose_size; n += N) {
      V sums[C * N];
#pragma GCC unroll 16
      for (int i = 0; i < C * N; i++) sums[i] = of_poses[(first + i / N) * pose_size + n + i % N];
      for (int64_t i = 0; i < span; i++) {
        const V *q = query_pulled + at + (t + i) * width + n, *g = grad_pulled + at + (t + i) * width + n;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
          const V slope = slopes[first + c][i], weight = shares[first + c][i];
#pragma GCC unroll 4
          for (int k = 0; k < N; k++) sums[c * N + k] += slope * q[k] + weight * g[k];
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < C * N; i++) of_poses[(first + i / N) * pose_size + n + i % N] = sums[i];
    }
  }
  void end_group(int64_t count) {
    V *of_weight = this->weight.grad(0), *of_bias = this->bias.grad(0);
    for (int64_t t = 0; t < tiles; t++) {
      for (int64_t s = 0; s < count; s++) {
        const V *q = this->query + s * size + t * features, *g = this->grad + s * size + t * features;
        const V *slopes = sloped + (s * tiles + t) * width, *shares = weighted + (s * tiles + t) * width;
        this->add_pushed(t, slopes, this->totals + s * size + t * features);
        if (of_weight) add_of_weight(q, g, slopes, shares, of_weight + t * this->shape.h() * this->shape.d());
        for (int64_t f = 0; of_bias && f < features; f++)
          of_bias[t * features + f] += slopes[pose_size] * q[f] + shares[pose_size] * g[f];
      }
    }
  }
  INLINE void add_of_weight(const V* q, const V* g, const V* slopes, const V* shares, V* out) const {
    const int64_t R = this->shape.rows(), D = this->shape.d(), H = this->shape.h();
    for (int64_t h = 0; h < H; h++, out += D)
      for (int64_t d = 0; d < D; d++) {
        V sum = out[d];
        for (int64_t r = 0; r < R; r++) sum += slopes[r * D + d] * q[r * H + h] + shares[r * D + d] * g[r * H + h];
        out[d] = sum;
      }
  }

 private:
  V *query_pulled, *grad_pulled, *sloped, *weighted, *of_poses;
  V *slopes[CHILDREN], *shares[CHILDREN], *gains[CHILDREN];
};

}  // namespace
}  // namespace INSTRUCTIONS
}  // namespace torchcaps
