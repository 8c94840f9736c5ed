// One step: the forward pass of a Llama-layout model over a ragged batch of rows. Included by each path's file last.
//
// Every thread of the team runs `forward`; each loop's iterations go to whoever comes first, and a loop ends when all
// are done. An iteration writes what no other one of its loop reads or writes, so who ran it does not show.
#include "team.h"

#include "product.h"

#include "attention.h"

namespace anaphora::ANAPHORA_PATH {
namespace {

constexpr int64_t FEW_ROWS = 4;  // rows of one work item of everything but products
constexpr int64_t NO_NEXT = 0;   // strip to fetch ahead

template <typename Body>
void share(Team& team, int64_t count, Body body) {
  for (int64_t i = team.claim(); i < count; i = team.claim()) body(i);
  team.end_loop();
}

// body(row), a few rows a work item.
template <typename Body>
void share_rows(Team& team, int64_t num_rows, Body body) {
  share(team, ceil_div(num_rows, FEW_ROWS), [&](int64_t item) {
    const int64_t stop = (item + 1) * FEW_ROWS < num_rows ? (item + 1) * FEW_ROWS : num_rows;
    for (int64_t row = item * FEW_ROWS; row < stop; ++row) body(row);
  });
}

template <typename Epilogue>
void share_product(Team& team, const Matrix& matrix, const void* x, int64_t x_stride, int64_t num_rows,
                   Epilogue epilogue) {
  share(team, matrix.num_strips * ceil_div(num_rows, ROW_CHUNK), [&](int64_t item) {
    const int64_t first = item / matrix.num_strips * ROW_CHUNK;
    const int64_t stop = first + ROW_CHUNK < num_rows ? first + ROW_CHUNK : num_rows;
    const int64_t strip = item % matrix.num_strips;
    // This thread's next one, probably.
    const int64_t next = strip + team.size() < matrix.num_strips ? team.size() : 0;
    multiply(matrix, strip, next, (const Operand*)x, x_stride, first, stop,
             [&](int64_t row, F32 left, F32 right) { epilogue(row, strip, left, right); });
  });
}

// The inner half of what adapters add to a product: scale * (down @ x), of the rows that have one.
void lower(const Step& step, Team& team, int64_t layer, LowRank AdapterLayer::*which, const void* x, int64_t x_stride) {
  if (!step.num_adapted) return;
  const int64_t most_strips = step.lowered_stride / STRIP;
  share(team, step.num_adapted * most_strips, [&](int64_t item) {
    const AdaptedRows& rows = step.adapted[item / most_strips];
    const Matrix& down = (rows.adapter->layers[layer].*which).down;
    const int64_t strip = item % most_strips;
    if (strip >= down.num_strips) return;
    const F32 scale = splat(rows.adapter->scale);
    multiply(down, strip, NO_NEXT, (const Operand*)x, x_stride, rows.first, rows.stop, [&](int64_t row, F32 left, F32 right) {
      Operand* to = (Operand*)step.lowered + row * step.lowered_stride + strip * STRIP;
      store_operands(to, left * scale);
      store_operands(to + LANES, right * scale);
    });
  });
}

// The outer half, a row and a strip at a time: few inputs, so the row alone is enough to multiply by.
INLINE void add_adapted(const Step& step, int64_t layer, LowRank AdapterLayer::*which, int64_t row, int64_t strip,
                        F32& left, F32& right) {
  const Adapter* adapter = step.spans[step.rows[row].span].adapter;
  if (!adapter) return;
  const Matrix& up = (adapter->layers[layer].*which).up;
  if (!up.num_strips) return;
  alignas(64) float out[STRIP];
  const Operand* x = (const Operand*)step.lowered + row * step.lowered_stride;
  product<1>(Bf16Strip{up.strip<uint32_t>(strip)}, Ahead{}, up.num_pairs, x, step.lowered_stride, out);
  left = left + load(out);
  right = right + load(out + LANES);
}

// A layer's product of all rows, with what their adapters add to it.
template <typename Epilogue>
void project(const Step& step, Team& team, int64_t layer, Matrix Layer::*matrix, LowRank AdapterLayer::*which,
             const void* x, int64_t x_stride, Epilogue epilogue) {
  lower(step, team, layer, which, x, x_stride);
  share_product(team, step.model->layers[layer].*matrix, x, x_stride, step.num_rows,
                [&](int64_t row, int64_t strip, F32 left, F32 right) {
                  if (step.num_adapted) add_adapted(step, layer, which, row, strip, left, right);
                  epilogue(row, strip, left, right);
                });
}

// 1 / root mean square. `x` is padded with zeros to whole vectors.
INLINE float inverse_rms(const float* x, int64_t size, float epsilon) {
  F32 squares = splat(0);
  for (int64_t i = 0; i < size; i += LANES) squares = squares + load(x + i) * load(x + i);
  return 1.0f / __builtin_sqrtf(sum(squares) / (float)size + epsilon);
}

INLINE void norm(const float* x, const float* weight, const Sizes& sizes, Operand* to) {
  const F32 scale = splat(inverse_rms(x, sizes.hidden, sizes.norm_epsilon));
  for (int64_t i = 0; i < sizes.hidden; i += LANES) store_operands(to + i, load(x + i) * scale * load(weight + i));
}

INLINE F32 silu(F32 x) { return x / (splat(1) + exp2(x * splat(-1.44269504f))); }

// A token's row of the embedding, out of the strip that it is a lane of.
void embed(const Model& model, int32_t token, float* to, int64_t stride) {
  with_strip(model.embedding, token / STRIP, [&](auto strip) {
    for (int64_t i = 0; i < model.sizes.hidden; ++i) to[i] = strip.weight(i, token % STRIP);
  });
  for (int64_t i = model.sizes.hidden; i < stride; ++i) to[i] = 0;
}

// A projected head, normed and turned by its position (RoPE): `to` is padded with zeros.
INLINE void turn(const Model& model, const float* x, const float* weight, int64_t position, float* to) {
  const int64_t size = model.sizes.head_dim, half = size / 2;
  float normed[model.value_dims()];
  for (int64_t i = 0; i < model.value_dims(); ++i) normed[i] = i < size ? x[i] : 0.0f;
  if (weight) {
    const float scale = inverse_rms(normed, size, model.sizes.norm_epsilon);
    for (int64_t i = 0; i < size; ++i) normed[i] = normed[i] * scale * weight[i];
  }
  const float *cosines = model.cosines + position * half, *sines = model.sines + position * half;
  for (int64_t i = 0; i < half; ++i) {
    to[i] = normed[i] * cosines[i] - normed[half + i] * sines[i];
    to[half + i] = normed[half + i] * cosines[i] + normed[i] * sines[i];
  }
}

// Pages may hold what others left, behind masks: 0 times it must be 0, so a value is made finite. Not-a-number: lowest.
INLINE float finite(float x) {
  const float limit = from_bf16(0x7f7f);
  x = x > -limit ? x : -limit;
  return x < limit ? x : limit;
}

// From a row of projections: its queries as operands, its keys and values into the pages.
void distribute(const Step& step, int64_t layer, int64_t row) {
  const Model& model = *step.model;
  const Sizes& sizes = model.sizes;
  const Row& what = step.rows[row];
  const int64_t size = sizes.head_dim, group = sizes.heads / sizes.kv_heads, dims = model.value_dims();
  const float* projected = step.projected + row * step.projected_stride;
  // exp2 takes the place of exp, so its factor goes into the queries with the scale.
  const F32 scale = splat(1.44269504f / __builtin_sqrtf((float)size));
  float turned[dims];
  std::memset(turned, 0, sizeof turned);

  for (int64_t head = 0; head < sizes.heads; ++head) {
    turn(model, projected + head * size, model.layers[layer].q_norm, what.position, turned);
    const int64_t index = (head / group * step.num_rows + row) * group + head % group;
    Operand* to = (Operand*)step.queries + index * step.query_stride;
    for (int64_t i = 0; i < dims; i += LANES) store_operands(to + i, load(turned + i) * scale);
  }
  const int64_t block = step.spans[what.span].table[what.position / model.pages.block_size];
  const int64_t cell = what.position % model.pages.block_size / CELL_TOKENS, token = what.position % CELL_TOKENS;
  for (int64_t head = 0; head < sizes.kv_heads; ++head) {
    const float* key = projected + (sizes.heads + head) * size;
    const float* value = key + sizes.kv_heads * size;
    uint16_t* keys = (uint16_t*)model.cell(layer, block, head, cell);
    uint16_t* values = keys + size / 2 * CELL_TOKENS * 2;
    turn(model, key, model.layers[layer].k_norm, what.position, turned);
    for (int64_t i = 0; i < size; ++i) keys[(i / 2 * CELL_TOKENS + token) * 2 + i % 2] = to_bf16(turned[i]);
    for (int64_t i = 0; i < size; ++i) values[(token / 2 * dims + i) * 2 + token % 2] = to_bf16(finite(value[i]));
  }
}

void attention(const Step& step, Team& team, int64_t layer) {
  const int64_t kv_heads = step.model->sizes.kv_heads;
  const auto view = [&](int64_t piece, int64_t kv_head) { return PieceView{step, step.pieces[piece], layer, kv_head}; };
  if (step.num_tile_pieces)
    share(team, step.num_tile_pieces * kv_heads, [&](int64_t item) {
      const TilePiece& what = step.tile_pieces[item / kv_heads];
      view(what.piece, item % kv_heads).keep_partials(what.tile);
    });
  // From the last piece, which sees most of its sequence, so that the short ones fill the end of the loop.
  const int64_t last = step.num_pieces * kv_heads - 1;
  share(team, last + 1, [&](int64_t item) { view((last - item) / kv_heads, (last - item) % kv_heads).attend(); });
}

void forward(const Step& step, Team& team) {
  const Model& model = *step.model;
  const Sizes& sizes = model.sizes;
  const auto hidden = [&](int64_t row) { return step.hidden + row * step.hidden_stride; };
  const auto normed = [&](int64_t row) { return (Operand*)step.normed + row * step.hidden_stride; };
  const auto add_to_hidden = [&](int64_t row, int64_t strip, F32 left, F32 right) {
    float* to = hidden(row) + strip * STRIP;
    store(to, load(to) + left);
    store(to + LANES, load(to + LANES) + right);
  };

  share_rows(team, step.num_rows, [&](int64_t row) {
    embed(model, step.rows[row].token, hidden(row), step.hidden_stride);
  });
  for (int64_t number = 0; number < sizes.num_layers; ++number) {
    const Layer& layer = model.layers[number];
    share_rows(team, step.num_rows, [&](int64_t row) { norm(hidden(row), layer.attention_norm, sizes, normed(row)); });
    project(step, team, number, &Layer::qkv, &AdapterLayer::qkv, step.normed, step.hidden_stride,
            [&](int64_t row, int64_t strip, F32 left, F32 right) {
              if (const float* bias = layer.qkv_bias) {
                left = left + load(bias + strip * STRIP);
                right = right + load(bias + strip * STRIP + LANES);
              }
              float* to = step.projected + row * step.projected_stride + strip * STRIP;
              store(to, left);
              store(to + LANES, right);
            });
    share_rows(team, step.num_rows, [&](int64_t row) { distribute(step, number, row); });
    attention(step, team, number);
    project(step, team, number, &Layer::o, &AdapterLayer::o, step.attended, step.attended_stride, add_to_hidden);

    share_rows(team, step.num_rows, [&](int64_t row) { norm(hidden(row), layer.mlp_norm, sizes, normed(row)); });
    project(step, team, number, &Layer::gate_up, &AdapterLayer::gate_up, step.normed, step.hidden_stride,
            [&](int64_t row, int64_t strip, F32 gate, F32 up) {
              store_operands((Operand*)step.activated + row * step.activated_stride + strip * LANES, silu(gate) * up);
            });
    project(step, team, number, &Layer::down, &AdapterLayer::down, step.activated, step.activated_stride,
            add_to_hidden);
  }

  share_rows(team, step.num_logits, [&](int64_t i) {
    norm(hidden(step.logit_rows[i]), model.final_norm, sizes, normed(i));
  });
  share_product(team, model.head, step.normed, step.hidden_stride, step.num_logits,
                [&](int64_t row, int64_t strip, F32 left, F32 right) {
                  float* to = step.logits + row * model.head.num_strips * STRIP + strip * STRIP;
                  store(to, left);
                  store(to + LANES, right);
                });
}

}  // namespace
}  // namespace anaphora::ANAPHORA_PATH
