"""Converts text to token ids and back, by `tokenizers` if `tokenizer.json` is sufficient, else by transformers.

transformers is imported only if needed. It imports PyTorch if that is installed, which is not used here.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.host.extras import MissingExtra, require
from jaxspec.host.files import read_json, refuse_pointer
from jaxspec.host.messages import brief_errors
from jaxspec.io.gguf import gguf_tokenizer
from jaxspec.io.gguf.container import is_gguf
from jaxspec.io.tokenizers.chat import (
    REASONING,
    TEMPLATE_FOLDER,
    ChatTemplate,
    quiet_transformers,
    stored_template,
    templates_of,
)
from jaxspec.io.tokenizers.chat_forms import FORMS, template_of
from jaxspec.io.tokenizers.tokenizer_file import failures, read_tokenizer

# Each of the vocabulary files is sufficient for a tokenizer. `FILES` are copied with a model.
SENTENCEPIECE = "tokenizer.model"
_VOCABULARIES = ("tokenizer.json", SENTENCEPIECE, "vocab.json", "tekken.json", "vocab.txt")
FILES = (
    *_VOCABULARIES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_CANNOT_ENCODE = "the model's tokenizer cannot encode the text"
_CANNOT_DECODE = "the model's tokenizer cannot decode token ids"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Special tokens that begin the parts of a call of a tool, or are around the reasoning. They belong to the text, in
# which a caller finds both.
_SHOWN = {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"}
_SHOWN |= {marker for pair in REASONING for marker in pair}
# The roles by which special tokens are compared; the first one if a token has several. Padding is in no text, and may
# have another role too.
_ROLES = ("eos_token", "bos_token", "unk_token")
# A longer window is halved, so that the cost of a token does not grow with the text.
_WINDOW = 64
# The most bytes of a character before its last one.
_MAX_OPEN = 3


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory contains the files of a tokenizer, or a GGUF file a vocabulary, valid or not."""
    if is_gguf(directory):
        return gguf_tokenizer.has_tokenizer(directory)
    return any((Path(directory) / name).is_file() for name in _VOCABULARIES)


@brief_errors()
def load_tokenizer(
    directory: str | os.PathLike[str], chat_template: str | os.PathLike[str] | None = None
) -> Tokenizer:
    """Returns the tokenizer of a model's directory or GGUF file.

    Args:
      directory: a local directory, or the GGUF file.
      chat_template: a file with a Jinja template, or a name of `chat_forms.FORMS`, instead of the tokenizer's own.

    Raises:
      FileNotFoundError: there is no file `chat_template`.
      ValueError: the directory has no tokenizer, or one that transformers cannot load; one line.
    """
    directory = Path(directory)
    template = None if chat_template is None else template_of(chat_template)
    if not has_tokenizer(directory):
        raise ValueError(
            f"{directory} has no tokenizer (tokenizer.json or tokenizer.model); raw token ids can be used "
            "instead of text"
        )
    for name in _VOCABULARIES:
        if (directory / name).is_file():
            refuse_pointer(directory / name)
    loaded: Any
    cannot = f"{directory}: the tokenizer cannot be loaded"
    if is_gguf(directory):
        loaded = gguf_tokenizer.build(directory)
    else:
        loaded = read_tokenizer(directory)
        if loaded is None:
            _check_sentencepiece(directory)
            with failures(cannot):
                loaded = _load_by_transformers(directory)
        loaded.chat_template = stored_template(directory)
    if template is not None:
        loaded.chat_template = template
    with failures(cannot):
        return Tokenizer(loaded)


