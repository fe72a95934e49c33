"""The user's objects: a planned model and its optimizer, and their habits with them."""
