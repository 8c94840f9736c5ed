// What Python calls, by ctypes: build an engine from weights, make pages, run steps. Arguments were checked
// there; a return value of 0 (null) says that memory or threads ran out.
#include <cstring>
#include <exception>
#include <vector>

#include "layout.h"
#include "packing.h"
#include "team.h"

#if defined(__BYTE_ORDER__)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pairs have their first number in the low half");
#endif

namespace anaphora {

// An adapter's numbers. It belongs to whoever made it, and outlives every step that it is part of.
class LoadedAdapter {
 public:
  LoadedAdapter(int num_layers, float scale) : layers_(num_layers), adapter_{layers_.data(), scale, 0} {}
  const Adapter* adapter() const { return &adapter_; }

 private:
  friend class Engine;
  std::vector<AdapterLayer> layers_;
  std::vector<Memory> kept_;
  Adapter adapter_;
};

class Engine {
 public:
  Engine(const Path& path, const Sizes& sizes, int num_threads, bool rounds_to_bytes)
      : path_(path), team_(num_threads), rounds_to_bytes_(rounds_to_bytes), layers_(sizes.num_layers) {
    model_.sizes = sizes;
    model_.layers = layers_.data();
  }

  // output: null when it is the embedding.
  void load(const Stored& embedding, const Stored* output, const float* final_norm, const float* cosines,
            const float* sines) {
    const Sizes& sizes = model_.sizes;
    model_.embedding = pack_matrix({{embedding, sizes.vocab}}, sizes.hidden);
    model_.head = output ? pack_matrix({{*output, sizes.vocab}}, sizes.hidden) : model_.embedding;
    model_.final_norm = copy(final_norm, sizes.hidden);
    model_.cosines = copy(cosines, (int64_t)sizes.max_context * (sizes.head_dim / 2));
    model_.sines = copy(sines, (int64_t)sizes.max_context * (sizes.head_dim / 2));
  }

  void load_layer(int number, const LayerPointers& from) {
    const Sizes& sizes = model_.sizes;
    const int64_t q = sizes.heads * sizes.head_dim, kv = sizes.kv_heads * sizes.head_dim;
    Layer& layer = layers_[number];
    layer.qkv = pack_matrix({{from.q, q}, {from.k, kv}, {from.v, kv}}, sizes.hidden);
    layer.o = pack_matrix({{from.o, sizes.hidden}}, q);
    std::vector<Stored> halves;
    for (int64_t first = 0; first < sizes.intermediate; first += LANES)
      for (const Stored& matrix : {from.gate, from.up})
        for (int64_t i = first; i < first + LANES; ++i)
          halves.push_back(i < sizes.intermediate ? matrix.row(i, sizes.hidden) : Stored{});
    layer.gate_up = pack(halves, sizes.hidden, format_of(from.gate), kept_);
    layer.down = pack_matrix({{from.down, sizes.hidden}}, sizes.intermediate);
    layer.attention_norm = copy(from.attention_norm, sizes.hidden);
    layer.mlp_norm = copy(from.mlp_norm, sizes.hidden);
    layer.q_norm = copy(from.q_norm, sizes.head_dim);
    layer.k_norm = copy(from.k_norm, sizes.head_dim);
    layer.qkv_bias = nullptr;
    if (from.q_bias || from.k_bias || from.v_bias) {
      layer.qkv_bias = keep(round_up(q + 2 * kv, STRIP) * sizeof(float)).as<float>();
      if (from.q_bias) std::memcpy(layer.qkv_bias, from.q_bias, q * sizeof(float));
      if (from.k_bias) std::memcpy(layer.qkv_bias + q, from.k_bias, kv * sizeof(float));
      if (from.v_bias) std::memcpy(layer.qkv_bias + q + kv, from.v_bias, kv * sizeof(float));
    }
  }

  void allocate_pages(int num_blocks, int block_size) {
    pages_ = Memory();
    host_ = Memory();
    model_.pages = {nullptr, num_blocks, block_size};
    pages_ = Memory((size_t)model_.sizes.num_layers * (num_blocks + 1) * model_.page_pairs() * sizeof(uint32_t));
    model_.pages.pairs = pages_.as<uint32_t>();
  }

