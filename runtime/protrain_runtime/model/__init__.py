"""What users hold: a planned model and its optimizer, and their habits with them."""
