"""Text and token ids, by `tokenizers` where a file says all about a tokenizer, else through transformers.

(transformers is imported only then. It imports PyTorch if that is installed; nothing here needs it.)
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.io import gguf_tokenizer
from jaxspec.io.chat import ChatTemplate, default_template, stored_template
from jaxspec.io.extras import MissingExtra, require
from jaxspec.io.files import read_text, refuse_pointer
from jaxspec.io.gguf_file import is_gguf
from jaxspec.io.messages import brief_errors
from jaxspec.io.tokenizer_file import failures, read_tokenizer

# Any one of the first makes a tokenizer; all of them travel with a model.
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
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A window this long is shortened, so that the cost of a token does not grow with the text.
_WINDOW = 64


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory has the files of a tokenizer, or a GGUF file a vocabulary, good or bad."""
    if is_gguf(directory):
        return gguf_tokenizer.has_tokenizer(directory)
    return any((Path(directory) / name).is_file() for name in _VOCABULARIES)


@brief_errors()
def load_tokenizer(directory: str | os.PathLike[str], chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a model's directory or GGUF file.

    Args:
      directory: a local one, or the file.
      chat_template: a file with a Jinja template, instead of the tokenizer's own.

    Raises:
      FileNotFoundError: there is no file `chat_template`.
      ValueError: the directory has no tokenizer, or one that transformers cannot load; one line.
    """
    directory = Path(directory)
    template = None
    if chat_template is not None:
        template = read_text(chat_template, "`chat_template` must be a Jinja template")
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
    loaded = _transformers().AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )
    # Longer texts are refused with the model's own context; transformers would only warn of them.
    loaded.model_max_length = sys.maxsize
    return loaded


def _check_sentencepiece(directory: Path) -> None:
    """Refuses an unreadable SentencePiece model, for which transformers would report other missing packages."""
    path = directory / SENTENCEPIECE
    if (directory / "tokenizer.json").is_file() or not path.is_file():
        return
    wrong = f"{path} is no SentencePiece model; download it again, or give a directory with tokenizer.json"
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


def _transformers() -> Any:
    """The package, imported without its notices, such as that PyTorch is missing, which nothing here needs."""
    name = "TRANSFORMERS_VERBOSITY"
    if "transformers" in sys.modules or name in os.environ:
        import transformers

        return transformers
    os.environ[name] = "error"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, in notebooks
            import transformers
    finally:
        del os.environ[name]
    transformers.logging.set_verbosity_warning()  # what it would be
    return transformers


def copy_files(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> None:
    """Puts whatever tokenizer files `source` has, or those that say what a GGUF file says, into `destination`."""
    if is_gguf(source):
        if has_tokenizer(source):
            gguf_tokenizer.save(source, destination, _transformers)
        return
    for name in FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(destination) / name)


class Tokenizer:
    """Text to token ids and back, whatever the model's own tokenizer is."""

    def __init__(self, loaded: Any):
        """Wraps a tokenizer of transformers."""
        self._loaded = loaded
        self._skipped = frozenset(loaded.all_special_ids) | {
            index for index, token in loaded.added_tokens_decoder.items() if token.special
        }

    @property
    def vocab_size(self) -> int:
        """How many ids have a token; a model may have more, as padding."""
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
        """Whether `encode_chat` can work."""
        return bool(self._loaded.chat_template)

    def same_vocabulary(self, other: Tokenizer) -> bool:
        """Whether every token has the same id in both."""
        same: bool = self._loaded.get_vocab() == other._loaded.get_vocab()
        return same

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with one BOS in front where the tokenizer adds one."""
        with failures(_CANNOT_ENCODE):
            return self._one_bos(self._loaded.encode(text))

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
          ValueError: there are several and none is called default, see `io.chat.default_template`.
        """
        template = default_template(self._loaded.chat_template)
        return ChatTemplate(template, self.special_tokens) if template else None

    def encode_chat(
        self, messages: str | Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Returns the token ids of a conversation, up to the place where the model's answer begins or continues.

        Args:
          messages: with `role` and `content` each; a string is one message of the user. A last message of the
            assistant is continued: the text that the template writes after its content is left out.
          variables: variables of the template, such as Qwen3's `enable_thinking`.

        Raises:
          ValueError: the tokenizer has no chat template, or its template refuses the conversation.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chat = self.chat
        if chat is None:
            raise ValueError("the model has no chat template; give one with chat_template=FILE")
        go_on = bool(messages) and messages[-1].get("role") == "assistant"
        text = chat.render(messages, ask=not go_on, go_on=go_on, variables=variables).text
        with failures(_CANNOT_ENCODE):
            return self._one_bos(self._loaded.encode(text, add_special_tokens=False))

    def _one_bos(self, ids: list[int]) -> list[int]:
        # A text or a template may spell out the BOS that is there already.
        bos, first = self._loaded.bos_token_id, 0
        while bos is not None and ids[first : first + 2] == [bos, bos]:
            first += 1
        return ids[first:]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; special tokens are left out, spaces stay as they are."""
        given = [int(index) for index in ids]
        with failures("the model's tokenizer cannot decode token ids"):
            text: str = self._loaded.decode(
                given, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def stream(self, after: Sequence[int] = ()) -> Detokenizer:
        """Text piece by piece, for one sequence of tokens.

        Args:
          after: ids that stand before it, such as a prompt. Their text is not given out, but it decides
            whether the first piece begins with a space.
        """
        return Detokenizer(self, after)

    def _is_text(self, index: int) -> bool:
        """Whether `decode` gives an id any say: it drops special tokens and ids without a token."""
        return index not in self._skipped and self._loaded.convert_ids_to_tokens(index) is not None

    def _is_byte(self, index: int) -> bool:
        """Whether an id is a SentencePiece byte, such as `<0x0A>`."""
        return re.fullmatch(r"<0x[0-9A-F]{2}>", self._loaded.convert_ids_to_tokens(index)) is not None


class Detokenizer:
    """Turns tokens into text as they come; all pieces together equal `decode` of all the ids.

    Held back until it is certain: a tail of U+FFFD, which the next token may complete to a character, and a
    run of SentencePiece bytes at the end, for one bad byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        """Starts an empty text; see `Tokenizer.stream`."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window: the latest ids, from a place where no character is cut
        self._settled = 0  # so many of them, from the left, ended a piece with nothing held back
        self._emitted = 0  # characters of the window's text already given out
        if after:
            self.push(after[-_WINDOW // 4 :])
            # What the end of a prompt holds back belongs to the prompt, but for half a character.
            self._emitted = len(tokenizer.decode(self._ids).rstrip(_REPLACEMENT))

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the text that became final, possibly none."""
        self._ids += [index for index in map(int, ids) if self._tokenizer._is_text(index)]
        final = len(self._ids)
        while final and self._tokenizer._is_byte(self._ids[final - 1]):
            final -= 1
        text = self._tokenizer.decode(self._ids[:final])
        sure = text.rstrip(_REPLACEMENT)
        piece = sure[self._emitted :]
        self._emitted = max(self._emitted, len(sure))
        if final == len(self._ids) and sure == text:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """Returns what was held back; the text ends here, and a new one may begin."""
        piece = self._tokenizer.decode(self._ids)[self._emitted :]
        self._ids, self._settled, self._emitted = [], 0, 0
        return piece

    def _shorten(self, text: str) -> None:
        """Drops the settled ids of a long window. A few stay, for a text's first token is decoded otherwise."""
        if len(self._ids) > _WINDOW and self._settled < len(self._ids):
            kept = self._ids[self._settled :]
            tail = self._tokenizer.decode(kept)
            if tail and text.endswith(tail):
                self._ids, self._emitted = kept, len(tail)
        self._settled = len(self._ids)
