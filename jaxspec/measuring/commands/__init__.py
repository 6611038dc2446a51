"""The commands of measurements, and `convert`; see the table in `jaxspec.cli`."""
