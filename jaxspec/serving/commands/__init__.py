"""The commands `serve` and `batch`; see the table in `jaxspec.cli`."""