  void copy_block(int from, int to) {
    for (int layer = 0; layer < model_.sizes.num_layers; ++layer)
      std::memcpy(model_.cell(layer, to, 0, 0), model_.cell(layer, from, 0, 0),
                  model_.page_pairs() * sizeof(uint32_t));
  }

  // A host block has its pages of all layers in a row.
  void allocate_host(int num_blocks) {
    host_ = Memory();
    host_ = Memory((size_t)model_.sizes.num_layers * (num_blocks + 1) * model_.page_pairs() * sizeof(uint32_t));
  }

  void save_block(int from, int to) {
    for (int layer = 0; layer < model_.sizes.num_layers; ++layer)
      std::memcpy(host_page(layer, to), model_.cell(layer, from, 0, 0), model_.page_pairs() * sizeof(uint32_t));
  }

  void load_block(int from, int to) {
    for (int layer = 0; layer < model_.sizes.num_layers; ++layer)
      std::memcpy(model_.cell(layer, to, 0, 0), host_page(layer, from), model_.page_pairs() * sizeof(uint32_t));
  }

  LoadedAdapter* create_adapter(float scale) { return new LoadedAdapter(model_.sizes.num_layers, scale); }

  // product: 0 .. 3 for qkv, o, gate_up, down. down [rank, num_inputs]; up [num_outputs, rank], its rows in the order of
  // the lanes of the product's strips.
  void load_adapter(LoadedAdapter& to, int layer, int product, const float* down, const float* up, int rank,
                    int num_inputs, int num_outputs) {
    constexpr LowRank AdapterLayer::*products[] = {&AdapterLayer::qkv, &AdapterLayer::o, &AdapterLayer::gate_up,
                                                   &AdapterLayer::down};
    LowRank& low_rank = to.layers_[layer].*products[product];
    low_rank.down = pack(rows_of({{{down, nullptr, nullptr, 0}, rank}}, num_inputs), num_inputs, Format::BF16, to.kept_);
    low_rank.up = pack(rows_of({{{up, nullptr, nullptr, 0}, num_outputs}}, rank), rank, Format::BF16, to.kept_);
    const int64_t stride = round_up(rank, STRIP);
    if (stride > to.adapter_.lowered_stride) to.adapter_.lowered_stride = stride;
  }

  // spans: per span start, number of tokens, wanted logits, and where in `tables` its table begins.
  // groups: per group first span, number of spans, and how many leading key tiles their tables have in common; groups
  // are apart or nested, the larger ones first. adapters: per span, null for none.
  void execute(const int32_t* tokens, const int32_t (*spans)[4], const LoadedAdapter* const* adapters, int num_spans,
               const int32_t* tables, const int32_t (*groups)[3], int num_groups, float* logits) {
    plan_rows(tokens, spans, adapters, num_spans, tables);
    plan_adapters();
    plan_attention(groups, num_groups);
    make_room();
    step_.logits = logits;
    struct Call {
      const Path& path;
      const Step& step;
    } call{path_, step_};
    team_.run([](void* context, Team& team) { ((Call*)context)->path.forward(((Call*)context)->step, team); }, &call);
  }

 private:
  static constexpr int32_t PIECE_ROWS = 48;          // of one work item of attention; the keys stay in cache for them
  static constexpr int32_t ADAPTED_ROWS = 48;        // of one work item of an adapter's inner half
  static constexpr int64_t PIECES_FOR_A_THREAD = 4;  // fewer, and their tiles are shared among the threads

  struct Part {
    Stored matrix;
    int64_t num_rows;
  };

  uint32_t* host_page(int64_t layer, int64_t block) const {
    return host_.as<uint32_t>() + (block * model_.sizes.num_layers + layer) * model_.page_pairs();
  }

  static std::vector<Stored> rows_of(std::initializer_list<Part> parts, int64_t num_inputs) {
    std::vector<Stored> rows;
    for (const Part& part : parts)
      for (int64_t i = 0; i < part.num_rows; ++i) rows.push_back(part.matrix.row(i, num_inputs));
    return rows;
  }

  Format format_of(const Stored& matrix) const {
    return rounds_to_bytes_ && !matrix.scales ? Format::BYTES_OF_32 : matrix.format();
  }

  Matrix pack_matrix(std::initializer_list<Part> parts, int64_t num_inputs) {
    return pack(rows_of(parts, num_inputs), num_inputs, format_of(parts.begin()->matrix), kept_);
  }

