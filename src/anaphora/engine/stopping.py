"""When an output ends, and which of its text is certain already."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from anaphora.engine.request import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """Turns one request's output ids into text, piece by piece."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain (none while a character is unfinished)."""
        ...

    def flush(self) -> str:
        """The output ends here: return the text of what is still held back."""
        ...


class StopStrings:
    """Passes text on until the first of some strings appears in it.

    The first is the one that ends first; of several that end together, the longest. So the result does not depend on
    how the text was cut into pieces. What may be the beginning of a stop string is held back.
    Cost: O(characters * strings), whatever their lengths: one Knuth-Morris-Pratt automaton a string.
    """

    __slots__ = ("_automata", "_held")

    def __init__(self, strings: Collection[str]) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Add text. Return what may be passed on, and whether a stop string has appeared; push nothing after that."""
        if not self._automata:
            return text, False
        pending = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            longest = 0
            for automaton in self._automata:
                if automaton.push(character) and automaton.num_matched > longest:
                    longest = automaton.num_matched
            if longest:
                self._held = ""
                return pending[: end - longest], True
        num_certain = len(pending) - max(automaton.num_matched for automaton in self._automata)
        self._held = pending[num_certain:]
        return pending[:num_certain], False

    def flush(self) -> str:
        """Return the text held back: no more will come, so it was no stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one string the text read so far ends with."""

    __slots__ = ("_fallback", "_string", "num_matched")

    def __init__(self, string: str) -> None:
        # _fallback[n]: length of the longest proper prefix of the string that string[:n] ends with.
        self._string = string
        self._fallback = [0, 0]
        self.num_matched = 0
        for end in range(1, len(string)):
            length = self._fallback[end]
            while length and string[length] != string[end]:
                length = self._fallback[length]
            self._fallback.append(length + (string[length] == string[end]))

    def push(self, character: str) -> bool:
        """Read a character; return whether the text now ends with the whole string."""
        while self.num_matched and self._string[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched]
        if self._string[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self._string)


class OutputPiece(NamedTuple):
    """Text that became certain, and why the output ends here (None: it goes on)."""

    text: str
    finish_reason: FinishReason | None


class OutputStream:
    """Follows one request's output token by token.

    The output ends, whichever comes first, with: an end-of-sequence token (unless `ignore_eos`) or one of
    `stop_token_ids`, "stop", the token having no text; a token that makes it complete, "stop"; a stop string, "stop",
    the text ending before it; the `max_tokens`-th token, "length".
    """

    __slots__ = ("_detokenizer", "_max_tokens", "_stop_strings", "_stop_token_ids", "num_tokens")

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int] = (), detokenizer: Detokenizer | None = None
    ) -> None:
        """Without a `detokenizer` the text stays empty, and stop strings never appear."""
        self._max_tokens = params.max_tokens
        self._stop_token_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._stop_strings = StopStrings(params.stop)
        self._detokenizer = detokenizer
        self.num_tokens = 0
        """Output tokens so far."""

    def push(self, token_id: int, *, is_complete: bool = False) -> OutputPiece:
        """Add the next token; push nothing after a piece with a finish reason. `is_complete`: nothing can follow it."""
        self.num_tokens += 1
        is_stop_token = token_id in self._stop_token_ids
        is_last = is_stop_token or is_complete or self.num_tokens >= self._max_tokens
        text = ""
        if self._detokenizer is not None:
            if not is_stop_token:
                text += self._detokenizer.push(token_id)
            if is_last:
                text += self._detokenizer.flush()
        text, is_stopped = self._stop_strings.push(text)
        if is_stopped:
            return OutputPiece(text, "stop")
        if not is_last:
            return OutputPiece(text, None)
        return OutputPiece(text + self._stop_strings.flush(), "stop" if is_stop_token or is_complete else "length")
