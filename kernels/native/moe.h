// Mixture of experts of one layer: norm, sigmoid router, top-k, grouped SwiGLU experts, weighted sum, residual.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear.h"

struct Routing {
  int64_t experts, top_k;
  const float* router;  // panels, fp32
  const float* bias;    // (experts): takes part in the choice only
  int normalise;
  float scale;
};

// Choose a row's experts from its logits, in ascending order; a tie goes to the lower one.
static inline void choose(const float* logits, const Routing& routing, int32_t* chosen, float* weights) {
  float scores[routing.experts], biased[routing.experts];
  for (int64_t e = 0; e < routing.experts; e++) {
    scores[e] = 1.f / (1.f + std::exp(-logits[e]));
    biased[e] = scores[e] + routing.bias[e];
    if (biased[e] != biased[e]) biased[e] = -INFINITY;  // NaN inputs: any expert will pass the NaN on
  }
  for (int64_t k = 0; k < routing.top_k; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < routing.experts; e++)
      if (std::find(chosen, chosen + k, int32_t(e)) == chosen + k && (best < 0 || biased[e] > biased[best])) best = e;
    chosen[k] = int32_t(best);
  }
  std::sort(chosen, chosen + routing.top_k);
  float total = 0;
  for (int64_t k = 0; k < routing.top_k; k++) total += weights[k] = scores[chosen[k]];
  float factor = routing.normalise ? routing.scale / (total + 1e-20f) : routing.scale;
  for (int64_t k = 0; k < routing.top_k; k++) weights[k] *= factor;
}

struct Group {
  int64_t expert, begin, rows;  // rows begin.. of the list sorted by expert
};

template <typename T, typename W>
static void moe(const T* x, int64_t rows, int64_t depth, const float* norm, float eps, const Routing& routing,
                const W* gate_up, const W* down, int64_t width, const T* residual, T* y) {
  int64_t top_k = routing.top_k, routed = rows * top_k;
  int64_t router_panels = panels_of(routing.experts), router_width = router_panels * NR;
  float* normed = scratch(3, rows * depth);
  float* logits = scratch(4, rows * router_width);
  float* weights = scratch(5, routed);
  float* outputs = scratch(6, routed * depth);
  std::vector<int32_t> chosen(routed), place(routed), source(routed);

  int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  parallel(blocks, [&](int64_t task) {
    int64_t begin = task * BLOCK_ROWS, block = rows - begin < BLOCK_ROWS ? rows - begin : BLOCK_ROWS;
    float* packed = scratch(0, block * depth);
    pack_rows(block, depth, packed, [&](int64_t row, float* to, int64_t stride) {
      float* plain = normed + (begin + row) * depth;
      put_row(x + (begin + row) * depth, depth, norm, eps, plain, 1);
      put_row<float>(plain, depth, nullptr, 0.f, to, stride);
    });
    multiply_packed(block, depth, packed, routing.router, 0, router_panels,
                    [&](int64_t row, int64_t column, vf low, vf high) {
                      float* to = logits + (begin + row) * router_width + column;
                      store(to, low);
                      store(to + LANES, high);
                    });
    for (int64_t row = begin; row < begin + block; row++)
      choose(logits + row * router_width, routing, chosen.data() + row * top_k, weights + row * top_k);
  });

  std::vector<int64_t> next(routing.experts + 1, 0);
  for (int32_t e : chosen) next[e + 1]++;
  std::vector<Group> groups;
  for (int64_t e = 0; e < routing.experts; e++) {
    for (int64_t begin = 0; begin < next[e + 1]; begin += BLOCK_ROWS)
      groups.push_back({e, next[e] + begin, std::min(BLOCK_ROWS, next[e + 1] - begin)});
    next[e + 1] += next[e];
  }
  for (int64_t i = 0; i < routed; i++) {
    place[i] = int32_t(next[chosen[i]]++);
    source[place[i]] = int32_t(i / top_k);
  }

  int64_t wide = (width + LANES - 1) / LANES, count = panels_of(depth);
  parallel(int64_t(groups.size()), [&](int64_t task) {
    const Group& group = groups[task];
    float* packed = scratch(0, group.rows * depth);
    float* hidden = scratch(2, group.rows * width);
    pack_rows(group.rows, depth, packed, [&](int64_t row, float* to, int64_t stride) {
      put_row<float>(normed + source[group.begin + row] * depth, depth, nullptr, 0.f, to, stride);
    });
    gated(group.rows, depth, packed, gate_up + group.expert * wide * depth * NR, 0, wide, SILU, width, hidden);
    multiply_packed(group.rows, width, hidden, down + group.expert * count * width * NR, 0, count,
                    [&](int64_t row, int64_t column, vf low, vf high) {
                      float* to = outputs + (group.begin + row) * depth + column;
                      store_some(to, low, depth - column);
                      store_some(to + LANES, high, depth - column - LANES);
                    });
  });

  // The experts of a row are added in ascending order, whatever ran first.
  for (int64_t row = 0; row < rows; row++)
    for (int64_t k = 0; k < depth; k += LANES) {
      vf total = {};
      for (int64_t i = row * top_k; i < (row + 1) * top_k; i++)
        total += weights[i] * load_some(outputs + place[i] * depth + k, depth - k);
      if (residual != nullptr) total += load_some(residual + row * depth + k, depth - k);
      store_some(y + row * depth + k, total, depth - k);
    }
}
