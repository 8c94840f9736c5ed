// Attention over paged keys and values, in key tiles counted from the sequence's start. Included by forward.h.
//
// The rows here are a piece's tokens times the query heads of one KV head: row r is token r / group, head r % group.
// Each row gets a partial result for each key tile that it sees (maximum, sum, mixed values), computed from nothing, and
// these are merged from first to last. Whether a partial is merged at once or kept and merged later, by which thread it
// was computed, and beside which other sequences' rows, does not show in the bits.

namespace anaphora::ANAPHORA_PATH {
namespace {

constexpr int PARTIAL_HEAD = LANES;  // floats before a partial's values: its maximum and sum, then none

struct Visible {  // tokens first .. stop - 1
  int64_t first, stop;
};

INLINE Visible visible(const Model& model, int64_t position) {
  const int64_t window = model.sizes.window;
  return {window && position >= window ? position - window + 1 : 0, position + 1};
}

INLINE bool sees(Visible seen, int64_t tile_start) {
  return seen.first < tile_start + KEY_TILE && seen.stop > tile_start;
}

// Where one KV head's keys and values of one key tile lie, up to token `stop`.
struct TileView {
  const Model& model;
  int64_t start;
  const uint32_t* cells[TILE_CELLS];

  TileView(const Model& model, int64_t layer, int64_t kv_head, int64_t tile, const int32_t* table, int64_t stop)
      : model(model), start(tile * KEY_TILE) {
    const int64_t per_block = model.pages.block_size / CELL_TOKENS;
    for (int64_t i = 0; i < TILE_CELLS && start + i * CELL_TOKENS < stop; ++i) {
      const int64_t number = tile * TILE_CELLS + i;
      cells[i] = model.cell(layer, table[number / per_block], kv_head, number % per_block);
    }
  }
};

// The partial results of R rows for one tile; queries have a stride of their own, `seen` and `partial` one entry a row.
template <int R>
void partial_results(const TileView& view, const Operand* queries, int64_t query_stride, const Visible* seen,
                     float* partial, int64_t partial_stride) {
  const Model& model = view.model;
  const int64_t start = view.start, dims = model.value_dims();
  int64_t first = start + KEY_TILE, stop = start;
  for (int r = 0; r < R; ++r) {
    if (!sees(seen[r], start)) continue;
    first = seen[r].first < first ? seen[r].first : first;
    stop = seen[r].stop > stop ? seen[r].stop : stop;
  }
  if (first >= stop) return;
  // Cells that only neighbours see are computed too: masked, they add exactly nothing.
  const int64_t first_cell = first <= start ? 0 : (first - start) / CELL_TOKENS;
  const int64_t stop_cell = stop >= start + KEY_TILE ? TILE_CELLS : ceil_div(stop - start, CELL_TOKENS);

  alignas(64) float scores[R][KEY_TILE];
  const auto score = [&](auto cells, int64_t c) __attribute__((always_inline)) {
    constexpr int T = decltype(cells)::count;
    F32 acc[R][T];
    clear(acc);
    accumulate(
        acc, [&](int64_t k, int t) __attribute__((always_inline)) { return load_pairs(view.cells[c + t] + k * CELL_TOKENS); },
        model.sizes.head_dim / 2, queries, query_stride);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) store(scores[r] + (c + t) * CELL_TOKENS, acc[r][t]);
  };
  int64_t cell = first_cell;
  for (; cell + TILES_AT_ONCE <= stop_cell; cell += TILES_AT_ONCE) score(Number<TILES_AT_ONCE>{}, cell);
  for (; cell < stop_cell; ++cell) score(Number<1>{}, cell);

  alignas(64) Operand weights[R][KEY_TILE];
  for (int r = 0; r < R; ++r) {
    for (int64_t t = first_cell * CELL_TOKENS; t < stop_cell * CELL_TOKENS && start + t < seen[r].first; ++t)
      scores[r][t] = -__builtin_inff();
    for (int64_t t = stop_cell * CELL_TOKENS - 1; t >= first_cell * CELL_TOKENS && start + t >= seen[r].stop; --t)
      scores[r][t] = -__builtin_inff();
    F32 maximum = splat(-__builtin_inff()), total = splat(0);
    for (int64_t c = first_cell; c < stop_cell; ++c) maximum = larger(maximum, load(scores[r] + c * CELL_TOKENS));
    const float row_maximum = largest(maximum);
    for (int64_t c = first_cell; c < stop_cell; ++c) {
      const F32 weight = exp2(load(scores[r] + c * CELL_TOKENS) - splat(row_maximum));
      total = total + weight;
      store_operands(weights[r] + c * CELL_TOKENS, weight);
    }
    partial[r * partial_stride] = row_maximum;
    partial[r * partial_stride + 1] = sum(total);
  }

