"""Exit statuses. 0 is success; those of signals are 128 plus the signal's number, as in shells."""

from __future__ import annotations

FAILED = 1
WRONG = 2
INTERRUPTED = 130
UNREAD = 141
