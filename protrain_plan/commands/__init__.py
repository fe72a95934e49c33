"""One module per command: what it takes, and what it calls. Nothing is computed here."""
