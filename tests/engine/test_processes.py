"""Two processes with four simulated devices each decode the same tokens as one with one device, and end together."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxspec import load
from jaxspec.cli.options import ModelOptions
from jaxspec.console.distributed import ProcessOptions, join, options_in
from jaxspec.measuring.line_log import LineLog
from tests import refused, variables
from tests.commands import CONFIG, PROMPT, called, one_error, write_tiny

TARGET = dataclasses.replace(CONFIG, vocab_size=304, num_heads=8, num_kv_heads=2)
PROMPTS = [[5], [7, 1, 7]]
DECODE = """
import json, sys

import jax

from jaxspec import load
from jaxspec.console import distributed

address, number, model, prompts = sys.argv[1:]
options = distributed.ProcessOptions(coordinator_address=address, num_processes=2, process_id=int(number))
distributed.join(options, "data=2,model=4")
assert (jax.device_count(), jax.local_device_count()) == (8, 4)
found = {}
for mesh, method, more in (
    ("data=2,model=4", "layerskip", {"exit_layer": 1, "num_draft_tokens": 2}),
    ("model=8", "autoregressive", {}),
    ("model=8", "draft-model", {"draft": model, "num_draft_tokens": 2}),
):
    lm = load(model, mesh=mesh)
    rows = lm.generate(json.loads(prompts), max_new_tokens=5, method=method, **more)
    found[mesh, method] = [row.tokens for row in rows], sum(row.statistics.num_draft_tokens for row in rows)
    times = [row.statistics.elapsed_ms for row in rows]
    agreed = distributed.processes.agreed(lm.mesh, *times)
    assert list(agreed) == times, "what was measured is the same in all"
print(json.dumps([lm.fingerprint, list(found.values())]))
distributed.leave(0)
"""


def free_address() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def begun(*command: str) -> subprocess.Popen[str]:
    """Starts a process with four simulated devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    given, pipe = {"env": variables(XLA_FLAGS=flags), "start_new_session": True}, subprocess.PIPE
    return subprocess.Popen([sys.executable, *command], stdout=pipe, stderr=pipe, text=True, **given)


