"""What every training job does around its loss: start a model, pack the data, run the loop, export."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from rich.console import Console
from tokenizers import Tokenizer

from jaxspec.io import files, hf_config, huggingface, method_files
from jaxspec.io import tokenizer as tokenizer_files
from jaxspec.io.extras import require
from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from training import command, export, induction, plots
from training.data import formats, packing, sizing, tokenizer
from training.loop import checkpoints, lock, loop, sharding, step
from training.loop.progress import counted
from training.losses import base
from training.losses.base import Loss
from training.options import SCRATCH, DataOptions, JobOptions, chosen_earlier, parse, plain, to_yaml
from training.reports import evaluation

OPTIONS_FILE = "options.yaml"
# Characters of each kind on which a tokenizer is learned, in proportion to the kinds' weights.
TOKENIZER_CHARACTERS = 12_000_000


class Objective(NamedTuple):
    """What sets a job apart.

    Attributes:
      loss: to be minimised.
      exits: layers at which acceptance is measured.
      judged: the exits whose mean held-out loss says which checkpoint is best; () for the last layer.
      target: the model that is to accept what the exits draft; None for the model's own last layer.
      extra: what config.json says under `jaxspec`.
    """

    loss: Loss
    exits: Sequence[int] = ()
    judged: Sequence[int] = ()
    target: tuple[LlamaConfig, Params] | None = None
    extra: dict[str, Any] | None = None


class Start(NamedTuple):
    """A model before its first step: config at full depth, float32 parameters, tokenizer."""

    config: LlamaConfig
    params: Params
    words: Tokenizer


Kinds = dict[str, list[formats.Document]]


def read_kinds(
    options: DataOptions, chat: formats.Chat, report: Callable[[str], None]
) -> tuple[Kinds, Kinds]:
    """(training, held-out) documents by kind.

    Raises:
      ValueError: a source cannot be read, or has too little to hold a part of it out.
    """
    kinds: Kinds = {}
    for source in options.data:
        found = formats.read(source.path, source.format, chat, options.skip_malformed, report)
        kinds.setdefault(source.kind, []).extend(found)
    parts: tuple[Kinds, Kinds] = ({}, {})
    for kind, documents in kinds.items():
        try:
            halves = packing.split(documents, options.held_out)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None
        for part, half in zip(parts, halves, strict=True):
            part[kind] = half
    return parts


def learn_tokenizer(kinds: Kinds, weights: dict[str, float], vocab_size: int) -> Tokenizer:
    """A tokenizer learned from a share of each kind that follows its weight."""
    total = sum(weights.values())

    def texts():
        for kind, documents in kinds.items():
            left = TOKENIZER_CHARACTERS * weights[kind] / total
            for document in documents:
                if left <= 0:
                    break
                yield document.text[: int(left)]
                left -= len(document.text)

    return tokenizer.train(texts(), vocab_size)


def start_model(options: JobOptions, kinds: Kinds, resumed: bool) -> Start:
    """The model to be trained. Nothing is written yet: the run directory may turn out to be another run's.

    Raises:
      ValueError: the shape is impossible, or the given model lacks what training needs.
    """
    if options.start != SCRATCH:
        return _given_model(Path(options.start), options.start_layers)
    shape = options.model
    if shape.tokenizer is not None:
        words = tokenizer.load(shape.tokenizer)
    elif resumed:
        words = tokenizer.load(options.run_directory)
    else:
        words = learn_tokenizer(kinds, options.data.weights, shape.vocab_size)
    config = LlamaConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_embeddings=shape.tied,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_ids=(tokenizer.EOS_ID,),
    )
    params = init_params(config, options.seed)
    if shape.induction:
        params = induction.add_circuit(config, params, options.seed)
    return Start(config, llama.truncate(params, shape.stages.layers_at(0)), words)


def _given_model(source: Path, layers: int | None) -> Start:
    words = tokenizer.load(source)
    config = huggingface.read_config(source)
    if layers is not None:
        config = config.truncated(layers)
    return Start(config, huggingface.load_params(source, config, jnp.float32), words)


def given_tokenizer(options: JobOptions) -> Path | None:
    """The directory whose tokenizer is taken; None where one is learned."""
    return options.model.tokenizer if options.start == SCRATCH else Path(options.start)


def put_tokenizer(options: JobOptions, kinds: Kinds, words: Tokenizer) -> None:
    """Puts the tokenizer's files into the run directory, instead of what a failed command left there."""
    run, given = options.run_directory, given_tokenizer(options)
    if given is not None and given.samefile(run):
        return
    for name in tokenizer_files.FILES:
        (run / name).unlink(missing_ok=True)
    if given is not None:
        tokenizer_files.copy_files(given, run)
        return
    # A model that learns conversations is used in the form in which it has read them.
    talks = any(document.chat for part in kinds.values() for document in part)
    tokenizer.save(words, run, options.model.context, formats.CHAT_TEMPLATE if talks else None)


