// The squash of Sabour et al. (2017) and its gradient, for few vectors: PyTorch's operators would take longer to start.
#pragma once
#include <cmath>
#include <cstdint>

namespace torchcaps {

// x, grad and out are (count, size). Writes f x with f = l / (1 + l^2) for the length l of a vector; with the gradient g
// of the result, writes that of x, f g + f' / l (g . x) x. In this order no factor overflows.
template <class T>
void squash(int64_t count, int64_t size, const T* x, const T* grad, T* out) {
  for (int64_t i = 0; i < count; i++, x += size, out += size) {
    double square = 0, along = 0;
    for (int64_t k = 0; k < size; k++) square += double(x[k]) * x[k];
    const double more = 1 + square, length = std::sqrt(square < 1e-30 ? 1e-30 : square), scale = square / more / length;
    if (!grad) {
      for (int64_t k = 0; k < size; k++) out[k] = static_cast<T>(scale * x[k]);
      continue;
    }
    for (int64_t k = 0; k < size; k++) along += double(grad[k]) * x[k];
    along = along / length * ((1 - square) / more) / more;
    for (int64_t k = 0; k < size; k++) out[k] = static_cast<T>(scale * grad[k] + along * x[k]);
    grad += size;
  }
}

}  // namespace torchcaps
