"""Turns exceptions into an exit status and one line on standard error, for every command line of the project.

A warning also becomes one line on standard error while a command runs.
"""

from __future__ import annotations

import io
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Mapping

from jaxspec.console import interrupts
from jaxspec.console.distributed import complain, leave, lost
from jaxspec.console.environment import quieten
from jaxspec.console.status import FAILED, INTERRUPTED, UNREAD, WRONG
from jaxspec.host import progress
from jaxspec.host.extras import MissingExtra
from jaxspec.host.files import is_full, named_errors
from jaxspec.host.messages import fitted

# Before a name that is no part of a path, of a text in quotation marks or of a longer name.
_ALONE = r"(?<![\w./\\'\"`,-])"


class Failed(RuntimeError):
    """A command failed although its input was valid: exit status 1, and a message without the name of this type."""


class Guard:
    """Runs a command and turns an exception into an exit status and one line on standard error.

    Args:
      prog: the name of the program, with which the line begins, such as `jaxspec`.
      options: see the attribute.

    Attributes:
      options: returns option by parameter, for `in_options`. It may be set after construction, once the command has
        been read.
    """

    def __init__(self, prog: str, options: Callable[[], Mapping[str, str]] = dict) -> None:
        self._prog = prog
        self._told_full = False
        self.options = options

    def __call__(self, run: Callable[[], int]) -> int:
        """Runs `run`, which returns its exit status.

        Returns:
          the status of `run`, or 2 after bad input (ValueError, OSError), 1 after another error or a full disk, 130
          after Ctrl-C, 141 if the reader of standard output has closed it. One of several connected processes does not
          return: it exits with this status.

        Raises:
          BaseException: the error itself, if JAXSPEC_DEBUG is set.
        """
        quieten()
        status = self._status(run)
        leave(status)
        return status

    def _status(self, run: Callable[[], int]) -> int:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # the shell closed it (`>&-`); discard the output
                setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        # Write "?" for a character that the stream cannot encode. An error would lose the rest of the text.
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
            sys.stdout.reconfigure(errors="replace")
        try:
            with interrupts.Interruptible(self._prog), warnings.catch_warnings():
                warnings.showwarning = self._warn
                status = run()
                with named_errors("standard output"):
                    sys.stdout.flush()
            return status
        except SystemExit as stop:  # help was printed
            return stop.code if isinstance(stop.code, int) else 0
        except KeyboardInterrupt:
            return self._say("interrupted", INTERRUPTED) if interrupts.is_first_line() else INTERRUPTED
        except BrokenPipeError:
            # Else Python reports the error again when it flushes standard output at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return UNREAD
        except BaseException as error:  # a panic of a library in Rust is not an Exception
            if os.environ.get("JAXSPEC_DEBUG"):
                raise
            said = in_options(one_line(error), self.options())
            if is_full(error):
                return self._say(f"error: {said}; make room and give the same command again", FAILED)
            if isinstance(error, (ValueError, OSError)):
                return self._say(f"error: {said}", WRONG)
            # For example a device out of memory, a backend that does not start, or a bug.
            kind = "" if isinstance(error, (MissingExtra, Failed)) else f"{type(error).__name__}: "
            return self._say(f"error: {lost(error)}{kind}{one_line(error)}", FAILED)

    def _warn(self, message: Warning | str, *where: typing.Any, **more: typing.Any) -> None:
        if isinstance(message, Warning) and is_full(message):
            if self._told_full:  # the compile cache warns for each program; one warning is enough
                return
            self._told_full = True
        text = " ".join(str(message).split())
        with progress.hidden():
            print(fitted(f"{self._prog}: warning: {in_options(text, self.options())}"), file=sys.stderr)

    def _say(self, what: str, status: int) -> int:
        complain(f"{self._prog}: {what}")
        return status


def one_line(error: BaseException) -> str:
    """Returns the message of an error in one line, or the name of its type if it has no message."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def in_options(message: str, options: Mapping[str, str]) -> str:
    """Replaces the Python parameters in an error message by the options of a command line.

    Many parameters are ordinary words, so only four forms are replaced: `name` in backquotes, name=value, "name is …"
    at the beginning of the message, and a name with an underscore. Text in quotation marks, in a path or directly after
    a comma, such as data=1,model=4, is not changed.

    Args:
      message: the message of a library function.
      options: option by parameter, from `option_names`.
    """
    if not options:
        return message
    name = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    long = (
        "|".join(sorted((re.escape(one) for one in options if "_" in one), key=len, reverse=True)) or "(?!)"
    )
    forms = (
        rf"`(?P<quoted>{name})`",
        rf"{_ALONE}(?P<set>{name})=(?P<value>'[^']*'|[^\s,;:)]+)",
        rf"\A(?P<first>{name})(?= is )",
        rf"{_ALONE}(?P<long>{long})(?![\w./\\'\"`=])",
    )

    def option(match: re.Match[str]) -> str:
        found = options[next(filter(None, match.group("quoted", "set", "first", "long")))]
        value = match["value"]
        if value is None or value == "True":
            return found
        return found.replace("--", "--no-", 1) if value == "False" else f"{found} {value.strip(chr(39))}"

    return re.sub("|".join(forms), option, message)
