// The squash of Sabour et al. (2017) and its gradient. PyTorch's operators would take longer: to start for few vectors,
// to read memory for many.
#pragma once
#include <cmath>
#include <cstdint>

#include "problem.h"

namespace torchcaps {

// x, grad and out are (count, size). Writes f x with f = l / (1 + l^2) for the length l of a vector; with the gradient g
// of the result, writes that of x, f g + f' / l (g . x) x. In this order no factor overflows.
template <class T>
struct Squash {
  int64_t count, size, threads;
  const T *x, *grad;
  T* out;

  void run() { in_parallel(static_cast<int>(threads), part, this); }
  static void part(void* context, int number) {
    const Squash& a = *static_cast<Squash*>(context);
    for (int64_t i = a.count * number / a.threads; i < a.count * (number + 1) / a.threads; i++) {
      a.vector(a.x + i * a.size, a.grad ? a.grad + i * a.size : nullptr, a.out + i * a.size);
    }
  }
  void vector(const T* s, const T* g, T* v) const {
    double square = 0, along = 0;
    for (int64_t k = 0; k < size; k++) square += double(s[k]) * s[k];
    const double more = 1 + square, length = std::sqrt(square < 1e-30 ? 1e-30 : square), scale = square / more / length;
    if (!g) {
      for (int64_t k = 0; k < size; k++) v[k] = static_cast<T>(scale * s[k]);
      return;
    }
    for (int64_t k = 0; k < size; k++) along += double(g[k]) * s[k];
    along = along / length * ((1 - square) / more) / more;
    for (int64_t k = 0; k < size; k++) v[k] = static_cast<T>(scale * g[k] + along * s[k]);
  }
};

}  // namespace torchcaps
