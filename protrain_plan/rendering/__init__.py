"""What the commands print: tables for people, plain data for `--json`; one module for each kind."""
