"""Images, audio and embeddings in a prompt are part of its identity.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

import pytest

from anaphora.identity import MediaSpan, PromptEmbeds
from tests.cache.conftest import run, tokens

IMAGE, OTHER_IMAGE = "sha256:aa", "sha256:bb"
PLACEHOLDER = 99


class TestMedia:
    def test_equal_placeholders_of_unequal_images_never_match(self, make):
        manager = make(32)
        prompt = [*tokens(1, 6), *[PLACEHOLDER] * 4, *tokens(7, 9)]
        for image, expected in ((IMAGE, 0), (OTHER_IMAGE, 4), (IMAGE, 12)):
            assert run(manager, prompt, media=[MediaSpan(6, 4, image)]) == expected

    def test_a_prompt_with_an_image_shares_the_text_before_it_with_those_without(self, make):
        manager = make(32)
        text = tokens(1, 21)
        run(manager, text)
        prompt = [*tokens(1, 9), *[PLACEHOLDER] * 8, *tokens(1, 4)]
        assert run(manager, prompt, media=[MediaSpan(9, 8, IMAGE)]) == 8
        assert run(manager, prompt) == 8
        assert run(manager, text) == 20

    def test_placeholders_without_an_image_are_plain_tokens(self, make):
        manager = make(32)
        prompt = [PLACEHOLDER] * 17
        run(manager, prompt)
        assert run(manager, prompt, media=[MediaSpan(4, 8, IMAGE)]) == 4
        assert run(manager, prompt) == 16

    def test_an_image_matches_only_at_its_place(self, make):
        manager = make(64)
        for offset in (4, 5):
            assert run(manager, [PLACEHOLDER] * 17, media=[MediaSpan(offset, 6, IMAGE)]) == (0 if offset == 4 else 4)
        assert run(manager, [PLACEHOLDER] * 17, media=[MediaSpan(5, 6, IMAGE)]) == 16
        assert run(manager, [PLACEHOLDER] * 17, media=[MediaSpan(4, 3, IMAGE), MediaSpan(7, 3, IMAGE)]) == 4

    def test_a_long_image_matches_up_to_where_its_prompts_part(self, make):
        manager = make(64)
        image = MediaSpan(2, 30, IMAGE)
        run(manager, [1, 2, *[PLACEHOLDER] * 30, *tokens(3, 7)], media=[image])
        assert run(manager, [1, 2, *[PLACEHOLDER] * 30, *tokens(13, 17)], media=[image]) == 32
        # The same item in the middle of a longer one: blocks 1 to 4 hold the same rows, block 5 on does not.
        longer = MediaSpan(2, 40, OTHER_IMAGE)
        assert run(manager, [1, 2, *[PLACEHOLDER] * 40, 3], media=[longer]) == 0

    def test_a_request_cut_inside_an_image_is_found_by_the_whole_one(self, make):
        manager = make(64)
        image = MediaSpan(0, 32, IMAGE)
        sequence = manager.start([PLACEHOLDER] * 32, media=[image])
        assert manager.allocate(sequence, 10)
        manager.commit(sequence, 10)
        manager.check()
        assert manager.match([*[PLACEHOLDER] * 32, 1], media=[image]) == 8
        assert manager.allocate(sequence, 22)
        manager.commit(sequence, 22)
        manager.check()
        assert manager.match([*[PLACEHOLDER] * 32, 1], media=[image]) == 32

    def test_rows_of_embeddings_match_block_by_block(self, make):
        manager = make(64)
        rows = bytes(range(64))
        changed = rows[:40] + bytes([255]) + rows[41:]
        assert run(manager, [0] * 17, media=[PromptEmbeds(0, rows, 4)]) == 0
        assert run(manager, [0] * 17, media=[PromptEmbeds(0, rows, 4)]) == 16
        assert run(manager, [0] * 17, media=[PromptEmbeds(0, changed, 4)]) == 8
        assert run(manager, [0] * 17) == 0

    def test_an_item_outside_the_prompt_is_refused_by_name(self, make):
        with pytest.raises(ValueError, match=r"media\[0\]"):
            make(4).start([1, 2, 3], media=[MediaSpan(2, 2, IMAGE)])
