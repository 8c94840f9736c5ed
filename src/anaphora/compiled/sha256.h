/* SHA-256 (FIPS 180-4) of a message in one buffer: in portable C, and with the x86 SHA extensions where the processor
 * has them. */
#ifndef ANAPHORA_SHA256_H
#define ANAPHORA_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define SHA256_X86
#include <cpuid.h>
#include <immintrin.h>
#endif

#define SHA256_DIGEST_BYTES 32
#define SHA256_BLOCK_BYTES 64
/* What padding adds to a message at most: 0x80, zeros, and the length in 8 bytes. */
#define SHA256_MAX_PADDING (SHA256_BLOCK_BYTES + 8)

typedef void sha256_compress(uint32_t state[8], const uint8_t *blocks, size_t num_blocks);

static const uint32_t sha256_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline void store_big32(uint8_t *out, uint32_t value)
{
    out[0] = (uint8_t)(value >> 24);
    out[1] = (uint8_t)(value >> 16);
    out[2] = (uint8_t)(value >> 8);
    out[3] = (uint8_t)value;
}

static inline uint32_t load_big32(const uint8_t *in)
{
    return (uint32_t)in[0] << 24 | (uint32_t)in[1] << 16 | (uint32_t)in[2] << 8 | in[3];
}

static inline uint32_t rotate_right32(uint32_t value, int count)
{
    return value >> count | value << (32 - count);
}

static void sha256_compress_portable(uint32_t state[8], const uint8_t *blocks, size_t num_blocks)
{
    for (; num_blocks; num_blocks--, blocks += SHA256_BLOCK_BYTES) {
        uint32_t w[64];
        for (int i = 0; i < 16; i++)
            w[i] = load_big32(blocks + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t near = w[i - 2], far = w[i - 15];
            w[i] = w[i - 16] + (rotate_right32(far, 7) ^ rotate_right32(far, 18) ^ far >> 3) + w[i - 7] +
                   (rotate_right32(near, 17) ^ rotate_right32(near, 19) ^ near >> 10);
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int i = 0; i < 64; i++) {
            uint32_t one = h + (rotate_right32(e, 6) ^ rotate_right32(e, 11) ^ rotate_right32(e, 25)) +
                           ((e & f) ^ (~e & g)) + sha256_constants[i] + w[i];
            uint32_t two = (rotate_right32(a, 2) ^ rotate_right32(a, 13) ^ rotate_right32(a, 22)) +
                           ((a & b) ^ (a & c) ^ (b & c));
            h = g; g = f; f = e; e = d + one;
            d = c; c = b; b = a; a = one + two;
        }
        state[0] += a; state[1] += b; state[2] += c; state[3] += d;
        state[4] += e; state[5] += f; state[6] += g; state[7] += h;
    }
}

#ifdef SHA256_X86
/* Four rounds with the words in w0, whose place the words of four rounds after w3 take. */
#define SHA256_FOUR_ROUNDS(i, w0, w1, w2, w3)                                                   \
    words = _mm_add_epi32(w0, _mm_loadu_si128((const __m128i *)(sha256_constants + (i))));      \
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);                                            \
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0e));                   \
    w0 = _mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4));               \
    w0 = _mm_sha256msg2_epu32(w0, w3)

__attribute__((target("sha,sse4.1,ssse3"))) static void sha256_compress_x86(uint32_t state[8], const uint8_t *blocks,
                                                                           size_t num_blocks)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    /* The instructions hold the state as (a, b, e, f) and (c, d, g, h), the last in the lowest lane. */
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, cdab, 0xf0);
    for (; num_blocks; num_blocks--, blocks += SHA256_BLOCK_BYTES) {
        const __m128i *in = (const __m128i *)blocks;
        __m128i abef_before = abef, cdgh_before = cdgh, words;
        __m128i w0 = _mm_shuffle_epi8(_mm_loadu_si128(in), big_endian);
        __m128i w1 = _mm_shuffle_epi8(_mm_loadu_si128(in + 1), big_endian);
        __m128i w2 = _mm_shuffle_epi8(_mm_loadu_si128(in + 2), big_endian);
        __m128i w3 = _mm_shuffle_epi8(_mm_loadu_si128(in + 3), big_endian);
        for (int i = 0; i < 64; i += 16) {
            SHA256_FOUR_ROUNDS(i, w0, w1, w2, w3);
            SHA256_FOUR_ROUNDS(i + 4, w1, w2, w3, w0);
            SHA256_FOUR_ROUNDS(i + 8, w2, w3, w0, w1);
            SHA256_FOUR_ROUNDS(i + 12, w3, w0, w1, w2);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#endif

/* The fastest that this processor runs. */
static sha256_compress *sha256_best_compress(void)
{
#ifdef SHA256_X86
    const unsigned int ssse3_and_sse41 = 1u << 9 | 1u << 19, sha = 1u << 29;
    unsigned int eax, ebx, ecx, edx;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & ssse3_and_sse41) == ssse3_and_sse41 &&
        __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && ebx & sha)
        return sha256_compress_x86;
#endif
    return sha256_compress_portable;
}

/* Digest a message, which is padded in place: SHA256_MAX_PADDING bytes behind it are overwritten. */
static void sha256_digest(sha256_compress *compress, uint8_t *message, size_t num_bytes, uint8_t *digest)
{
    uint32_t state[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    size_t num_blocks = (num_bytes + 8) / SHA256_BLOCK_BYTES + 1;
    uint8_t *length = message + num_blocks * SHA256_BLOCK_BYTES - 8;
    message[num_bytes] = 0x80;
    memset(message + num_bytes + 1, 0, (size_t)(length - message) - num_bytes - 1);
    store_big32(length, (uint32_t)((uint64_t)num_bytes >> 29));
    store_big32(length + 4, (uint32_t)(num_bytes << 3));
    compress(state, message, num_blocks);
    for (int i = 0; i < 8; i++)
        store_big32(digest + 4 * i, state[i]);
}

#endif
