"""Reads a tokenizer from `tokenizer.json` alone if that is sufficient, to avoid the import of transformers, which takes
half a second, and two seconds if PyTorch is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxspec.host.files import read_json
from jaxspec.host.messages import fitted

# Classes of transformers that use `tokenizer.json` unchanged, and settings without an effect on ids and texts. For
# other classes or settings, transformers is used.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_READ = {
    *_NAMED,
    "tokenizer_class",
    "add_bos_token",
    "add_eos_token",
    "added_tokens_decoder",
    "chat_template",
}
_WITHOUT_EFFECT = {
    "backend",
    "clean_up_tokenization_spaces",
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    "model_input_names",
    "model_max_length",
    "padding_side",
    "truncation_side",
}


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Converts any exception of a tokenizer library to a ValueError.

    `tokenizers` raises plain `Exception`, and `BaseException` when its Rust code panics.

    Args:
      what: the beginning of the message, before the reason.

    Raises:
      ValueError: the block raised an exception other than an interrupt or MemoryError; one line.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(fitted(f"{what}: {reason}")) from None


class FileTokenizer:
    """The part of transformers' tokenizer interface that `io.tokenizers.tokenizer.Tokenizer` uses.

    Args:
      backend: the tokenizer.
      named: the named special tokens, such as bos_token.
      chat_template: as stored, see `io.tokenizers.chat.templates_of`; None if there is none.

    Attributes:
      chat_template: the argument.
      special_tokens_map: the named tokens.
      bos_token_id, eos_token_id, pad_token_id: their ids; None if there is no such token.
      all_special_ids: of the named tokens.
      added_tokens_decoder: the added tokens by id.
    """

    def __init__(self, backend: Backend, named: dict[str, str], chat_template: Any = None) -> None:
        self._backend, self.special_tokens_map, self.chat_template = backend, named, chat_template
        ids = {name: backend.token_to_id(token) for name, token in named.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        self.pad_token_id = ids.get("pad_token")
        self.all_special_ids = [index for index in ids.values() if index is not None]
        self.added_tokens_decoder = backend.get_added_tokens_decoder()

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of each token."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        # `encode` and `decode` would hold Python's lock, and with it all threads of a server.
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(
        self, ids: Sequence[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """Returns the text of token ids; spaces are never cleaned up."""
        assert not clean_up_tokenization_spaces
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns the id of a token; None if there is none."""
        return self._backend.token_to_id(token)

    def convert_ids_to_tokens(self, index: int) -> str | None:
        """Returns the token of an id; None if there is none."""
        return self._backend.id_to_token(index)


def read_tokenizer(directory: Path) -> FileTokenizer | None:
    """Reads the tokenizer of a directory, without its chat template; None if `tokenizer.json` is not sufficient."""
    try:
        settings = read_json(directory / "tokenizer_config.json")
        with failures("tokenizer.json"):
            backend = Backend.from_file(str(directory / "tokenizer.json"))
            backend.no_padding()
            backend.no_truncation()
            around = backend.encode("a").tokens
    except (ValueError, OSError):  # transformers reports the error, or can read the files
        return None
    if (
        settings.get("tokenizer_class") not in (None, *_PLAIN_CLASSES)
        or settings.keys() - _READ - _WITHOUT_EFFECT
        # A format older than `added_tokens_decoder`, with tokens that `tokenizer.json` may lack.
        or (directory / "added_tokens.json").exists()
    ):
        return None
    named = {name: _content(settings[name]) for name in _NAMED if settings.get(name) is not None}
    if (directory / "special_tokens_map.json").is_file():
        listed = read_json(directory / "special_tokens_map.json")
        if {name: _content(token) for name, token in listed.items()} != named:
            return None
    added = backend.get_added_tokens_decoder()
    plain = {token.content for token in added.values() if _is_plain(token)}
    # transformers would add tokens that are missing or have other properties.
    if not set(named.values()) <= plain or not _same(settings.get("added_tokens_decoder", {}), added):
        return None
    # If the file and the settings disagree about BOS or EOS, versions of transformers differ.
    for name, place in (("bos_token", 0), ("eos_token", -1)):
        adds = bool(around) and around[place] == named.get(name)
        if f"add_{name}" in settings and bool(settings[f"add_{name}"]) != adds:
            return None
    return FileTokenizer(backend, named)


def _content(token: Any) -> str:
    return token.get("content", "") if isinstance(token, dict) else str(token)


def _is_plain(token: AddedToken) -> bool:
    return token.special and not (token.lstrip or token.rstrip or token.single_word or token.normalized)


def _same(listed: Any, added: dict[int, AddedToken]) -> bool:
    """Whether the tokenizer has all tokens listed in its settings, with the same properties."""
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return isinstance(listed, dict) and all(
        index.isdecimal()
        and isinstance(token, dict)
        and int(index) in added
        and all(token.get(name) == getattr(added[int(index)], name) for name in names)
        for index, token in listed.items()
    )
