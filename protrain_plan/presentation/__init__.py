"""Output for people: text, pages, exports. In: records and outcomes."""