  Memory& keep(size_t size_bytes) { return kept_.emplace_back(size_bytes); }

  float* copy(const float* from, int64_t count) {
    if (!from) return nullptr;
    float* to = keep(round_up(count, STRIP) * sizeof(float)).as<float>();
    std::memcpy(to, from, count * sizeof(float));
    return to;
  }

  // rows: the outputs' weights in the order of the strips' lanes, without numbers for none.
  Matrix pack(const std::vector<Stored>& rows, int64_t num_inputs, Format format, std::vector<Memory>& kept) {
    const int64_t num_strips = ceil_div(rows.size(), STRIP), num_pairs = ceil_div(num_inputs, 2);
    const int64_t strip_bytes = strip_bytes_of(format, num_pairs);
    char* strips = kept.emplace_back(num_strips * strip_bytes).as<char>();
    Matrix matrix{format, strips, strip_bytes, (int32_t)num_strips, (int32_t)num_pairs};
    Packing packing{matrix, rows, num_inputs};
    team_.run(pack_strips, &packing);
    return matrix;
  }

  void plan_rows(const int32_t* tokens, const int32_t (*spans)[4], const LoadedAdapter* const* adapters, int num_spans,
                 const int32_t* tables) {
    rows_.clear(), spans_.clear(), logit_rows_.clear();
    for (int32_t s = 0; s < num_spans; ++s) {
      const auto [start, count, num_logits, table] = spans[s];
      const int32_t first_row = (int32_t)rows_.size();
      spans_.push_back({start, count, first_row, tables + table, adapters[s] ? adapters[s]->adapter() : nullptr});
      for (int32_t i = 0; i < count; ++i) rows_.push_back({tokens[first_row + i], start + i, s});
      for (int32_t i = count - num_logits; i < count; ++i) logit_rows_.push_back(first_row + i);
    }
    step_.model = &model_;
    step_.num_rows = (int32_t)rows_.size();
    step_.num_logits = (int32_t)logit_rows_.size();
    step_.rows = rows_.data();
    step_.spans = spans_.data();
    step_.logit_rows = logit_rows_.data();
  }

  // Rows of the same adapter that follow one another, of whatever spans, are multiplied together.
  void plan_adapters() {
    adapted_.clear();
    step_.lowered_stride = 0;
    for (int32_t row = 0; row < (int32_t)rows_.size(); ++row) {
      const Adapter* adapter = spans_[rows_[row].span].adapter;
      if (!adapter || !adapter->lowered_stride) continue;
      if (adapter->lowered_stride > step_.lowered_stride) step_.lowered_stride = adapter->lowered_stride;
      if (!adapted_.empty() && adapted_.back().adapter == adapter && adapted_.back().stop == row &&
          row - adapted_.back().first < ADAPTED_ROWS)
        ++adapted_.back().stop;
      else
        adapted_.push_back({adapter, row, row + 1});
    }
    step_.adapted = adapted_.data();
    step_.num_adapted = (int32_t)adapted_.size();
  }

  void plan_attention(const int32_t (*groups)[3], int num_groups) {
    segments_.clear(), pieces_.clear(), tile_pieces_.clear();
    num_partials_ = 0;
    innermost_.assign(spans_.size(), -1);
    for (int g = 0; g < num_groups; ++g) {
      const auto [first, count, stop_tile] = groups[g];
      if (!add_segment(first, count, stop_tile)) continue;
      keep_partials(segments_.back());
      for (int32_t s = first; s < first + count; ++s) innermost_[s] = (int32_t)segments_.size() - 1;
    }
    const int32_t num_groups_kept = (int32_t)segments_.size();
    for (int32_t s = 0; s < (int32_t)spans_.size(); ++s) {
      add_segment(s, 1, (spans_[s].start + spans_[s].num_tokens - 1) / KEY_TILE + 1);
      add_pieces((int32_t)segments_.size() - 1);
    }
    step_.num_pieces = (int32_t)pieces_.size();
    if (team_.size() > 1 && step_.num_pieces * model_.sizes.kv_heads < PIECES_FOR_A_THREAD * team_.size())
      for (size_t s = num_groups_kept; s < segments_.size(); ++s) keep_partials(segments_[s]);
    for (int32_t s = 0; s < num_groups_kept; ++s) add_pieces(s);
    for (int32_t p = 0; p < (int32_t)pieces_.size(); ++p) {
      const Segment& segment = segments_[pieces_[p].segment];
      const int32_t stop_tile = segment.is_kept ? segment.stop_tile : 0;
      for (int32_t tile = segment.first_tile; tile < stop_tile && tile * KEY_TILE < pieces_[p].stop; ++tile)
        tile_pieces_.push_back({p, tile});
    }
    step_.segments = segments_.data();
    step_.pieces = pieces_.data();
    step_.tile_pieces = tile_pieces_.data();
    step_.num_tile_pieces = (int64_t)tile_pieces_.size();
  }

