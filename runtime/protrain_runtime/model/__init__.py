"""The user's objects: a planned model, its optimizer, and their use between steps."""
