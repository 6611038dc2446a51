"""Text to ids and back: one BOS, chat templates, and streams that add up to the whole text."""

from __future__ import annotations

import functools
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.io.tokenizers.tokenizer import Tokenizer, copy_files, has_tokenizer, load_tokenizer
from jaxspec.io.tokenizers.tokenizer_file import FileTokenizer, read_tokenizer
from tests import python, refused, variables
from tests.commands import write_byte_level
from tests.data import MODELS

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{{ '[model] ' if add_generation_prompt }}"
)
TEXTS = ["Once upon a time, there was a tiny bear.", "Ünïcödé — “quotes” 🎉🎉 日本語\n\n  two  spaces ", ""]


def _byte_level(directory: Path) -> None:
    write_byte_level(directory, TEXTS)


def _byte_fallback(directory: Path) -> None:
    """A SentencePiece-like BPE as Llama 2's: bytes are tokens of their own, and a first space is dropped."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, processors

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "▁▁", "a", "b", "é", "▁bear", "▁a", "日"):
        vocabulary[piece] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    if name == "stories260K":
        if not (MODELS / name).is_dir():
            pytest.skip("the shared data is not here")
        return load_tokenizer(MODELS / name)
    return load_tokenizer(directory(name))


@functools.cache
def directory(name: str) -> Path:
    made = tempfile.TemporaryDirectory()
    _KEPT.append(made)  # removed when the process ends
    path = Path(made.name)
    (_byte_level if name == "byte_level" else _byte_fallback)(path)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        # transformers would drop the space before a full stop; a stream could not take that back.
        "clean_up_tokenization_spaces": True,
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


_KEPT: list[tempfile.TemporaryDirectory] = []
NAMES = ["stories260K", "byte_level", "byte_fallback"]


@pytest.mark.parametrize("name", NAMES)
def test_text_survives(name):
    loaded = tokenizer(name)
    for text in TEXTS:
        ids = loaded.encode(text)
        assert ids.count(1 if name != "byte_level" else 0) == 1
        assert loaded.decode(ids) == text.removeprefix(" ")
        assert max(ids) < loaded.vocab_size
    assert loaded.decode([]) == ""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150)
@given(data=st.data())
def test_a_stream_adds_up_to_the_text(name, data):
    """Any ids at all: special ones, ids beyond the vocabulary, bytes that are no character."""
    loaded = tokenizer(name)
    size = loaded.vocab_size
    ranges = [(0, size + 3), (3, min(258, size - 1)), (196, 214), (max(0, size - 60), size - 1)]
    some = st.one_of([st.lists(st.integers(*span), max_size=60) for span in ranges])
    ids = [index for part in data.draw(st.lists(some, max_size=6)) for index in part]
    step = data.draw(st.integers(1, 9))
    stream = loaded.stream()
    pieces = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(pieces) + stream.flush() == loaded.decode(ids)
    assert stream.push([]) == ""
    assert stream.flush() == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_text_goes_on_where_its_prompt_ends(name):
    """A space between prompt and text is the text's, and nothing of the prompt is given out again."""
    t = tokenizer(name)
    ids = t.encode("once upon a time")
    for cut in range(1, len(ids)):
        stream = t.stream(ids[:cut])
        assert t.decode(ids[:cut]) + stream.push(ids[cut:]) + stream.flush() == t.decode(ids)


# Bytes of characters of one to four bytes, of U+FFFD, and bytes that begin no character or another one than it seems.
BYTES = b"\nA\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xef\xbf\xbd\xed\xa0\xe0\xf4\x90\xc0\xff"


def byte_ids(name: str, data: Iterable[int]) -> list[int]:
    """The tokens of bytes."""
    vocabulary = tokenizer(name)._loaded.get_vocab()
    if name == "byte_fallback":
        return [vocabulary[f"<0x{byte:02X}>"] for byte in data]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + at) for at, byte in enumerate(sorted({*range(256)} - {*printable}))}
    return [vocabulary[letters[byte]] for byte in data]


def text_of(name: str, data: bytes) -> str:
    """The text of bytes: SentencePiece has one U+FFFD for each byte that is no part of a character."""
    if name == "byte_level":
        return data.decode(errors="replace")
    return re.sub("[\ud800-\udfff]", "\ufffd", data.decode(errors="surrogateescape"))


