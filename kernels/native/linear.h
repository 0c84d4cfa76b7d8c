// Linear layers and dense SwiGLU with their norm in front and their residual behind.
#pragma once

#include "gemm.h"

// y = residual + norm(x) W^T; norm and residual may be null, y may be the residual.
template <typename T, typename W>
static void linear(const T* x, int64_t x_row, int64_t rows, int64_t depth, const float* norm, float eps,
                   const W* panels, int64_t columns, const T* residual, int64_t residual_row, T* y, int64_t y_row) {
  int64_t count = panels_of(columns), step = panels_per_task(count), splits = (count + step - 1) / step;
  int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  parallel(blocks * splits, [&](int64_t task) {
    int64_t begin = task / splits * BLOCK_ROWS, first = task % splits * step;
    int64_t block = rows - begin < BLOCK_ROWS ? rows - begin : BLOCK_ROWS;
    float* packed = scratch(0, block * depth);
    pack_rows(block, depth, packed, [&](int64_t row, float* to, int64_t stride) {
      put_row(x + (begin + row) * x_row, depth, norm, eps, to, stride);
    });
    int64_t last = first + step < count ? first + step : count;
    multiply_packed(block, depth, packed, panels, first, last, [&](int64_t row, int64_t column, vf low, vf high) {
      T* to = y + (begin + row) * y_row + column;
      int64_t left = columns - column;
      if (residual != nullptr) {
        const T* from = residual + (begin + row) * residual_row + column;
        low += load_some(from, left);
        high += load_some(from + LANES, left - LANES);
      }
      store_some(to, low, left);
      store_some(to + LANES, high, left - LANES);
    });
  });
}

// y = residual + norm(x), row by row.
template <typename T>
static void rms_norm(const T* x, int64_t rows, int64_t size, const float* weight, float eps, const T* residual, T* y) {
  for (int64_t row = 0; row < rows; row++, x += size, y += size) {
    float factor = inverse_rms(x, size, eps);
    for (int64_t d = 0; d < size; d++) {
      float value = to_float(x[d]) * factor * weight[d];
      put(y + d, residual == nullptr ? value : value + to_float(residual[row * size + d]));
    }
  }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

static inline vf tanh(vf x) {
  // 1 - 2 / (e^2x + 1), from the positive side so that neither end loses all digits.
  vf positive = x < 0.f ? -x : x;
  vf y = 1.f - 2.f / (exp(2.f * positive) + 1.f);
  return x < 0.f ? -y : y;
}

static inline vf activate(vf x, int activation) {
  if (activation == SILU) return silu(x);
  return 0.5f * x * (1.f + tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// Columns of a gate/up panel: LANES of gate, then the same LANES of up; so a panel yields LANES products.
template <typename W>
static inline void gated(int64_t rows, int64_t depth, const float* packed, const W* panels, int64_t first,
                         int64_t last, int activation, int64_t width, float* hidden) {
  multiply_packed(rows, depth, packed, panels, first, last, [&](int64_t row, int64_t column, vf gate, vf up) {
    // `hidden` is laid out as packed rows are, for the second product.
    int64_t tile = row / MR, inside = row % MR, height = rows - tile * MR < MR ? rows - tile * MR : MR;
    float* to = hidden + tile * MR * width + inside;
    float values[LANES];
    store(values, activate(gate, activation) * up);
    int64_t begin = column / 2, end = begin + LANES < width ? begin + LANES : width;
    for (int64_t k = begin; k < end; k++) to[k * height] = values[k - begin];
  });
}

// y = x + down(act(gate(norm(x))) * up(norm(x))); `width` is the intermediate size.
template <typename T, typename W>
static void gated_mlp(const T* x, int64_t rows, int64_t depth, const float* norm, float eps, int activation,
                      const W* gate_up, int64_t width, const W* down, const T* residual, T* y) {
  int64_t wide = (width + LANES - 1) / LANES, step1 = panels_per_task(wide);
  int64_t count = panels_of(depth), step2 = panels_per_task(count);
  for (int64_t begin = 0; begin < rows; begin += BLOCK_ROWS) {
    int64_t block = rows - begin < BLOCK_ROWS ? rows - begin : BLOCK_ROWS;
    float* packed = scratch(1, block * depth);
    float* hidden = scratch(2, block * width);
    pack_rows(block, depth, packed, [&](int64_t row, float* to, int64_t stride) {
      put_row(x + (begin + row) * depth, depth, norm, eps, to, stride);
    });
    parallel((wide + step1 - 1) / step1, [&](int64_t task) {
      int64_t last = (task + 1) * step1 < wide ? (task + 1) * step1 : wide;
      gated(block, depth, packed, gate_up, task * step1, last, activation, width, hidden);
    });
    parallel((count + step2 - 1) / step2, [&](int64_t task) {
      int64_t last = (task + 1) * step2 < count ? (task + 1) * step2 : count;
      multiply_packed(block, width, hidden, down, task * step2, last,
                      [&](int64_t row, int64_t column, vf low, vf high) {
                        int64_t at = (begin + row) * depth + column, left = depth - column;
                        if (residual != nullptr) {
                          low += load_some(residual + at, left);
                          high += load_some(residual + at + LANES, left - LANES);
                        }
                        store_some(y + at, low, left);
                        store_some(y + at + LANES, high, left - LANES);
                      });
    });
  }
}