def ended(pair: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Returns exit status, standard output and standard error of each process."""
    said = [process.communicate(timeout=600) for process in pair]
    return [(process.returncode, *texts) for process, texts in zip(pair, said, strict=True)]


def command_of_two(*arguments: str, more: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    """Runs a command in two processes; only the second gets `more`."""
    shared = (
        f"--coordinator-address {free_address()} --num-processes 2 --heartbeat-timeout-seconds 5 --process-id"
    )
    command = ["-m", "jaxspec", *arguments, *shared.split()]
    return [begun(*command, *own) for own in (["0"], ["1", *more])]


@pytest.mark.full
def test_two_processes_decode_as_one(tmp_path_factory):
    """With plain decoding and two methods, with copies of key/value heads, and with a draft from a file."""
    model = write_tiny(tmp_path_factory, TARGET)
    address = free_address()
    pair = [begun("-c", DECODE, address, str(one), str(model), json.dumps(PROMPTS)) for one in range(2)]
    (first, out, err), second = ended(pair)
    assert (first, second[0]) == (0, 0), (err, second[2])
    assert (err, *second[1:]) == ("", "", "")
    lm = load(model)
    fingerprint, found = json.loads(out)
    assert fingerprint == lm.fingerprint
    expected = [row.tokens for row in lm.generate(PROMPTS, max_new_tokens=5)]
    assert [tokens for tokens, _ in found] == [expected] * 3
    assert [drafted > 0 for _, drafted in found] == [True, False, True]


def records(path: Path) -> dict[int, dict]:
    """Returns the results of a batch by their ids; each id has one."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["id"]: line for line in lines}


@pytest.mark.slow
def test_two_processes_answer_a_batch_as_one(tmp_path_factory, tmp_path):
    """A line is wrong, another one sampled; there are more lines than rows."""
    model = write_tiny(tmp_path_factory, TARGET)
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    ids = [[5], [7, 1, 7], [5, 5], [9], [2, 3]]
    lines = [{"id": at, "prompt": prompt} for at, prompt in enumerate(ids)]
    lines += [{"id": 5, "prompt": []}, {"id": 6, "prompt": [5], "temperature": 1.0, "seed": 3}]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    options = ("--model", str(model), "--max-new-tokens", "5", "--max-batch", "2", "--method", "ngram")
    command = ("batch", str(prompts), "--output", str(output), *options, "--mesh", "data=2,model=4")
    (first, out, err), second = ended(command_of_two(*command))
    assert (first, out, second) == (0, "", (0, "", "")), (err, second)
    assert "7 prompts answered (1 of them with an error)" in err
    found = records(output)
    expected = load(model).generate(ids, max_new_tokens=5, method="autoregressive")
    texts = load(model).tokenizer
    assert [found[at].get("tokens", found[at]["text"]) for at in range(len(ids))] == [
        one.tokens if texts is None else one.text for one in expected
    ]
    assert "empty" in found[5]["error"]
    assert found[6]["num_tokens"] == 5


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "which"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        *(pytest.param(signal.SIGINT, which, marks=pytest.mark.slow) for which in (0, 1)),
    ],
)
def test_processes_end_together(tmp_path_factory, capsys, number, which):
    """If one is lost the other ends with an error; Ctrl-C in one interrupts both.

    Until then process 0 has written the output of a single process; the other prints only its error.
    """
    model = str(write_tiny(tmp_path_factory, TARGET))
    arguments = ["generate", PROMPT, "--model", model, "--max-new-tokens", "400", "--ignore-eos"]
    pair = command_of_two(*arguments, "--mesh", "model=8")
    begin = pair[0].stdout.read(3)  # it is decoding
    os.kill(pair[which].pid, number)
    found = ended(pair)
    text = begin + found[0][1].removesuffix("\n")
    assert called(capsys, *arguments)[1].startswith(text.rstrip("\ufffd"))
    assert found[1][1] == ""
    if number == signal.SIGINT:
        assert [one[0] for one in found] == [130, 130], found
        assert found[0][2].splitlines()[-1] == "jaxspec: interrupted"
        assert found[1][2] == ""
        return
    status, _, err = found[1 - which]
    assert status not in (0, None)
    known = (
        "the JAX distributed service detected fatal errors",
        f"jaxspec: process {1 - which}: error: another process is lost; see its error",
    )
    assert any(text in err for text in known), err


@pytest.mark.full
def test_other_options(tmp_path_factory):
    """Each process prints one line; otherwise they would wait for each other forever."""
    model = str(write_tiny(tmp_path_factory, TARGET))
    arguments = ["generate", PROMPT, "--model", model, "--mesh", "model=8", "--max-new-tokens", "20"]
    found = ended(command_of_two(*arguments, more=("--max-new-tokens", "80")))
    what = (
        "another process was given another command, see its error",
        "--max-new-tokens is 80 here and 20 in process 0",
    )
    assert found == [
        (2, "", f"jaxspec: process {one}: error: {said}; give each process the same{' command' * one}\n")
        for one, said in enumerate(what)
    ]


def alone(*arguments):
    """Returns exit status, standard output and standard error of a process that starts alone."""
    shared = ["-m", "jaxspec", "generate", PROMPT, "--mesh", "model=8", "--join-timeout-seconds", "2"]
    return ended([begun(*shared, *arguments)])[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("host", "number"),
    [
        ("127.0.0.1", "0"),
        *(
            pytest.param(host, "1", marks=pytest.mark.slow)
            for host in ("127.0.0.1", "no.such.host.invalid", "a" * 300)
        ),
    ],
)
def test_processes_that_do_not_come(host, number):
    """The process ends with JAX's error."""
    address = f"{host}:{free_address().rpartition(':')[2]}"
    status, out, err = alone("--coordinator-address", address, "--num-processes", "2", "--process-id", number)
    assert status not in (0, None)
    assert (out, "Deadline" in err or "DEADLINE" in err) == ("", True)