def _load_by_transformers(directory: Path) -> Any:
    transformers, path = quiet_transformers(), directory / "config.json"
    content = read_json(path) if path.is_file() else {}
    # The class of a tokenizer may follow from the model's type. Other values of config.json do not concern it, and
    # transformers refuses some of them.
    kind = content.get("model_type", "")
    try:
        config = transformers.AutoConfig.for_model(kind)
    except ValueError:  # a type that transformers does not know
        config = transformers.PreTrainedConfig()
    config.model_type, config.tokenizer_class = kind, content.get("tokenizer_class")
    loaded = transformers.AutoTokenizer.from_pretrained(
        str(directory), config=config, local_files_only=True, trust_remote_code=False
    )
    # Disables transformers' warning about long texts; those longer than the model's context are refused elsewhere.
    loaded.model_max_length = sys.maxsize
    return loaded


def _check_sentencepiece(directory: Path) -> None:
    """Refuses an unreadable SentencePiece model, for which transformers would report other missing packages."""
    path = directory / SENTENCEPIECE
    if (directory / "tokenizer.json").is_file() or not path.is_file():
        return
    wrong = f"{path} is not a SentencePiece model; download it again, or give a directory with tokenizer.json"
    with open(path, "rb") as file:
        if file.read(1) != b"\n":  # the tag of its list of pieces
            raise ValueError(wrong)
    try:
        require("sentencepiece", "sentencepiece", "google.protobuf")
    except MissingExtra as error:
        raise ValueError(f"{path} has no tokenizer.json beside it; {error}") from None
    import sentencepiece

    try:
        sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError):
        raise ValueError(wrong) from None


