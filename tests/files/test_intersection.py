"""The tokens that two tokenizers share."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxspec.io.tokenizers.intersection import intersection
from jaxspec.io.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.files.test_tokenizer import NAMES, tokenizer


def pairs_of(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    shared = intersection(target, draft, target.vocab_size, draft.vocab_size).shared
    return dict(shared.tolist())


def every_bytes(of: Tokenizer) -> set[bytes]:
    return {of.alone(index)[1] for index in range(of.vocab_size)} - {b""}


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("draft", NAMES)
def test_shared_tokens_are_those_with_the_same_bytes(target, draft):
    """Tokens of a byte-level tokenizer and of SentencePiece with the same bytes are shared, and special tokens."""
    ours, theirs = tokenizer(target), tokenizer(draft)
    pairs = pairs_of(ours, theirs)
    assert list(pairs) == sorted(pairs)
    assert len({*pairs.values()}) == len(pairs)
    assert all(ours.alone(index)[1] == theirs.alone(same)[1] for index, same in pairs.items())
    assert {ours.alone(index)[1] for index in pairs} == every_bytes(ours) & every_bytes(theirs)


def test_a_byte_beside_its_character():
    """Texts have the character; its byte is fed as the same, but not proposed."""
    level, fallback = tokenizer("byte_level"), tokenizer("byte_fallback")
    letter, byte = (fallback._loaded.get_vocab()[name] for name in ("a", "<0x61>"))
    same = level._loaded.get_vocab()["a"]
    found = intersection(fallback, level, fallback.vocab_size, level.vocab_size)
    assert dict(found.shared.tolist())[letter] == same
    assert byte not in found.shared[:, 0]
    assert found.fed[[letter, byte]].tolist() == [same, same]
    assert pairs_of(level, fallback)[same] == letter


def letters(directory, tokens: str, added: dict[str, bool], **named: str) -> Tokenizer:
    """A tokenizer of letters, and added tokens that are special or not."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens.split())}, []))
    backend.decoder = decoders.Fuse()
    for text, special in added.items():
        backend.add_tokens([AddedToken(text, special=special, normalized=False)])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(directory)


SPECIAL = dict.fromkeys(("<s>", "</s>", "<user>", "<other>"), True)
ENDS = dict.fromkeys(("<user>", "<begin>", "<end>", "<mine>"), True)
ROLES = {"bos_token": "<s>", "eos_token": "</s>"}
OTHERS = {"bos_token": "<begin>", "eos_token": "<end>"}


def test_special_tokens_are_shared_by_role_or_text(tmp_path):
    target = letters(tmp_path / "target", "a b", SPECIAL, pad_token="<user>", **ROLES)
    draft = letters(tmp_path / "draft", "b c", ENDS, pad_token="<end>", **OTHERS)
    ours, theirs = target._loaded.get_vocab(), draft._loaded.get_vocab()
    found = intersection(target, draft, target.vocab_size + 2, draft.vocab_size)
    expected = {"b": "b", "<s>": "<begin>", "</s>": "<end>", "<user>": "<user>"}
    assert dict(found.shared.tolist()) == {ours[text]: theirs[same] for text, same in expected.items()}
    # The draft reads its end token in the place of padding and of tokens that it lacks.
    rest = [ours["a"], ours["<other>"], *range(target.vocab_size, target.vocab_size + 2)]
    assert found.fed[rest].tolist() == [theirs["<end>"]] * 4


def test_an_equal_text_is_shared_before_a_role(tmp_path):
    """A chat draft ends its texts with another of the target's tokens."""
    both = dict.fromkeys(("<end>", "<turn>"), True)
    target = letters(tmp_path / "target", "a", both, eos_token="<end>")
    draft = letters(tmp_path / "draft", "a", both, eos_token="<turn>")
    assert pairs_of(target, draft) == {0: 0, 1: 1, 2: 2}


def test_a_token_with_two_roles_is_shared_once(tmp_path):
    one = letters(tmp_path / "one", "a", {"<|end|>": True}, bos_token="<|end|>", eos_token="<|end|>")
    two = letters(
        tmp_path / "two",
        "a",
        {"<s>": True, "</s>": True},
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
    )
    assert pairs_of(one, two) == {0: 0, 1: 2}
    found = intersection(two, one, 3, 2)
    assert found.shared.tolist() == [[0, 0], [2, 1]]
    assert found.fed.tolist() == [0, 1, 1]


def test_an_added_token_that_is_not_special_is_text(tmp_path):
    target = letters(tmp_path / "target", "a ab", {"</s>": True}, eos_token="</s>")
    draft = letters(tmp_path / "draft", "a", {"ab": False, "</s>": True}, eos_token="</s>")
    assert pairs_of(target, draft) == {0: 0, 1: 1, 2: 2}


def test_rows_that_a_model_does_not_have_are_not_shared(tmp_path):
    named = {"eos_token": "</s>"}
    one = letters(tmp_path / "one", "a b", {"</s>": True}, **named)
    two = letters(tmp_path / "two", "b a", {"</s>": True}, **named)
    assert intersection(one, two, 3, 3).shared.tolist() == [[0, 1], [1, 0], [2, 2]]
    assert intersection(one, two, 2, 1).shared.tolist() == [[1, 0]]


def test_a_missing_token_is_fed_as_the_longest_end_of_it(tmp_path):
    target = letters(tmp_path / "target", "abc bcb c", {"</s>": True}, eos_token="</s>")
    draft = letters(tmp_path / "draft", "c bc abcb cb", {"</s>": True}, eos_token="</s>")
    assert intersection(target, draft, 4, 5).fed.tolist() == [1, 3, 0, 4]


def test_tables_are_of_whole_numbers():
    found = intersection(tokenizer("byte_level"), tokenizer("byte_fallback"), 400, 300)
    assert (found.shared.dtype, found.fed.dtype, found.fed.shape) == (np.int32, np.int32, (400,))
