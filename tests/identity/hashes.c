/* The two hashes of the extension by themselves, for published vectors. */
#include "blake2b.h"
#include "sha256.h"

void sha256(int is_portable, uint8_t *message, size_t num_bytes, uint8_t *digest)
{
    sha256_digest(is_portable ? sha256_compress_portable : sha256_best_compress(), message, num_bytes, digest);
}

/* A key stands in front of the message, filled up to a block. */
void blake2b(size_t key_bytes, const uint8_t *message, size_t num_bytes, uint8_t *digest, size_t digest_bytes)
{
    blake2b_finish(blake2b_start(digest_bytes, key_bytes, NULL, 0), message, num_bytes, digest, digest_bytes);
}
