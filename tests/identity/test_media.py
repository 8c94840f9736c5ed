from __future__ import annotations

from array import array
from hashlib import sha256

import pytest

from anaphora.identity import MediaSpan, PromptEmbeds, validate_media


class TestMediaSpan:
    @pytest.mark.parametrize(
        ("offset", "length", "digest", "message"),
        [
            (-1, 2, "d", "offset: expected an integer of 0 or more, got -1"),
            (0, 0, "d", "length: expected an integer of 1 or more, got 0"),
            (0, 2.5, "d", "length: expected an integer of 1 or more, got 2.5"),
            (0, 1, "", "digest: expected a non-empty string"),
            (0, 1, b"d", "digest: expected a non-empty string"),
        ],
    )
    def test_refusals(self, offset, length, digest, message):
        with pytest.raises(ValueError, match=message):
            MediaSpan(offset, length, digest)


class TestPromptEmbeds:
    def test_rows_of_any_buffer_are_digested_as_they_lie_in_memory(self):
        values = array("f", range(12))
        embeds = PromptEmbeds(3, values, 16)
        assert (embeds.offset, embeds.length) == (3, 3)
        assert embeds.digest(0, 3) == sha256(values.tobytes()).digest()
        assert embeds.digest(1, 2) == sha256(values[4:8].tobytes()).digest()

    def test_a_matrix_is_taken_row_by_row(self):
        np = pytest.importorskip("numpy")
        rows = np.arange(6, dtype=np.float16).reshape(3, 2)
        assert PromptEmbeds(0, rows, 4).digest(1, 3) == sha256(rows[1:].tobytes()).digest()
        with pytest.raises(ValueError, match="rows: expected a C-contiguous buffer"):
            PromptEmbeds(0, rows.T, 6)

    @pytest.mark.parametrize(("rows", "row_bytes"), [(b"", 4), (b"12345", 4)])
    def test_rows_are_whole(self, rows, row_bytes):
        with pytest.raises(ValueError, match=f"rows: expected one or more rows of 4 bytes, got {len(rows)} bytes"):
            PromptEmbeds(0, rows, row_bytes)

    def test_row_bytes_and_offset_are_checked(self):
        with pytest.raises(ValueError, match="row_bytes: expected an integer of 1 or more, got 0"):
            PromptEmbeds(0, b"1234", 0)
        with pytest.raises(ValueError, match="offset: expected an integer of 0 or more, got -4"):
            PromptEmbeds(-4, b"1234", 4)


class TestValidation:
    def test_adjacent_items_up_to_the_prompts_end_are_kept_in_order(self):
        items = [MediaSpan(0, 2, "a"), MediaSpan(2, 3, "b"), PromptEmbeds(5, bytes(8), 4)]
        assert validate_media(iter(items), 7) == tuple(items)
        assert validate_media((), 0) == ()

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            (MediaSpan(3, 2, "b"), r"media\[1\]\.offset: expected 4 or more, where the item before ends, got 3"),
            (MediaSpan(0, 1, "b"), r"media\[1\]\.offset: expected 4 or more, where the item before ends, got 0"),
            (MediaSpan(8, 2, "b"), r"media\[1\]\.offset: 8 and length 2 leave the prompt of 9 tokens"),
            (MediaSpan(9, 1, "b"), r"media\[1\]\.offset: 9 and length 1 leave the prompt of 9 tokens"),
        ],
    )
    def test_refusals_name_the_entry(self, second, message):
        with pytest.raises(ValueError, match=message):
            validate_media([MediaSpan(2, 2, "a"), second], 9)

    def test_something_else_is_refused(self):
        with pytest.raises(TypeError, match=r"media\[0\]: expected a MediaSpan or PromptEmbeds, got tuple"):
            validate_media([(0, 1, "a")], 9)
