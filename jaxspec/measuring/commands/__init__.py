"""The commands of measurements, and `convert`, which can measure int8; see the table in `jaxspec.cli`."""
