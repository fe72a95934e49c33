"""Saving and loading. In: a planned or plain model. Out: folders, complete at every moment."""
