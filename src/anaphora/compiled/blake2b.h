/* BLAKE2b (RFC 7693, with the personalisation of its parameter block) of a message in one buffer.
 *
 * A key is the first block of the message, filled up with zeros. Whoever digests many messages under one key compresses
 * that block once, and finishes each message from a copy of the state. */
#ifndef ANAPHORA_BLAKE2B_H
#define ANAPHORA_BLAKE2B_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLAKE2B_BLOCK_BYTES 128
#define BLAKE2B_MAX_KEY_BYTES 64
#define BLAKE2B_MAX_PERSON_BYTES 16

typedef struct {
    uint64_t chain[8];
    uint64_t num_bytes; /* compressed so far; RFC 7693 counts in 128 bits, which no buffer needs */
} blake2b_state;

static const uint64_t blake2b_iv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

static const uint8_t blake2b_sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t load_little64(const uint8_t *in)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++)
        value |= (uint64_t)in[i] << 8 * i;
    return value;
}

static inline uint64_t rotate_right64(uint64_t value, int count)
{
    return value >> count | value << (64 - count);
}

#define BLAKE2B_MIX(a, b, c, d, x, y)  \
    a += b + (x);                      \
    d = rotate_right64(d ^ a, 32);     \
    c += d;                            \
    b = rotate_right64(b ^ c, 24);     \
    a += b + (y);                      \
    d = rotate_right64(d ^ a, 16);     \
    c += d;                            \
    b = rotate_right64(b ^ c, 63)

#define BLAKE2B_MIX_FOR(round, i, a, b, c, d) \
    BLAKE2B_MIX(v[a], v[b], v[c], v[d], m[blake2b_sigma[round][2 * (i)]], m[blake2b_sigma[round][2 * (i) + 1]])

/* Columns, then diagonals. A macro, because with constant rounds the words of the message have constant places. */
#define BLAKE2B_ROUND(round)                    \
    BLAKE2B_MIX_FOR(round, 0, 0, 4, 8, 12);     \
    BLAKE2B_MIX_FOR(round, 1, 1, 5, 9, 13);     \
    BLAKE2B_MIX_FOR(round, 2, 2, 6, 10, 14);    \
    BLAKE2B_MIX_FOR(round, 3, 3, 7, 11, 15);    \
    BLAKE2B_MIX_FOR(round, 4, 0, 5, 10, 15);    \
    BLAKE2B_MIX_FOR(round, 5, 1, 6, 11, 12);    \
    BLAKE2B_MIX_FOR(round, 6, 2, 7, 8, 13);     \
    BLAKE2B_MIX_FOR(round, 7, 3, 4, 9, 14)

/* Compress one block, of whose bytes the first num_bytes belong to the message. */
static void blake2b_compress(blake2b_state *state, const uint8_t *block, size_t num_bytes, int is_last)
{
    uint64_t m[16], v[16];
    state->num_bytes += num_bytes;
    for (int i = 0; i < 16; i++)
        m[i] = load_little64(block + 8 * i);
    memcpy(v, state->chain, sizeof state->chain);
    memcpy(v + 8, blake2b_iv, sizeof blake2b_iv);
    v[12] ^= state->num_bytes;
    if (is_last)
        v[14] = ~v[14];
    BLAKE2B_ROUND(0); BLAKE2B_ROUND(1); BLAKE2B_ROUND(2); BLAKE2B_ROUND(3); BLAKE2B_ROUND(4); BLAKE2B_ROUND(5);
    BLAKE2B_ROUND(6); BLAKE2B_ROUND(7); BLAKE2B_ROUND(8); BLAKE2B_ROUND(9); BLAKE2B_ROUND(0); BLAKE2B_ROUND(1);
    for (int i = 0; i < 8; i++)
        state->chain[i] ^= v[i] ^ v[i + 8];
}

static blake2b_state blake2b_start(size_t digest_bytes, size_t key_bytes, const uint8_t *person, size_t person_bytes)
{
    uint8_t padded[BLAKE2B_MAX_PERSON_BYTES] = {0};
    blake2b_state state = {.num_bytes = 0};
    memcpy(state.chain, blake2b_iv, sizeof blake2b_iv);
    state.chain[0] ^= 0x01010000 ^ (uint64_t)key_bytes << 8 ^ (uint64_t)digest_bytes; /* fanout 1, depth 1 */
    if (person_bytes)
        memcpy(padded, person, person_bytes);
    state.chain[6] ^= load_little64(padded);
    state.chain[7] ^= load_little64(padded + 8);
    return state;
}

/* Digest what is left of a message. */
static void blake2b_finish(blake2b_state state, const uint8_t *message, size_t num_bytes, uint8_t *digest,
                           size_t digest_bytes)
{
    uint8_t last[BLAKE2B_BLOCK_BYTES] = {0};
    for (; num_bytes > BLAKE2B_BLOCK_BYTES; num_bytes -= BLAKE2B_BLOCK_BYTES, message += BLAKE2B_BLOCK_BYTES)
        blake2b_compress(&state, message, BLAKE2B_BLOCK_BYTES, 0);
    if (num_bytes)
        memcpy(last, message, num_bytes);
    blake2b_compress(&state, last, num_bytes, 1);
    for (size_t i = 0; i < digest_bytes; i++)
        digest[i] = (uint8_t)(state.chain[i / 8] >> 8 * (i % 8));
}

#endif
