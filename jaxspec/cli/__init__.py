"""The command line: `jaxspec`, or `python -m jaxspec`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxspec.cli.status import FAILED, INTERRUPTED, UNREAD, WRONG

DESCRIPTION = """Lossless speculative decoding of Llama-type models in JAX: the same text, faster.

Try: jaxspec generate "Once upon a time" --method ngram

What a command takes: jaxspec COMMAND --help. The version: jaxspec --version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments; by default those of the process.

    Returns:
      the exit status: 0; 2 after a wrong use and 1 where the machine failed, told in one line on standard
      error (`JAXSPEC_DEBUG=1` shows the traceback); 130 after Ctrl-C; 141 where the reader of standard
      output went away.
    """
    status = _guarded(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        # Leaves at once: the usual way waits for what compiles in the background, perhaps for a long time.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _guarded(arguments: list[str]) -> int:
    """Runs a command and turns whatever stops it into an exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as stop:  # help was printed
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        print("jaxspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python would complain once more when it flushes standard output at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except (ValueError, OSError) as error:
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        print(f"jaxspec: error: {_one_line(error)}", file=sys.stderr)
        return WRONG
    except Exception as error:  # a device out of memory, a backend that does not start, a bug
        if os.environ.get("JAXSPEC_DEBUG"):
            raise
        print(f"jaxspec: error: {type(error).__name__}: {_one_line(error)[:500]}", file=sys.stderr)
        return FAILED


def _run(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        from jaxspec import __version__

        print(f"jaxspec {__version__}")
        return 0
    from jaxspec.cli.compare import Compare
    from jaxspec.cli.convert import Convert
    from jaxspec.cli.generate import Generate
    from jaxspec.cli.inspect import Inspect
    from jaxspec.cli.parsing import parse
    from jaxspec.cli.profile import Profile
    from jaxspec.cli.search import Search
    from jaxspec.cli.tune import Tune

    commands = {
        "generate": Generate,
        "compare": Compare,
        "profile": Profile,
        "convert": Convert,
        "inspect": Inspect,
        "search": Search,
        "tune": Tune,
    }
    command = parse(commands, arguments or ["--help"], DESCRIPTION)
    _quieten()
    from jaxspec.engine import compilation_cache

    compilation_cache.enable()
    return command.run()


def _quieten() -> None:
    """Keeps libraries from writing to standard error what a user can do nothing about."""
    # transformers: that PyTorch is missing. XLA: details of cached executables.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
