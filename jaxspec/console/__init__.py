"""Shared by the command lines of the project: parsing, errors, exit statuses, output files and tables."""