def copy_files(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Copies the tokenizer files of `source` to `destination`; those of a GGUF file are made from its metadata."""
    if is_gguf(source):
        if has_tokenizer(source):
            gguf_tokenizer.save(source, destination, quiet_transformers)
        return
    folder = Path(source) / TEMPLATE_FOLDER
    for path in [*(Path(source) / name for name in FILES), *folder.glob("*.jinja")]:
        if path.is_file():
            target = Path(destination) / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


class Tokenizer:
    """Converts text to token ids and back, for any of the model's tokenizers."""

    def __init__(self, loaded: Any):
        """Wraps a tokenizer of transformers or a `FileTokenizer`."""
        self._loaded = loaded
        self._parts: dict[int, bytes | None] = {}
        self._alone: dict[int, tuple[str, bytes]] = {}
        added = loaded.added_tokens_decoder.items()
        special = {*loaded.all_special_ids, *(index for index, token in added if token.special)}
        self._skipped = frozenset(special - {index for index, token in added if token.content in _SHOWN})
        self._shows_special = len(self._skipped) < len(special)

    @property
    def vocab_size(self) -> int:
        """The number of ids that have a token; a model may have more, as padding."""
        return len(self._loaded)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` leaves out."""
        return self._skipped

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token; None if there is none."""
        pad: int | None = self._loaded.pad_token_id
        return pad

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template, which `encode_chat` needs."""
        return bool(self._loaded.chat_template)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in both."""
        same: bool = self._loaded.get_vocab() == other._loaded.get_vocab()
        return same

    def encode(self, text: str, most_tokens: int | None = None, begins: bool = True) -> list[int]:
        """Returns the token ids of a text, with one BOS in front if the tokenizer adds one and the text `begins`.

        Args:
          text: the text.
          most_tokens: a text with more bytes than so many tokens can have is refused before any work; None: no limit.

        Raises:
          ValueError: the text is too long, or cannot be encoded.
        """
        self._check_size(text, most_tokens)
        with failures(_CANNOT_ENCODE):
            return self._one_bos(self._loaded.encode(text, add_special_tokens=begins))

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text; None if there is none."""
        index = self._loaded.get_vocab().get(text)
        return index if index in self._skipped else None

    @property
    def special_tokens(self) -> Mapping[str, Any]:
        """The named special tokens, such as bos_token, by name."""
        named: Mapping[str, Any] = self._loaded.special_tokens_map
        return named

    @property
    def chat(self) -> ChatTemplate | None:
        """The chat template; None if there is none.

        Raises:
          ValueError: there are several, none called default, see `io.tokenizers.chat.templates_of`.
        """
        named = templates_of(self._loaded.chat_template)
        return ChatTemplate(named["default"], self.special_tokens, named.get("tool_use")) if named else None

    def encode_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, up to the place where the model's answer begins or continues.

        Args:
          messages: each with `role` and `content`; a string is one message of the user. If the last message is the
            assistant's, it is continued: the text that the template writes after its content is left out.
          variables: variables of the template, such as Qwen3's `enable_thinking`.
          most_tokens: as for `encode`.

        Raises:
          ValueError: the tokenizer has no chat template, the template refuses the conversation or leaves out a message,
            or its text is too long.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chat = self.chat
        if chat is None:
            raise ValueError(
                f"the model has no chat template; give one with chat_template=FILE, or {', '.join(FORMS)}, or give a "
                "model that was trained to chat, such as model=smollm2"
            )
        text = chat.check(messages, variables)
        self._check_size(text, most_tokens)
        with failures(_CANNOT_ENCODE):
            return self._one_bos(self._loaded.encode(text, add_special_tokens=False))

    @functools.cached_property
    def _most_bytes(self) -> int:
        """The most bytes of a token: a vocabulary of bytes has one or two bytes of UTF-8 for each."""
        return max(
            (len(token.encode("utf-8", "surrogatepass")) for token in self._loaded.get_vocab()), default=1
        )

    def _check_size(self, text: str, most_tokens: int | None) -> None:
        if most_tokens is None:
            return
        size = len(text.encode("utf-8", "surrogatepass"))
        if size > most_tokens * self._most_bytes:
            raise ValueError(
                f"the prompt has {size} bytes, the model's context is {most_tokens} tokens of at most "
                f"{self._most_bytes} bytes; shorten the prompt"
            )

    def _one_bos(self, ids: list[int]) -> list[int]:
        # A text or a template may contain the BOS that the tokenizer also adds.
        bos, first = self._loaded.bos_token_id, 0
        while bos is not None and ids[first : first + 2] == [bos, bos]:
            first += 1
        return ids[first:]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text of token ids; spaces are not cleaned up.

        Bytes that form no character become U+FFFD. In a run of SentencePiece bytes, such as `<0x0A>`, that is one
        U+FFFD per byte, and the characters beside them stay, as in SentencePiece. The decoder of `tokenizers` would
        replace the whole run, so that one byte could change a text of any length before it.

        Args:
          ids: the token ids; those without a token are left out.
          special: whether the text includes special tokens.

        Raises:
          ValueError: the tokenizer cannot decode them.
        """
        given = [int(index) for index in ids]
        has_bytes = not self._byte_of.keys().isdisjoint(given)
        if has_bytes or self._shows_special:
            given = [index for index in given if self._is_text(index, special)]
        if has_bytes:
            given = self._with_valid_bytes(given)
        skips = not (special or self._shows_special)
        with failures(_CANNOT_DECODE):
            text: str = self._loaded.decode(
                given, skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
        return text

    def _with_valid_bytes(self, ids: Iterable[int]) -> list[int]:
        """Replaces each SentencePiece byte that is no part of a character by the three bytes of U+FFFD."""
        made: list[int] = []
        for is_bytes, run in itertools.groupby(ids, key=self._byte_of.__contains__):
            if not is_bytes:
                made += run
                continue
            # Python decodes each byte that is no part of a character to a surrogate.
            text = bytes(self._byte_of[index] for index in run).decode("utf-8", "surrogateescape")
            made += [self._id_of[byte] for byte in re.sub("[\ud800-\udfff]", REPLACEMENT, text).encode()]
        return made

    def stream(self, after: Sequence[int] = ()) -> Detokenizer:
        """Returns an incremental decoder for one sequence of tokens.

        Args:
          after: ids before the sequence, such as a prompt. Their text is not returned, but it decides whether the first
            piece begins with a space.
        """
        return Detokenizer(self, after)

    def _is_text(self, index: int, special: bool = False) -> bool:
        """Whether `decode` uses an id: it drops ids without a token, and special ones unless they are wanted."""
        wanted = special or index not in self._skipped
        return wanted and self._loaded.convert_ids_to_tokens(index) is not None

    @functools.cached_property
    def _id_of(self) -> Mapping[int, int]:
        """The id of each SentencePiece byte, such as `<0x0A>`; empty if the tokenizer does not have all of them."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = dict(enumerate(map(self._loaded.convert_tokens_to_ids, names)))
        # For an unknown token transformers returns the id of another.
        if any(
            index is None or self._loaded.convert_ids_to_tokens(index) != name
            for index, name in zip(ids.values(), names, strict=True)
        ):
            return {}
        with failures(_CANNOT_DECODE):
            text = self._loaded.decode(
                [ids[0xFF]], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return ids if text == REPLACEMENT else {}

    @functools.cached_property
    def _byte_of(self) -> Mapping[int, int]:
        """The SentencePiece bytes by id."""
        return {index: byte for byte, index in self._id_of.items()}

    def part(self, index: int) -> bytes | None:
        """Returns the bytes of a token that may be a part of a character; None for a token of whole characters.

        b"" if the bytes are unknown.
        """
        if index not in self._parts:
            self._parts[index] = self._read_part(index)
        return self._parts[index]

    def alone(self, index: int) -> tuple[str, bytes]:
        """Returns the text of a token inside a text, also of a special one, and its bytes.

        The text of a part of a character shows its bytes as OpenAI's API does, such as `bytes:\\xe2\\x96`.
        """
        if index not in self._alone:
            text = self.stream([index]).push([index]) or self.decode([index], special=True)
            raw = self.part(index) or text.encode()
            letters = "".join(f"\\x{byte:02x}" for byte in raw)
            self._alone[index] = f"bytes:{letters}" if self.part(index) else text, raw
        return self._alone[index]

    def token_bytes(self) -> tuple[list[bytes | None], dict[str, int]]:
        """Returns the bytes of each token inside a text, and the ids of the added tokens by text.

        A token may be a part of a character. None for special and added tokens, and for ids whose bytes are unknown.
        """
        added = {token.content: index for index, token in self._loaded.added_tokens_decoder.items()}
        left_out = self._skipped | set(added.values())
        before = next(index for index in range(self.vocab_size) if self.decode([index]).isalnum())
        context = self.decode([before])
        found: list[bytes | None] = [None] * self.vocab_size
        for index in range(self.vocab_size):
            if index not in left_out:
                text = self.decode([before, index]).removeprefix(context)
                part = self.part(index) if REPLACEMENT in text else None
                found[index] = (text.encode() if part is None else part) or None
        return found, added

    def meanings(self) -> Iterator[tuple[bytes | str, int]]:
        """Yields the meanings of tokens and their ids, to compare them with those of another tokenizer.

        A token means its bytes inside a text, and a special one its text and its role, such as eos_token. A role comes
        after all texts: it compares special tokens without an equal one. Of several tokens with the same bytes, the one
        that texts have comes first.
        """
        given, added = self.token_bytes()
        for text, index in added.items():
            yield text if index in self._skipped else text.encode(), index
        for role in _ROLES:
            own = self.special_tokens.get(role)
            if isinstance(own, str) and (number := self.special_id(own)) is not None:
                yield role, number
        # SentencePiece has a token for each byte, which a text has only where no other token fits.
        for index in sorted(range(len(given)), key=self._byte_of.__contains__):
            if (part := given[index]) is not None:
                yield part, index

    def _read_part(self, index: int) -> bytes | None:
        if index in self._byte_of:
            return bytes([self._byte_of[index]])
        text = self.decode([index])
        token = self._loaded.convert_ids_to_tokens(index)
        if REPLACEMENT not in text or REPLACEMENT in token:
            return None
        found = bytes(_byte_letters().get(letter, 0) for letter in token)
        return found if found.decode(errors="replace") == text else b""


@functools.lru_cache
def _num_open(data: bytes) -> int:
    """Returns the number of bytes at the end of `data` that begin a character which further bytes can complete."""
    # After some first bytes only one end of the range of continuation bytes is possible.
    rest = [fill * count for count in range(1, _MAX_OPEN + 1) for fill in (b"\x80", b"\xbf")]
    for begin in range(max(len(data) - _MAX_OPEN, 0), len(data)):
        # Bytes that form no character become a surrogate each.
        if any(len((data[begin:] + end).decode(errors="surrogateescape")) == 1 for end in rest):
            return len(data) - begin
    return 0


@functools.cache
def _byte_letters() -> Mapping[str, int]:
    """Returns the byte of each letter of byte-level tokenizers, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class Detokenizer:
    """Converts tokens to text incrementally; all pieces together equal `decode` of all the ids.

    Only the bytes at the end that begin a character are held back, at most three.

    Attributes:
      tokenizer: the tokenizer.
      num_held: the number of characters (U+FFFD) as which the bytes that are held back would be decoded.
      num_open: the number of these bytes; 0 if it is unknown.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        """Starts an empty text; see `Tokenizer.stream`."""
        self.tokenizer = tokenizer
        self._ids: list[int] = []  # the window: the latest ids
        self._emitted = 0  # the number of characters of the window's text that have been returned
        self._of_prompt = self.num_held = self.num_open = 0
        if after:
            self.push(after[-_WINDOW // 2 :])
            self._of_prompt = self.num_held

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that became final, possibly none."""
        self._ids += [index for index in map(int, ids) if self.tokenizer._is_text(index)]
        text = self.tokenizer.decode(self._ids)
        self.num_open, self.num_held = self._held(text)
        piece = self._piece(text, len(text) - self.num_held)
        if len(self._ids) > _WINDOW:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """Returns the text that was held back, and resets the decoder for a new text."""
        text = self.tokenizer.decode(self._ids)
        piece = self._piece(text, len(text))
        self._ids, self._emitted, self._of_prompt, self.num_held, self.num_open = [], 0, 0, 0, 0
        return piece

    def _piece(self, text: str, end: int) -> str:
        """Returns the text up to `end` that has not been returned yet."""
        piece = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        if piece and self._of_prompt:
            # The prompt ends inside a character. If the text does not complete it, its U+FFFD are the prompt's.
            piece = piece.removeprefix(REPLACEMENT * self._of_prompt)
            self._of_prompt = 0
        return piece

    def _held(self, text: str) -> tuple[int, int]:
        """Returns the number of bytes at the end that begin a character, and of the characters that they are in `text`.

        The tokens before them that are whole characters, or more than three bytes before the end, are of no concern.
        """
        last = b""
        for index in reversed(self._ids):
            part = self.tokenizer.part(index)
            if part == b"":
                return 0, int(text.endswith(REPLACEMENT))
            last = (part or b"") + last
            if part is None or len(last) >= _MAX_OPEN:
                break
        size = _num_open(last[-_MAX_OPEN:])
        # `decode` gives one U+FFFD per SentencePiece byte, and byte-level decoders one for the begun character.
        return size, size if self._ids and self._ids[-1] in self.tokenizer._byte_of else min(size, 1)

    def _shorten(self, text: str) -> None:
        """Drops the first ids of the window, if the text that has not been returned does not depend on them.

        A first token may be decoded differently, and the window may begin inside a character, of which `_MAX_OPEN`
        bytes may be left. From the next character on, UTF-8 is decoded as before.
        """
        kept = self._ids[-_WINDOW // 2 :]
        tail = self.tokenizer.decode(kept)
        emitted = len(tail) - (len(text) - self._emitted)
        if emitted > _MAX_OPEN and text.endswith(tail[_MAX_OPEN:]):
            self._ids, self._emitted = kept, emitted
