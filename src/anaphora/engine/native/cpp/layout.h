// What lies where in memory, and what the parts hand to each other. docs/native.md explains why.
//
// A PAIR is 32 bits: two bf16 numbers that are neighbours along the axis that a product adds up (K), the earlier one in
// the low half. A processor's bf16 dot product takes 16 pairs at once, one per LANE; the others take a pair apart.
//
// Weights [outputs, inputs]: strips of 32 outputs; a strip is one run of memory that a product reads from end to end.
//
//     strip s:   K pair 0:    [ output 32s | 32s + 1 | ... | 32s + 31 ]     32 pairs, 128 bytes
//                K pair 1:    [     "      |    "    | ... |    "     ]
//                ...          num_pairs of them; absent outputs and an odd last input are zeros
//
//     Or, as the model's file may have them, as numbers of 8 or 4 bits: a strip of blocks, each some inputs of the 32
//     outputs, with a scale for the inputs of an output and, where numbers have 4 bits, an offset:
//
//     ByteBlock:   [ scale of output 32s | ... | 32s + 31 ]                  128 bytes
//                  K pair:  [ output 32s | 32s + 1 | ... | 32s + 31 ]        64 bytes: pairs of bytes
//                  ...      16 of them, or 8
//
//     NibbleBlock: [ scale of output 32s | ... | 32s + 31 ]                  128 bytes
//                  [ offset      "       | ... |    "     ]                  128 bytes
//                  K pair:  [ output 32s | 32s + 1 | ... | 32s + 31 ]        32 bytes: the earlier number in the low half
//                  ...      16 of them
//
//     Gate and up share a strip, 16 outputs each, so that silu(gate) * up is made while both are in registers.
//
// KV pages: per layer and block, per KV head, a cell for every 16 tokens (block_size / 16 of them, so no arithmetic can
// see the block size). A cell is two tiles, each the right-hand side of one product:
//
//     keys:      dim pair 0:    [ token 0 | token 1 | ... | token 15 ]      q @ keys adds up dims
//                ...            head_dim / 2 of them
//     values:    token pair 0:  [ dim 0 | dim 1 | ... | dim value_dims-1 ]  p @ values adds up tokens
//                ...            8 of them; value_dims is head_dim rounded up to 16
//
//     address of a cell: (((layer * num_pages + block) * kv_heads + head) * cells + cell) * cell_pairs
//
// Everything of one token row lies in rows of floats (`hidden`, `projected`) or of operands (what a path multiplies:
// bf16 or float), padded with zeros to whole vectors.
#pragma once
#include <cstdint>

namespace anaphora {

constexpr int LANES = 16;           // pairs or floats side by side in a vector of any path
constexpr int STRIP = 2 * LANES;    // outputs of a weight strip
constexpr int CELL_TOKENS = LANES;  // tokens of a cell
constexpr int KEY_TILE = 256;       // tokens whose softmax is one partial result: counted from a sequence's start
constexpr int TILE_CELLS = KEY_TILE / CELL_TOKENS;

static inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

struct Sizes {  // the same fields as _Sizes in library.py
  int32_t num_layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, max_context;
  int32_t window;  // a token sees itself and window - 1 before it; 0: all before it
  float norm_epsilon;
};

enum class Format : int32_t { BF16, BYTES_OF_32, BYTES_OF_16, NIBBLES };  // of 32, of 16 inputs that share a scale

template <int PAIRS>
struct ByteBlock {  // a weight is number * scale
  static constexpr int NUM_PAIRS = PAIRS;
  float scales[STRIP];
  int8_t numbers[PAIRS][STRIP][2];
};

struct NibbleBlock {  // a weight is number * scale + offset; numbers are 0 .. 15
  static constexpr int NUM_PAIRS = 16;
  float scales[STRIP], offsets[STRIP];
  uint8_t numbers[NUM_PAIRS][STRIP];
};

struct Matrix {
  Format format;
  char* strips;
  int64_t strip_bytes;
  int32_t num_strips, num_pairs;  // outputs / 32, inputs / 2, both rounded up
  template <typename T>  // uint32_t, or the format's block
  T* strip(int64_t s) const {
    return (T*)(strips + s * strip_bytes);
  }
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  float *attention_norm, *mlp_norm;   // padded with zeros as rows of `hidden` are
  float *qkv_bias, *q_norm, *k_norm;  // null where the model has none
};

// What an adapter (LoRA) adds to one product: up @ (scale * (down @ x)), in the strips of that product's matrix, bf16.
// Ranks of what shares a matrix (q, k and v; gate and up) lie side by side: rows of down, inputs of up.
struct LowRank {
  Matrix down, up;  // no strips: nothing is added
};

struct AdapterLayer {
  LowRank qkv, o, gate_up, down;
};

struct Adapter {
  AdapterLayer* layers;
  float scale;
  int64_t lowered_stride;  // outputs of its largest `down`, in whole strips
};

struct Pages {
  uint32_t* pairs;
  int32_t num_blocks, block_size;
};

struct Model {
  Sizes sizes;
  Layer* layers;
  Matrix embedding, head;  // the same strips when tied
  float* final_norm;
  float *cosines, *sines;  // [max_context, head_dim / 2]
  Pages pages;