def certain(name: str, data: bytes) -> str:
    """The text that no further bytes can change."""
    further = [b"A", *(fill * count for fill in (b"\x80", b"\xbf") for count in (1, 2, 3))]
    letters = zip(*(text_of(name, data + one) for one in further), strict=False)
    return "".join(one[0] for one in itertools.takewhile(lambda one: len({*one}) == 1, letters))


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@settings(max_examples=150)
@given(
    data=st.lists(st.sampled_from([*BYTES]), max_size=40).map(bytes),
    times=st.integers(1, 9),
    step=st.integers(1, 9),
)
def test_bytes_come_as_soon_as_they_are_certain(name, data, times, step):
    data *= times
    ids, stream, got = byte_ids(name, data), tokenizer(name).stream(), ""
    assert tokenizer(name).decode(ids) == text_of(name, data)
    for at in range(0, len(ids), step):
        got += stream.push(ids[at : at + step])
        assert got == certain(name, data[: at + step])
        assert max(stream.num_held, stream.num_open) <= 3
        assert len(stream._ids) <= 64
    assert got + stream.flush() == text_of(name, data)


def test_tokens_that_are_never_whole_characters():
    """Each token ends one character and begins the next, so that no place between two tokens is between characters."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE({"âĤ": 0, "¬âĤ": 1, "¬": 2}, []))
    backend.decoder = decoders.ByteLevel()
    loaded = Tokenizer(FileTokenizer(backend, {}))
    stream, got = loaded.stream(), ""
    for count, index in enumerate([0, *[1] * 500]):
        got += stream.push([index])
        assert got == "€" * count
        assert len(stream._ids) <= 64
    assert stream.push([2]) == "€"
    assert stream.flush() == ""


def test_a_token_of_unknown_bytes_waits_for_the_next():
    """The bytes of other letters than GPT-2's are unknown: a U+FFFD at the end may be the beginning of a character."""

    class Other:
        all_special_ids, added_tokens_decoder = (), {}

        def convert_tokens_to_ids(self, token):
            return None

        def convert_ids_to_tokens(self, index):
            return f"{index}"

        def decode(self, ids, **_):
            return bytes(ids).decode(errors="replace")

    data = "a€é\ufffd".encode() + b"\xe2\x82z\xff" + "日".encode()
    stream, got = Tokenizer(Other()).stream(), ""
    for at, byte in enumerate(data, 1):
        got += stream.push([byte])
        assert data[:at].decode(errors="replace").startswith(got)
        assert len(data[:at].decode(errors="replace")) - len(got) <= 1
    assert got + stream.flush() == data.decode(errors="replace")


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize(
    ("prompt", "after", "text"),
    [
        ("A\ufffd".encode(), b"A", "A"),
        ("\ufffd".encode() * 3, b"\nA", "\nA"),
        (b"A\x80", b"A", "A"),
        (b"A\x80\xff", b"", ""),
        (b"A\xe2", b"\x82\xac", "€"),
        (b"A\xe2\x82", b"\xacA", "€A"),
        (b"A\xe2", b"A", "A"),
        (b"A\xe2\x82", b"AB", "AB"),
        (b"A\xe2\x82", b"\xe2\x82\xac", "€"),
        (b"A\xe2", b"", ""),
        (b"\xef\xbf\xbd", b"\xef\xbf\xbd", "\ufffd"),
    ],
)
def test_a_text_after_a_prompt_that_ends_in_a_broken_character(name, prompt, after, text):
    """U+FFFD and broken bytes of the prompt are not repeated; a character that the text completes is the text's."""
    for step in (1, len(after) or 1):
        stream, ids = tokenizer(name).stream(byte_ids(name, prompt)), byte_ids(name, after)
        got = "".join(stream.push(ids[at : at + step]) for at in range(0, len(ids), step))
        assert got + stream.flush() == text


def test_a_piece_that_is_the_character_u_fffd_comes_at_once():
    """Llama 2 has it as a token, beside those of bytes."""
    from tokenizers import Tokenizer as Backend

    stored = json.loads((directory("byte_fallback") / "tokenizer.json").read_text())
    stored["model"]["vocab"]["\ufffd"] = piece = len(stored["model"]["vocab"])
    stream = Tokenizer(FileTokenizer(Backend.from_str(json.dumps(stored)), {})).stream()
    assert [stream.push([piece]) for _ in range(200)] == ["\ufffd"] * 200
    assert len(stream._ids) <= 64


