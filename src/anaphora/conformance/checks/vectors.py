"""Golden vectors: the names that vLLM 0.32.0 gave to the last full block of 37 tokens, 0 to 36, with the seed "0".

The last name of a chain depends on all before it. Recorded from the real code under Python 3.11.
"""

from __future__ import annotations

from anaphora.conformance.adapter import Prompt
from anaphora.identity import Adapter, MediaSpan, Namespace

_TOKENS = tuple(range(37))
_LORA = Adapter("sql", name="sql-adapter", path="/adapters/sql")
_IMAGE = "a" * 64

PROMPTS = {
    "plain": Prompt(_TOKENS),
    "salt": Prompt(_TOKENS, Namespace(salt="tenant-a/β✓")),
    "adapter": Prompt(_TOKENS, Namespace(adapter=_LORA)),
    "media": Prompt(_TOKENS, media=(MediaSpan(3, 20, _IMAGE),)),
    "all three": Prompt(_TOKENS, Namespace(adapter=_LORA, salt="s3cr3t"), (MediaSpan(2, 30, _IMAGE),)),
}
"""What was named."""

NAMES = {
    ("sha256", 4, "plain"): "493bff10e860bd4c1ca51df01937901489811bc8784726a167536e576ccfbdd8",
    ("sha256", 4, "salt"): "76f96686166b0940a9fba009053ae457feaf63b779d1a3f3bb189705fb6b8e53",
    ("sha256", 4, "adapter"): "58696f90ca097009fc7cb3fa80eb5dc2b07ef6c35ecf1dd137b7efcd7dd1f28c",
    ("sha256", 4, "media"): "98f578ee8b50d386086c5a47153c7d5a153e1021ef657a0b8aee40dca0f13b5e",
    ("sha256", 4, "all three"): "9388c9bc2e8ba7dbb991e3ab30c2cd85d1e82a1e104caf1dd5ae811cf03c7483",
    ("sha256", 16, "plain"): "3c3c50f324aefbdfbb124dfdc541efac3e94e59c40f4be08afe70601eeca92c8",
    ("sha256", 16, "salt"): "d086bcf6d29305e8f546dfead1bb5d99190e20ec6021acc797e246d9e36b1c44",
    ("sha256", 16, "adapter"): "c9087bf438f8077736d3c36bb134473a6b56a0ff10313a4ab6b86b1ad61dca68",
    ("sha256", 16, "media"): "1a31b25d3e0cb516bc1f8ed020e3679287808f7e835c6d22068c31bcc9fcab2c",
    ("sha256", 16, "all three"): "a93de62aee3f9a8178e9d732ee566ff1193e4f796d7fdbdc3ea85d228e6bdde0",
    ("sha256_cbor", 4, "plain"): "93779433706ab4118622b43a5b8966ec0170dccee446f20d57e3cd63fb568245",
    ("sha256_cbor", 4, "salt"): "015a5cd905cbf63375fbfcf5ffc54f7827efc46803a630098cadc9bca07970bb",
    ("sha256_cbor", 4, "adapter"): "45738a3c9f086b1863b9ec7f10d2bd8f3fe720613a237a4529d783a3a0025b0b",
    ("sha256_cbor", 4, "media"): "25f4922545ae123df65fc46cc08b70ca3b451b1687c55d61b46d3155df90c9bc",
    ("sha256_cbor", 4, "all three"): "6846d02564ab540a4f4abec7e247411b734ddda768bcfaaae6622e747c940906",
    ("sha256_cbor", 16, "plain"): "fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac",
    ("sha256_cbor", 16, "salt"): "93c5a5abe3cdd44801c276fd87721d03e557a8ccb446846f889607559ba8d17d",
    ("sha256_cbor", 16, "adapter"): "8753e662b35aad92b809f40a85b211106212edb03dd667bf53beb049cc3b7fa5",
    ("sha256_cbor", 16, "media"): "447da78fc191891e02078bc8954e98baf16ea64b19bf22152ff2bde8f7a2d22c",
    ("sha256_cbor", 16, "all three"): "b0967c0cdd3f25c9537f170901034ab6264f3e25059cf7872fdb125f105b9ebd",
    ("xxhash", 4, "plain"): "f5f0231f3272b8b69da9b6d0e0a8ef2a",
    ("xxhash", 4, "salt"): "c1a29303f973d0059fe16cb4df1d710f",
    ("xxhash", 4, "adapter"): "3236410b801140829a453bcd22d50d68",
    ("xxhash", 4, "media"): "853d9d53ac032f3496f40c526c99dd93",
    ("xxhash", 4, "all three"): "75be9956af1edf8fd25f46e6819c9cb5",
    ("xxhash", 16, "plain"): "5a51cc5ac3a4b1f7d5efd012fb00201a",
    ("xxhash", 16, "salt"): "e06486301e235ae004bf359518da3cb0",
    ("xxhash", 16, "adapter"): "6d47761646007e60029b8a83d924af7a",
    ("xxhash", 16, "media"): "c191d835962a37c54dbb88e8e634813a",
    ("xxhash", 16, "all three"): "3ad98c9d1ca3a656c2757fa0078ef733",
    ("xxhash_cbor", 4, "plain"): "d50d4891172a84212dda3e0218c5faf4",
    ("xxhash_cbor", 4, "salt"): "c0f2c22445dfd626bb6f05599d313f56",
    ("xxhash_cbor", 4, "adapter"): "95e6bf022b8ddf14d1f6ec5b29723f45",
    ("xxhash_cbor", 4, "media"): "1eda0d0c00e32edf614344955d7b8a76",
    ("xxhash_cbor", 4, "all three"): "620e34672cdc48bf91adc5f1fa2d2525",
    ("xxhash_cbor", 16, "plain"): "03888914ee75b87e89df867a21beb72b",
    ("xxhash_cbor", 16, "salt"): "12e9dc7d2b117c31bb83f493b9cab730",
    ("xxhash_cbor", 16, "adapter"): "917edc70f179e5e492a29980ee420d5e",
    ("xxhash_cbor", 16, "media"): "197f10f7e6346be8dd75c2a2f16ec213",
    ("xxhash_cbor", 16, "all three"): "3ada984d5aed9efc7303e9bc887967ea",
}
"""Algorithm, block size and which of PROMPTS -> the name in hex."""