@pytest.mark.full
def test_other_number_of_processes():
    """The process that the first one does not expect reports that they cannot connect."""
    shared = ("-m", "jaxspec", "generate", PROMPT, "--mesh", "model=8")
    address = ("--coordinator-address", free_address())
    first = begun(*shared, *address, "--num-processes", "2", "--process-id", "0")
    status, out, err = alone(*address, "--num-processes", "3", "--process-id", "2")
    os.kill(first.pid, signal.SIGKILL)
    ended([first])
    assert status != 0
    assert (out, err == "") == ("", False)


def test_a_port_in_use():
    with socket.create_server(("", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ProcessOptions(coordinator_address=address, num_processes=2, process_id=0)
        with refused(rf"process 0 cannot listen at {address} \(.*; give another `coord"):
            join(options, "model=8")


OTHERS = """
import sys
from pathlib import Path

from jaxspec import load
from jaxspec.console import distributed
from jaxspec.measuring.line_log import LineLog

address, number, model, folder = sys.argv[1:]
options = distributed.ProcessOptions(coordinator_address=address, num_processes=2, process_id=int(number))
distributed.join(options, "model=8")
lm = load(model, mesh="model=8")
try:
    lm.generate([5, int(number)], max_new_tokens=2)
except ValueError as error:
    said = str(error)
# Only the first one's folder has the log.
log = LineLog(Path(folder) / number / "log", {"of": "this"}, of="test")
distributed.complain(f"test: {said}; {log.entries}")
distributed.leave(0)
"""


@pytest.mark.full
def test_other_prompts_and_files(tmp_path_factory, tmp_path):
    """Different prompts are an error in each process; process 0 alone reads and writes a log."""
    model = str(write_tiny(tmp_path_factory, TARGET))
    (tmp_path / "0").mkdir()
    LineLog(tmp_path / "0" / "log", {"of": "this"}, of="test").add({"text": "ä"})
    address = free_address()
    found = ended([begun("-c", OTHERS, address, str(one), model, str(tmp_path)) for one in range(2)])
    said = "the prompts, or options of the texts, in process 1 differ from those in process 0; give the same to each"
    assert found == [(0, "", f"test: process {one}: {said} process; [{{'text': 'ä'}}]\n") for one in range(2)]


@pytest.mark.full
def test_wrong_processes(capsys, tmp_path_factory):
    """One line each."""

    def run(*arguments):
        return called(capsys, "generate", PROMPT, "--model", model, "--max-new-tokens", "2", *arguments)

    model = write_tiny(tmp_path_factory)
    here = "--coordinator-address 127.0.0.1:1 --num-processes"
    for arguments, says in (
        (f"{here} 2", "--coordinator-address, --num-processes and --process-id go together"),
        (f"{here} 2 --process-id 2", "--process-id is 2; give a number from 0 to 1"),
        (f"{here} 0 --process-id 0", "--num-processes is 0; give at least 1"),
        ("--coordinator-address here --num-processes 1 --process-id 0", "is 'here'; give HOST:PORT"),
        ("--distributed", "several processes run on one mesh; give its axes, such as --mesh data=2,model=4"),
        ("--distributed --heartbeat-timeout-seconds 0", "--heartbeat-timeout-seconds is 0; give at least 1"),
        ("--distributed --join-timeout-seconds 0", "--join-timeout-seconds is 0; give at least 1"),
    ):
        assert says in one_error(run, *arguments.split())


def test_options_of_a_command():
    """At any position in the command."""

    @dataclasses.dataclass(frozen=True)
    class Command:
        model: ModelOptions
        more: int = 1

    processes = ProcessOptions(distributed=True)
    assert options_in(Command(ModelOptions(mesh="model=8", processes=processes))) == (processes, "model=8")
    assert options_in(Command(ModelOptions())) == (ProcessOptions(), None)