def test_special_tokens_in_a_text():
    """They are left out, or included if they are wanted; then they also end a run of bytes."""
    loaded = tokenizer("byte_fallback")
    ids = [1, *byte_ids("byte_fallback", "é\xc3".encode()[:3]), 2, *byte_ids("byte_fallback", b"\xa9")]
    assert loaded.decode(ids) == "éé"
    assert loaded.decode(ids, special=True) == "<s>é\ufffd</s>\ufffd"


def test_spaces_stay_as_they_are():
    loaded = tokenizer("byte_level")
    text = "a bear . is n't ' here ' , no ?"
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_one_bos(name, tmp_path):
    loaded = tokenizer(name)
    bos = loaded.encode("")
    assert len(bos) == 1
    assert loaded.encode("<s>a bear") == loaded.encode("<s><s>a bear")
    assert loaded.encode("<s>a bear")[:2] != bos * 2
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    source = MODELS / name if name == "stories260K" else directory(name)
    chat = load_tokenizer(source, template)
    ids = chat.encode_chat("a bear")
    assert ids[:1] == bos
    assert ids.count(bos[0]) == 1
    assert chat.decode(ids).lstrip() == "[user] a bear\n[model] "
    assert ids == chat.encode_chat([{"role": "user", "content": "a bear"}])
    two = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert "[system] a\n[user] b\n[model] " in chat.decode(chat.encode_chat(two))
    template.write_text("<s>" + TEMPLATE)
    assert load_tokenizer(source, template).encode_chat("a bear").count(bos[0]) == 1


def test_same_vocabulary():
    first, second = tokenizer("byte_level"), tokenizer("byte_fallback")
    assert first.same_vocabulary(load_tokenizer(directory("byte_level")))
    assert not first.same_vocabulary(second)


def test_bad_input(tmp_path):
    assert not has_tokenizer(tmp_path)
    assert has_tokenizer(directory("byte_level"))
    with refused(r"has no tokenizer.*raw token ids can be used"):
        load_tokenizer(tmp_path)
    with refused("chat_template=FILE"):
        tokenizer("byte_level").encode_chat("a bear")
    with refused("`chat_template` must be", FileNotFoundError):
        load_tokenizer(directory("byte_level"), tmp_path / "absent.jinja")
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('no\nsystem role') }}")
    with refused("cannot render the conversation: no"):
        load_tokenizer(directory("byte_level"), template).encode_chat("a bear")
    (tmp_path / "tokenizer.json").write_text("{")
    with refused("cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_template_that_is_not_text_is_named(tmp_path):
    """The message says which file."""
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe\xfa")
    with refused(r"bad\.jinja is not text in UTF-8"):
        load_tokenizer(directory("byte_level"), tmp_path / "bad.jinja")


def test_copied_files_make_the_same_tokenizer(tmp_path):
    copy_files(directory("byte_level"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert load_tokenizer(tmp_path).encode(TEXTS[1]) == tokenizer("byte_level").encode(TEXTS[1])


CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
SETTINGS = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": True, "add_eos_token": False},
    {"pad_token": "</s>", "model_max_length": 512, "clean_up_tokenization_spaces": True},
    {"bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}},
    {"bos_token": None},
]


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback])
@pytest.mark.parametrize("changes", SETTINGS)
def test_a_tokenizer_from_its_file_alone_is_that_of_transformers(make, changes, tmp_path):
    """Ids with and without BOS and EOS, texts, special tokens, chat."""
    from transformers import AutoTokenizer

    make(tmp_path)
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(base | changes))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "chat_template.jinja").write_text("<s>" + TEMPLATE)
    same(load_tokenizer(tmp_path), Tokenizer(AutoTokenizer.from_pretrained(str(tmp_path))))


@pytest.mark.parametrize("name", ["small", "large", "sorted"])
def test_the_models_that_come_with_jaxspec_need_no_transformers(name):
    from transformers import AutoTokenizer

    same(
        load_tokenizer(CHECKPOINTS / name), Tokenizer(AutoTokenizer.from_pretrained(str(CHECKPOINTS / name)))
    )