def chat_of(options: JobOptions) -> formats.Chat:
    """How conversations are written: as the given model's or tokenizer's own template says."""
    given = given_tokenizer(options)
    return formats.Chat() if given is None else formats.chat_of(given)


def init_params(config: LlamaConfig, seed: int) -> Params:
    """Random float32 parameters; the products that write into the residual stream shrink with its depth."""
    params = llama.init_params(config, jax.random.key(seed))
    shrink = (2 * config.num_layers) ** -0.5
    for layer in params["layers"]:
        layer["attention"]["out"] *= shrink
        layer["mlp"]["down"] *= shrink
    return params


def document_marks(config: LlamaConfig) -> tuple[int, int]:
    """The tokens that begin and end every document.

    Raises:
      ValueError: the config does not name both.
    """
    if config.bos_token_id is None or not config.eos_token_ids:
        raise ValueError("the model's config names no BOS or no EOS token; training marks documents by both")
    return config.bos_token_id, config.eos_token_ids[0]


def data_key(
    options: DataOptions, documents: tuple[Kinds, Kinds], words: Tokenizer, marks: tuple[int, int]
) -> str:
    """A hash of all that the packed windows follow from."""
    texts = hashlib.sha256()
    for kinds in documents:
        for kind, part in kinds.items():
            texts.update(f"\0{kind}\0".encode())
            for document in part:
                texts.update(repr(document.spans).encode())
    about = [words.to_str(), marks, options.window, texts.hexdigest()]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def packed(
    options: JobOptions, documents: tuple[Kinds, Kinds], words: Tokenizer, marks: tuple[int, int], key: str
) -> tuple[dict[str, packing.Windows], dict[str, packing.Windows]]:
    """The packed (training, held-out) windows by kind, tokenised once and kept in the run directory."""

    def make() -> dict[str, dict[str, packing.Windows]]:
        return {
            name: {
                kind: packing.pack(tokenizer.encode_documents(words, part, *marks), options.data.window)
                for kind, part in kinds.items()
            }
            for name, kinds in zip(("training", "held_out"), documents, strict=True)
        }

    parts = packing.cached(options.run_directory / packing.TOKENS_FILE, key, make)
    return parts["training"], parts["held_out"]


def identity(options: JobOptions, start: Start, aim: Objective, module: str, key: str) -> dict[str, Any]:
    """What must stay as it was where a run goes on; all else, as its length, may change. Kept in run.json."""
    scratch = options.start == SCRATCH
    return {
        "job": module,
        "start": SCRATCH if scratch else method_files.fingerprint(start.config, start.params),
        "exits": list(aim.judged),
        "vocab_size": options.model.vocab_size if given_tokenizer(options) is None else None,
        "seed": options.seed,
        "held_out": options.data.held_out,
        "data": key[:16],
    }


def refuse_another(run: Path, config: LlamaConfig, wanted: dict[str, Any]) -> None:
    """Refuses to go on from the checkpoint of another run.

    Raises:
      ValueError: the directory's run has another model or identity; runs of before have only the first.
    """
    hint = f"give the options it was started with ({run / OPTIONS_FILE}), or another --run"
    if (run / "config.json").is_file() and hf_config.read_config(run) != config:
        raise ValueError(f"{run} holds a run of another model; {hint}")
    found = export.read_run(run).get("identity", {}) if (run / export.RUN_FILE).is_file() else {}
    changed = [name for name in wanted if name in found and found[name] != wanted[name]]
    if changed:
        there, asked = (", ".join(f"{name} {one[name]}" for name in changed) for one in (found, wanted))
        raise ValueError(f"{run} holds a run with {there}; asked for is {asked}: {hint}")


Options = TypeVar("Options", bound=JobOptions)


def train(
    options: Options,
    objective: Callable[[Options, Start], Objective],
    module: str,
    typed: str,
    console: Console,
) -> int:
    """Trains, then exports the best checkpoint; `module` is the job's, `typed` all that was typed.

    Returns:
      the exit status: 0 also where the time that was asked for is over; 128 and the signal's number where a
      signal ended it.

    Raises:
      ValueError: something given does not fit; the message says what to do.
    """
    if options.plot:
        require("plot", "matplotlib")
    documents = read_kinds(options.data, chat_of(options), console.print)
    with lock.exclusive(options.run_directory, console.print):
        return _train(options, objective, documents, module, typed, console)