  const int64_t keys = model.sizes.head_dim / 2 * CELL_TOKENS;
  const auto mix = [&](auto tiles, int64_t dim) __attribute__((always_inline)) {
    constexpr int T = decltype(tiles)::count;
    F32 acc[R][T];
    clear(acc);
    for (int64_t c = first_cell; c < stop_cell; ++c)
      accumulate(
          acc,
          [&](int64_t k, int t) __attribute__((always_inline)) {
            return load_pairs(view.cells[c] + keys + k * dims + dim + t * LANES);
          },
          CELL_TOKENS / 2, weights[0] + c * CELL_TOKENS, KEY_TILE);
    for (int r = 0; r < R; ++r)
      for (int t = 0; t < T; ++t) store(partial + r * partial_stride + PARTIAL_HEAD + dim + t * LANES, acc[r][t]);
  };
  int64_t dim = 0;
  for (; dim + TILES_AT_ONCE * LANES <= dims; dim += TILES_AT_ONCE * LANES) mix(Number<TILES_AT_ONCE>{}, dim);
  for (; dim < dims; dim += LANES) mix(Number<1>{}, dim);
}

INLINE void clear_state(float* state, int64_t dims) {
  state[0] = -__builtin_inff();
  state[1] = 0;
  for (int64_t d = 0; d < dims; d += LANES) store(state + PARTIAL_HEAD + d, splat(0));
}

INLINE void merge(float* state, const float* partial, int64_t dims) {
  const float maximum = partial[0] > state[0] ? partial[0] : state[0];
  const float kept = exp2(state[0] - maximum), added = exp2(partial[0] - maximum);
  state[0] = maximum;
  state[1] = state[1] * kept + partial[1] * added;
  for (int64_t d = PARTIAL_HEAD; d < PARTIAL_HEAD + dims; d += LANES)
    store(state + d, load(state + d) * splat(kept) + load(partial + d) * splat(added));
}

// The merged row, divided by its sum. Masked keys may have turned -0 into 0, so that is done for all.
INLINE void finish(const float* state, int64_t head_dim, Operand* to) {
  alignas(64) Operand vector[LANES];
  for (int64_t d = 0; d < head_dim; d += LANES) {
    store_operands(vector, load(state + PARTIAL_HEAD + d) / splat(state[1]) + splat(0));
    std::memcpy(to + d, vector, sizeof(Operand) * (head_dim - d < LANES ? head_dim - d : LANES));
  }
}

// One layer's attention for one piece and KV head.
struct PieceView {
  const Step& step;
  const Piece& piece;
  int64_t layer, kv_head;

  const Segment& segment() const { return step.segments[piece.segment]; }
  int64_t group() const { return step.model->sizes.heads / step.model->sizes.kv_heads; }
  int64_t num_rows() const { return piece.num_rows * group(); }
  int64_t position(int64_t row) const { return step.rows[piece.first_row + row / group()].position; }

  const Operand* query(int64_t row) const {
    // Stored per KV head, so that the rows of a piece follow one another.
    const int64_t index = (kv_head * step.num_rows + piece.first_row) * group() + row;
    return (const Operand*)step.queries + index * step.query_stride;
  }
  // Of this piece's segment or of one that contains it.
  float* kept_partial(const Segment& from, int64_t tile, int64_t row) const {
    const int64_t of_tile = kv_head * (from.stop_tile - from.first_tile) + tile - from.first_tile;
    const int64_t index = (of_tile * from.num_rows + piece.first_row - from.first_row) * group() + row;
    return step.partials + (from.first_partial + index) * step.partial_stride;
  }
  Operand* output(int64_t row) const {
    const int64_t head = kv_head * group() + row % group();
    return (Operand*)step.attended + (piece.first_row + row / group()) * step.attended_stride +
           head * step.model->sizes.head_dim;
  }

  // Partial results of all rows for one tile, to where place(row) says; then done(row, partial) for each that sees it.
  template <typename PlaceOf, typename Done>
  void for_tile(int64_t tile, PlaceOf place, Done done) const {
    const TileView view(*step.model, layer, kv_head, tile, segment().table, piece.stop);
    for (int64_t row = 0; row < num_rows(); row += MAX_ROWS) {
      const int n = (int)(num_rows() - row < MAX_ROWS ? num_rows() - row : MAX_ROWS);
      Visible seen[MAX_ROWS];
      for (int r = 0; r < n; ++r) seen[r] = visible(*step.model, position(row + r));
      float* partial = place(row);
      with_rows(n, [&](auto rows) {
        partial_results<decltype(rows)::count>(view, query(row), step.query_stride, seen, partial, step.partial_stride);
      });
      for (int r = 0; r < n; ++r)
        if (sees(seen[r], view.start)) done(row + r, partial + r * step.partial_stride);
    }
  }

  void keep_partials(int64_t tile) const {
    for_tile(
        tile, [&](int64_t row) { return kept_partial(segment(), tile, row); }, [](int64_t, const float*) {});
  }

  // A row's kept partials, from the outermost segment's first to this one's last.
  void merge_kept(const Segment& from, int64_t row, float* state) const {
    if (from.parent >= 0) merge_kept(step.segments[from.parent], row, state);
    if (!from.is_kept) return;
    const Visible seen = visible(*step.model, position(row));
    for (int64_t tile = from.first_tile; tile < from.stop_tile; ++tile)
      if (sees(seen, tile * KEY_TILE)) merge(state, kept_partial(from, tile, row), step.model->value_dims());
  }

  void attend() const {
    const int64_t stride = step.partial_stride, dims = step.model->value_dims();
    float states[num_rows() * stride], partials[MAX_ROWS * stride];
    for (int64_t row = 0; row < num_rows(); ++row) {
      clear_state(states + row * stride, dims);
      merge_kept(segment(), row, states + row * stride);
    }
    const int64_t stop_tile = segment().is_kept ? 0 : segment().stop_tile;
    for (int64_t tile = segment().first_tile; tile < stop_tile && tile * KEY_TILE < piece.stop; ++tile)
      for_tile(
          tile, [&](int64_t) { return partials; },
          [&](int64_t row, const float* partial) { merge(states + row * stride, partial, dims); });
    for (int64_t row = 0; row < num_rows(); ++row)
      finish(states + row * stride, step.model->sizes.head_dim, output(row));
  }
};

}  // namespace
}  // namespace anaphora::ANAPHORA_PATH
