"""A report as text, JSON, JUnit XML, SARIF and annotations of GitHub: one module each."""