  // Of consecutive spans, from where the segments before it end to `stop_tile`. False, and none, for a group's without
  // tiles: a span has one in any case, since it is what its rows are attended by.
  bool add_segment(int32_t first_span, int32_t num_spans, int32_t stop_tile) {
    const int32_t parent = innermost_[first_span], window = model_.sizes.window;
    int32_t oldest = spans_[first_span].start, num_rows = 0;
    for (int32_t s = first_span; s < first_span + num_spans; ++s) {
      oldest = spans_[s].start < oldest ? spans_[s].start : oldest;
      num_rows += spans_[s].num_tokens;
    }
    int32_t first_tile = window && oldest >= window ? (oldest - window + 1) / KEY_TILE : 0;
    if (parent >= 0 && segments_[parent].stop_tile > first_tile) first_tile = segments_[parent].stop_tile;
    if (num_spans > 1 && stop_tile <= first_tile) return false;
    segments_.push_back({spans_[first_span].first_row, num_rows, first_tile, stop_tile, parent, false, 0,
                         spans_[first_span].table});
    return true;
  }

  void keep_partials(Segment& segment) {
    segment.is_kept = true;
    segment.first_partial = num_partials_;
    if (segment.stop_tile > segment.first_tile)
      num_partials_ += (int64_t)(segment.stop_tile - segment.first_tile) * segment.num_rows * model_.sizes.heads;
  }

  void add_pieces(int32_t number) {
    const Segment& segment = segments_[number];
    const int32_t group = model_.sizes.heads / model_.sizes.kv_heads, most = group < PIECE_ROWS ? PIECE_ROWS / group : 1;
    for (int32_t first = 0; first < segment.num_rows; first += most) {
      const int32_t count = segment.num_rows - first < most ? segment.num_rows - first : most;
      int32_t stop = 0;
      for (int32_t row = segment.first_row + first; row < segment.first_row + first + count; ++row)
        stop = rows_[row].position >= stop ? rows_[row].position + 1 : stop;
      pieces_.push_back({number, segment.first_row + first, count, stop});
    }
  }

