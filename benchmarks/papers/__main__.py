"""`python -m benchmarks.papers`."""

from benchmarks.papers.command import main

raise SystemExit(main())