  int64_t value_dims() const { return round_up(sizes.head_dim, LANES); }
  int64_t cell_pairs() const { return sizes.head_dim / 2 * CELL_TOKENS + CELL_TOKENS / 2 * value_dims(); }
  int64_t page_pairs() const { return sizes.kv_heads * (pages.block_size / CELL_TOKENS) * cell_pairs(); }
  uint32_t* cell(int64_t layer, int64_t block, int64_t kv_head, int64_t cell) const {
    int64_t page = layer * (pages.num_blocks + 1) + block;
    return pages.pairs + page * page_pairs() + (kv_head * (pages.block_size / CELL_TOKENS) + cell) * cell_pairs();
  }
};

struct Span {
  int32_t start, num_tokens, first_row;
  const int32_t* table;
  const Adapter* adapter;  // null: none
};

struct Row {
  int32_t token, position, span;
};

// Consecutive rows of the step that attend to the same key tiles through one table. Each span has one, and so has each
// group of spans whose tables begin with the same blocks: their shared tiles are then nobody else's. So what a row sees
// is its span's segment, before it that segment's parent, and so on.
//
//     group of spans 0 - 3:        tiles 0 .. 7
//       group of spans 0 - 1:        tiles 8 .. 11
//         span 0:                      tiles 12 .. 13
//         span 1:                      tile  12
//       span 2:                      tiles 8 .. 9
//       ...
//
// A kept segment's partial results are stored: [kv_heads, tiles, num_rows, heads of a KV head], from `first_partial`.
struct Segment {
  int32_t first_row, num_rows;
  int32_t first_tile, stop_tile;  // tiles are counted from the sequence's start
  int32_t parent;                 // number of a segment, which is kept; -1: none
  bool is_kept;
  int64_t first_partial;
  const int32_t* table;
};

// Some consecutive rows of a segment whose attention is computed together.
struct Piece {
  int32_t segment, first_row, num_rows;  // first_row: of the step
  int32_t stop;                          // the token after the last one that one of them sees
};

struct TilePiece {
  int32_t piece, tile;
};

// Some consecutive rows of one adapter.
struct AdaptedRows {
  const Adapter* adapter;
  int32_t first, stop;
};

struct Step {
  const Model* model;
  int32_t num_rows, num_pieces, num_adapted, num_logits;
  int64_t num_tile_pieces;
  const Row* rows;
  const Span* spans;
  const Segment* segments;
  const Piece* pieces;           // [num_pieces] of the spans' segments, then those of groups'
  const TilePiece* tile_pieces;  // of kept segments
  const AdaptedRows* adapted;    // [num_adapted]
  const int32_t* logit_rows;     // [num_logits]
  float* logits;                 // [num_logits, head strips * 32]
  // Rows of floats and of operands; strides in elements.
  float *hidden, *projected, *partials;
  void *normed, *queries, *attended, *activated, *lowered;
  int64_t hidden_stride, projected_stride, attended_stride, activated_stride, query_stride, partial_stride,
      lowered_stride;
};

class Team;

// One kernel path: the same source, compiled for one instruction set.
struct Path {
  const char* name;
  int32_t operand_bytes;
  void (*forward)(const Step&, Team&);  // run by every thread of the team
};
extern const Path portable_path;
#if defined(__x86_64__)
extern const Path avx2_path, avx512_path, avx512_bf16_path;
#endif

}  // namespace anaphora