  void make_room() {
    const Sizes& sizes = model_.sizes;
    const int64_t rows = step_.num_rows, operand = path_.operand_bytes;
    step_.hidden_stride = round_up(sizes.hidden, STRIP);
    step_.projected_stride = round_up((sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim, STRIP);
    step_.attended_stride = round_up(sizes.heads * sizes.head_dim, STRIP);
    step_.activated_stride = round_up(sizes.intermediate, STRIP);
    step_.query_stride = model_.value_dims();
    step_.partial_stride = LANES + model_.value_dims();
    step_.hidden = hidden_.of<float>(rows * step_.hidden_stride * 4);
    step_.projected = projected_.of<float>(rows * step_.projected_stride * 4);
    step_.normed = normed_.of<void>(rows * step_.hidden_stride * operand);
    step_.queries = queries_.of<void>(rows * sizes.heads * step_.query_stride * operand);
    step_.attended = attended_.of<void>(rows * step_.attended_stride * operand);
    step_.activated = activated_.of<void>(rows * step_.activated_stride * operand);
    step_.partials = partials_.of<float>(num_partials_ * step_.partial_stride * 4);
    step_.lowered = lowered_.of<void>(rows * step_.lowered_stride * operand);
  }

  // Room that grows to the largest step so far.
  class Buffer {
   public:
    template <typename T>
    T* of(size_t size_bytes) {
      if (size_bytes > size_bytes_) {
        memory_ = Memory();
        size_bytes_ = 0;
        memory_ = Memory(size_bytes);
        size_bytes_ = size_bytes;
      }
      return memory_.as<T>();
    }

   private:
    Memory memory_;
    size_t size_bytes_ = 0;
  };

  const Path& path_;
  Team team_;
  const bool rounds_to_bytes_;
  Model model_{};
  std::vector<Layer> layers_;
  std::vector<Memory> kept_;
  Memory pages_;
  Memory host_;

  Step step_{};
  std::vector<Row> rows_;
  std::vector<Span> spans_;
  std::vector<Segment> segments_;
  std::vector<int32_t> innermost_;  // per span the segment of the smallest group that it is in, -1: none
  std::vector<Piece> pieces_;
  std::vector<TilePiece> tile_pieces_;
  std::vector<AdaptedRows> adapted_;
  std::vector<int32_t> logit_rows_;
  int64_t num_partials_ = 0;
  Buffer hidden_, projected_, normed_, queries_, attended_, activated_, partials_, lowered_;
};

}  // namespace anaphora

using anaphora::Engine;
using anaphora::LoadedAdapter;

// Run `body`; 0 if memory or threads ran out.
template <typename Body>
static int guarded(Body body) {
  try {
    body();
    return 1;
  } catch (const std::exception&) {
    return 0;
  }
}

extern "C" {

// The paths of this build that the processor can run, best first, separated by spaces.
const char* anaphora_paths() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (has_avx2 && has_avx512 && __builtin_cpu_supports("avx512bf16")) return "avx512-bf16 avx512 avx2 portable";
  if (has_avx2 && has_avx512) return "avx512 avx2 portable";
  if (has_avx2) return "avx2 portable";
#endif
  return "portable";
}

// An engine for one of those paths, its weights still to be loaded.
Engine* anaphora_create(const char* path, const anaphora::Sizes* sizes, int num_threads,
                        int rounds_to_bytes) {
  const anaphora::Path* chosen = &anaphora::portable_path;
#if defined(__x86_64__)
  for (const anaphora::Path* other : {&anaphora::avx2_path, &anaphora::avx512_path, &anaphora::avx512_bf16_path})
    if (!std::strcmp(path, other->name)) chosen = other;
#endif
  Engine* engine = nullptr;
  guarded([&] { engine = new Engine(*chosen, *sizes, num_threads, rounds_to_bytes); });
  return engine;
}

void anaphora_destroy(Engine* engine) { delete engine; }

int anaphora_load(Engine* engine, const anaphora::Stored* embedding, const anaphora::Stored* output,
                  const float* final_norm, const float* cosines, const float* sines) {
  return guarded([&] { engine->load(*embedding, output, final_norm, cosines, sines); });
}

int anaphora_load_layer(Engine* engine, int number, const anaphora::LayerPointers* pointers) {
  return guarded([&] { engine->load_layer(number, *pointers); });
}

LoadedAdapter* anaphora_create_adapter(Engine* engine, float scale) {
  LoadedAdapter* adapter = nullptr;
  guarded([&] { adapter = engine->create_adapter(scale); });
  return adapter;
}

int anaphora_load_adapter(Engine* engine, LoadedAdapter* adapter, int layer, int product, const float* down,
                          const float* up, int rank, int num_inputs, int num_outputs) {
  return guarded([&] { engine->load_adapter(*adapter, layer, product, down, up, rank, num_inputs, num_outputs); });
}

void anaphora_destroy_adapter(LoadedAdapter* adapter) { delete adapter; }

int anaphora_allocate_pages(Engine* engine, int num_blocks, int block_size) {
  return guarded([&] { engine->allocate_pages(num_blocks, block_size); });
}

void anaphora_copy_block(Engine* engine, int from, int to) { engine->copy_block(from, to); }

int anaphora_allocate_host(Engine* engine, int num_blocks) {
  return guarded([&] { engine->allocate_host(num_blocks); });
}

void anaphora_save_block(Engine* engine, int from, int to) { engine->save_block(from, to); }

void anaphora_load_block(Engine* engine, int from, int to) { engine->load_block(from, to); }

int anaphora_execute(Engine* engine, const int32_t* tokens, const int32_t (*spans)[4],
                     const LoadedAdapter* const* adapters, int num_spans, const int32_t* tables,
                     const int32_t (*groups)[3], int num_groups, float* logits) {
  return guarded([&] { engine->execute(tokens, spans, adapters, num_spans, tables, groups, num_groups, logits); });
}

}  // extern "C"