def _train(
    options: Options,
    objective: Callable[[Options, Start], Objective],
    documents: tuple[Kinds, Kinds],
    module: str,
    typed: str,
    console: Console,
) -> int:
    run = options.run_directory
    resumed = checkpoints.has_checkpoint(run / "checkpoints")
    characters = sum(len(document.text) for part in documents[0].values() for document in part)
    earlier = chosen_earlier(run / OPTIONS_FILE) if resumed else {}
    options, chosen = options.settled(characters, earlier)
    if chosen:
        console.print(sizing.in_words(characters, chosen))
    start = start_model(options, documents[0], resumed)
    aim = objective(options, start)
    marks = document_marks(start.config)
    key = data_key(options.data, documents, start.words, marks)
    same = identity(options, start, aim, module, key)
    if resumed:
        refuse_another(run, start.config, same)
    else:  # whatever is there is of a command that failed before it had trained
        (run / export.RUN_FILE).unlink(missing_ok=True)
        put_tokenizer(options, documents[0], start.words)
    windows, held_out = packed(options, documents, start.words, marks, key)
    mesh = sharding.make_mesh()
    record_run(options, start.config, aim, same, windows, held_out, documents, typed, console)

    transform = step.optimizer(options.optimizer, options.loop.steps)
    measure = evaluation.make_measure(start.config, aim.exits, aim.judged, aim.target)
    parts = {
        kind: packing.fixed_batches(part, options.data.batch, options.data.held_out_rows)
        for kind, part in held_out.items()
    }
    weights = options.data.weights
    loss = base.in_dtype(aim.loss, jnp.dtype(options.compute_dtype))
    step_fn = step.make_step(loss, transform, options.seed)
    target = None if aim.target is None else sharding.place_state(mesh, aim.target[1])
    with checkpoints.Checkpoints(run / "checkpoints", options.loop.keep) as kept:
        result = loop.train(
            options.loop,
            run,
            kept,
            step.init_state(start.params, transform),
            lambda state, batch: step_fn(state, batch, target),
            packing.batches(windows, weights, options.data.batch, options.optimizer.accumulate, options.seed),
            lambda state: measure(state.params, parts, weights),
            console,
            options.model.stages if options.start == SCRATCH else None,
            mesh,
        )
    if result.reason != "steps":
        ended = "interrupted" if result.signal is not None else "out of the time given by --minutes"
        console.print(f"{ended} after step {int(result.state.step)}; the same command goes on from there")
    if options.output is not None:
        best, best_loss = export.export(run, options.output, options.samples, console.print)
        console.print(f"wrote step {best}, held-out loss {best_loss:.4f}, to {options.output}")
    if options.plot:
        drawn = plots.draw(run)
        why = "" if aim.exits else " (acceptance is measured where there are exits)"
        console.print("drew " + ", ".join(map(str, drawn)) + why)
    return 0 if result.signal is None else 128 + result.signal


def record_run(
    options: JobOptions,
    config: LlamaConfig,
    aim: Objective,
    same: dict[str, Any],
    windows: dict[str, packing.Windows],
    held_out: dict[str, packing.Windows],
    documents: tuple[Kinds, Kinds],
    typed: str,
    console: Console,
) -> None:
    """Writes what the run is into its directory: the model's config, the resolved options, the record."""
    run = options.run_directory
    earlier = export.read_run(run)["commands"] if (run / export.RUN_FILE).is_file() else []

    def tokens(parts: dict[str, packing.Windows]) -> dict[str, int]:
        return {kind: int((part["segments"] > 0).sum()) for kind, part in parts.items()}

    record = {
        "commands": [*(one for one in earlier if one != typed), typed],
        "identity": same,
        "options": plain(options),
        "parameters": llama.num_params(config),
        "documents": {kind: len(part) for kind, part in documents[0].items()},
        "tokens": {"training": tokens(windows), "held_out": tokens(held_out)},
        "exits": list(aim.exits),
    }
    content = hf_config.config_json(config, "float32") | ({"jaxspec": aim.extra} if aim.extra else {})
    files.write_json(run / "config.json", content)
    files.write_atomic(run / OPTIONS_FILE, to_yaml(options))
    files.write_atomic(run / export.RUN_FILE, json.dumps(record, indent=2) + "\n")
    console.print(
        f"{record['parameters']:,} parameters, {sum(tokens(windows).values()):,} training and "
        f"{sum(tokens(held_out).values()):,} held-out tokens of {counted(len(windows), 'kind', 'kinds')}, run in {run}"
    )


def main(
    kind: type[Options],
    objective: Callable[[Options, Start], Objective],
    module: str,
    arguments: Sequence[str] | None = None,
) -> int:
    """The command line of a job; returns the exit status."""

    def work(given: list[str], prog: str, console: Console) -> int:
        options = parse(kind, given, prog)
        return train(options, objective, module, shlex.join([*prog.split(), *given]), console)

    return command.run(module, work, arguments)