def same(ours: Tokenizer, theirs: Tokenizer) -> None:
    assert isinstance(ours._loaded, FileTokenizer)
    assert (ours.vocab_size, ours._skipped) == (theirs.vocab_size, theirs._skipped)
    assert ours.same_vocabulary(theirs)
    for text in [*TEXTS, "<s>a bear</s>", "<s><s> a", " </s> b  ", "word " * 2000]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    every = range(theirs.vocab_size + 3)
    assert ours.decode(every) == theirs.decode(every)
    assert [*map(ours._is_text, every)] == [*map(theirs._is_text, every)]
    if theirs._loaded.chat_template:
        assert ours.encode_chat("a bear") == theirs.encode_chat("a bear")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"auto_map": {}},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"extra_special_tokens": ["<x>"]},
        {"eos_token": "<end>"},
        {"eos_token": "a"},
        {"added_tokens_decoder": {"1": {"content": "</s>", "special": False}}},
    ],
)
def test_whatever_else_is_left_to_transformers(changes, tmp_path):
    _byte_level(tmp_path)
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(base | changes))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert read_tokenizer(tmp_path) is None


def test_tokens_in_a_file_of_their_own_are_left_to_transformers(tmp_path):
    from transformers import AutoTokenizer

    _byte_level(tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ids = load_tokenizer(tmp_path).encode("a <tool> b")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": load_tokenizer(tmp_path).vocab_size}))
    theirs = AutoTokenizer.from_pretrained(str(tmp_path)).encode("a <tool> b")
    assert load_tokenizer(tmp_path).encode("a <tool> b") == theirs != ids


# Values of config.json that jaxspec accepts and transformers' class of the model type refuses.
REFUSED = {
    "exaone4": {"sliding_window_pattern": "LLLG", "num_hidden_layers": 4},
    "exaone4 without a pattern": {"sliding_window_pattern": None, "num_hidden_layers": 4},
    "llama": {"rope_scaling": {"rope_type": "llama3"}, "rope_theta": "x"},
    "qwen3": {"layer_types": ["full"], "num_hidden_layers": 4},
    "gemma3_text": {"layer_types": 7},
    "internlm3": {"hidden_size": "wide"},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2Tokenizer", None])
def test_a_tokenizer_does_not_depend_on_the_model_s_config(name, kind, tmp_path):
    _byte_level(tmp_path)
    settings = {"bos_token": "<s>", "eos_token": "</s>"} | ({"tokenizer_class": kind} if kind else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    content = {"model_type": name.split()[0], **REFUSED[name]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert load_tokenizer(tmp_path).encode(TEXTS[1]) == tokenizer("byte_level").encode(TEXTS[1])
    (tmp_path / "tokenizer.json").write_text("{")
    with refused(f"^{tmp_path}: the tokenizer cannot be loaded: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("normalized", [False, True])
def test_a_tokenizer_that_cannot_write_an_a(normalized, tmp_path):
    """It has no such token, or makes nothing of it; both stop no other text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers

    backend = Backend(models.WordLevel({"b": 0}))
    if normalized:
        backend.normalizer = normalizers.Replace("a", "")
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(tmp_path).encode("b") == [0]


@pytest.mark.full
def test_transformers_says_nothing(tmp_path):
    """A tokenizer that needs it is loaded, and used on a long text, without its notices; later ones are the user's."""
    shutil.copytree(directory("byte_level"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "added_tokens.json").write_text("{}")  # an older format, which only transformers reads
    assert read_tokenizer(tmp_path) is None
    code = (
        "import sys\nfrom pathlib import Path\nsys.modules['torch'] = None\n"
        "from jaxspec.io.tokenizers.tokenizer import load_tokenizer\n"
        "load_tokenizer(Path(sys.argv[1])).encode('a ' * 5000)\n"
        "import transformers; print(transformers.logging.get_verbosity())"
    )
    environment = {name: value for name, value in variables().items() if name != "TRANSFORMERS_VERBOSITY"}
    done = python("-c", code, tmp_path, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("30\n", "")


@pytest.mark.full
def test_transformers_is_imported_only_where_it_must_be():
    code = (
        "import sys, jaxspec.io.hf.huggingface; from jaxspec.io.tokenizers.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(CHECKPOINTS / 'small')!r}).encode('a'); print('transformers' in sys.modules)"
    )
    assert python("-c", code, check=True).stdout == "False\n"
